"""`--watch`: one text after the other, in place on a terminal, until Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc.cli import live_view

PROGRAM = """
import itertools, sys
from gemini_hpc.cli import live_view
{before}
counted = itertools.count()
live_view.show_live(lambda: f"job 7: protected {{next(counted)}}", 0.05)
print("ended well")
"""


def watch(tmp_path: Path, before: str, until: bytes) -> tuple[int, bytes]:
    """Return the exit status and the output of a view on a terminal that Ctrl-C ends after `until` was shown."""
    script = tmp_path / "view.py"
    script.write_text(PROGRAM.format(before=before))
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, script], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, asked = b"", False
    try:
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the child has closed the terminal
                break
            if until in shown and not asked:
                asked = True
                child.send_signal(signal.SIGINT)
        return child.wait(20), shown
    finally:
        child.kill()
        child.wait()
        os.close(ours)


@pytest.mark.parametrize("before", ["", "live_view.importlib.util.find_spec = lambda name: None"])
def test_a_terminal(tmp_path: Path, before: str) -> None:
    status, shown = watch(tmp_path, before, b"protected 3" if before else b"3")
    assert status == 0 and b"ended well" in shown and b"Traceback" not in shown
    assert (b"\x1b[2J" in shown) == bool(before), "rich redraws in place"


def test_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    texts = iter(("one", "two"))
    with pytest.raises(StopIteration):
        live_view.show_live(lambda: next(texts), 0.0)
    assert capsys.readouterr().out == "one\ntwo\n"
