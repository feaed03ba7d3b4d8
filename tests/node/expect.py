"""What prolog and epilog may say."""

from __future__ import annotations

import subprocess


def silent(done: subprocess.CompletedProcess[str]) -> bool:
    """Success: not a byte."""
    return (done.returncode, done.stdout, done.stderr) == (0, "", "")


def one_line(done: subprocess.CompletedProcess[str], case: str = "") -> str:
    """The one complaint of a script that must not fail all the same; `case` names it in a failure."""
    assert (done.returncode, done.stdout) == (0, ""), f"{case}: {done}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1, f"{case}: {done.stderr}"
    assert lines[0].startswith("gemini-hpc: "), f"{case}: {lines[0]}"
    assert lines[0].isprintable(), f"{case}: {lines[0]!r}"
    return lines[0]
