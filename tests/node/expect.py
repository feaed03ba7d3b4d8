"""What prolog and epilog may say."""

from __future__ import annotations

import subprocess


def silent(done: subprocess.CompletedProcess[str]) -> bool:
    """Success: not a byte."""
    return (done.returncode, done.stdout, done.stderr) == (0, "", "")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one complaint of a script that must not fail all the same."""
    assert done.returncode == 0
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("gemini-hpc: ")
    assert lines[0].isprintable()
    return lines[0]
