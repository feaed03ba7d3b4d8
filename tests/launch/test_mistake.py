"""What an exception tells the user of a script: kind, place in the user's own code, traceback without our frames."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc import lines
from gemini_hpc.client import mistake

SCRIPT = """\
import json
import sys

def fails():
    json.loads("{")

if sys.argv[1] == "deep":
    fails()
elif sys.argv[1] == "name":
    print(nothing)
elif sys.argv[1] == "exit":
    sys.exit(3)
elif sys.argv[1] == "hook":
    sys.excepthook = lambda *told: print("a hook of the user's:", told[0].__name__, file=sys.stderr)
    1 / 0
"""


def ran(script: Path, *words: str) -> tuple[int, str]:
    """Under a launcher without an agent."""
    argv = [sys.executable, "-m", "gemini_hpc.launch", str(script), *words]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_frames_of_ours_are_not_shown(script: Path) -> None:
    for word, last in (("deep", "json.decoder.JSONDecodeError: "), ("name", "NameError: name 'nothing'")):
        status, said = ran(script, word)
        assert status == 1 and said.splitlines()[-1].startswith(last), said
        assert said.startswith(f'Traceback (most recent call last):\n  File "{script}", line '), said
        assert "gemini_hpc" not in said and "runpy" not in said, said
    assert ran(script, "exit") == (3, "")
    assert ran(script, "hook") == (1, "a hook of the user's: ZeroDivisionError\n")


def test_a_script_that_is_no_python(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = (\n")
    status, said = ran(path)
    assert status == 1 and "SyntaxError: '(' was never closed" in said, said


def test_the_place_is_the_users_own() -> None:
    """Behind it may come frames of libraries."""
    with pytest.raises(ValueError, match="Expecting") as found:
        json.loads("{")
    line = found.tb.tb_lineno if found.tb is not None else 0
    assert mistake.describe_error(found.value) == f"JSONDecodeError at test_mistake.py:{line}"
    broken = SyntaxError("bad", ("/home/u/train.py", 7, 1, "x = ("))
    assert mistake.describe_error(broken) == "SyntaxError at train.py:7"
    assert mistake.describe_error(SystemExit(3)).startswith("exit 3 at ")


def test_lines_of_ours_are_not_kept_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The hook may wait for long: for a node that may be dead."""

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        lines.write_line("rank 0: node n2 is dead")
        assert capsys.readouterr().err == "gemini-hpc: rank 0: node n2 is dead\n"
        print("Traceback ...", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", hook)
    assert mistake.format_traceback(ValueError()) == "Traceback ...\n" and capsys.readouterr().err == ""


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def test_what_is_a_lack_of_memory() -> None:
    assert mistake.is_memory_error(MemoryError())
    assert mistake.is_memory_error(OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not mistake.is_memory_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
