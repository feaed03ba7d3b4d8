"""Lines of ours: where they cannot be written, they are lost, and nothing else happens."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import pytest

from gemini_hpc import lines

SCRIPT = """
import os, signal, sys
from gemini_hpc import lines
{before}
for _ in range(3):
    lines.write_line("a node is dead")
lines.flush_streams()
print("trained")
"""
BROKEN = {
    "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "no reader": "a, b = os.pipe(); os.dup2(b, 2); os.close(a); os.close(b)",
    "no reader, SIGPIPE ends": "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
    "a, b = os.pipe(); os.dup2(b, 2); os.close(a); os.close(b)",
    "descriptor closed": "os.close(2)",
    "closed": "sys.stderr.close()",
    "none": "sys.stderr = None",
    "a full file of the script's": "sys.stderr = open('/dev/full', 'w')",
}


@pytest.mark.parametrize("how", BROKEN)
def test_stderr_that_takes_nothing(how: str) -> None:
    """Also at the end of the process, when Python writes what is left in buffers."""
    code = SCRIPT.format(before=BROKEN[how])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done


def test_a_stream_of_the_scripts_own_may_raise_what_it_wants() -> None:
    class Tee(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyError(text)

    lines.put(Tee(), "lost\n")


def test_one_behind_the_other(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(2), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        stream.write("of the script\n")  # in its buffer
        lines.write_line("of ours \u2713 \ud800")
    assert capfd.readouterr().err == "of the script\ngemini-hpc: of ours \u2713 \\ud800\n"


def test_signals_are_blocked_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    lines.write_line("nothing")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
