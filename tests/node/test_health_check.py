"""The site's health check, run by a launcher or by root."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gemini_hpc.node.health_check import find_problem


def look(path: Path | str, limit_s: float = 10.0, *, stop: bool = False) -> tuple[str, list[str]]:
    said: list[str] = []
    problem = find_problem(str(path), lambda: stop, said.append, limit_s)
    return "" if problem is None else problem.text, said


def program(directory: Path, text: str) -> Path:
    path = directory / "check"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("exit 0", ""),
        ("echo all is well", ""),
        ("echo; echo ' Xid 79 '; echo more; exit 1", "Xid 79"),
        ("exit 3", "the health check ended with status 3"),
        ("echo no > /dev/stderr; exit 1", "the health check ended with status 1"),
        ("kill -9 $$", "the health check ended with status 137"),
        ("printf 'a\\033[2Jb\\377'; exit 1", "a?[2Jb\ufffd"),
        ("head -c 2000000 /dev/zero | tr '\\0' x; exit 1", "x" * 150),
        ("sleep 60 & echo red; exit 1", "red"),  # what it leaves behind is not waited for
    ],
)
def test_what_it_says(tmp_path: Path, text: str, found: str) -> None:
    assert look(program(tmp_path, text)) == (found, [])


def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    path = program(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600 & echo $! >> {tmp_path}/pid; wait")
    assert look(path, 0.5) == ("the health check does not end within 0.5 s", [])
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in (tmp_path / "pid").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_step_that_is_ended_does_not_wait(tmp_path: Path) -> None:
    assert look(program(tmp_path, "sleep 600"), 600.0, stop=True) == ("", [])


def test_a_check_that_cannot_be_run_is_no_sick_node(tmp_path: Path) -> None:
    assert look("check")[0] == "" and "absolute path" in look("check")[1][0]
    assert look(tmp_path / "none") == ("", [f"health_check: {tmp_path}/none: No such file or directory"])
    (tmp_path / "data").write_text("no program")
    assert look(tmp_path / "data")[1] == [f"health_check: {tmp_path}/data: Permission denied"]


def test_it_gets_a_fixed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = program(tmp_path, 'echo "$(/usr/bin/env | /usr/bin/sort | /usr/bin/tr "\\n" " ") $(pwd)"; exit 1')
    found, _ = look(path)
    assert "LC_ALL=C" in found and "PATH=/usr/sbin:/usr/bin:/sbin:/bin" in found and found.endswith(" /"), found
    assert "LD_PRELOAD" not in found and str(tmp_path) not in found, found


EXAMPLE = Path(__file__).parents[2] / "examples" / "health_check"
LINE = "[  12.3] NVRM: Xid (PCI:0000:3b:00): %d, pid=1, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("dmesg", "smi", "found"),
    [
        ("exit 1", None, ""),
        ("echo nothing", "echo '0, 0'; echo '1, [N/A]'", ""),
        (f"echo '{LINE % 31}'", "echo '0, 0'", ""),  # a program's
        (f"echo '{LINE % 79}'", "echo '0, 0'", "Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
        ("exit 1", "echo 'Unable to determine the device handle'; exit 15", "nvidia-smi: Unable to determine"),
        ("exit 1", "echo '0, 0'; echo '1, 2'", "GPU 1: 2 uncorrected ECC errors"),
    ],
)
def test_the_example(tmp_path: Path, dmesg: str, smi: str | None, found: str) -> None:
    for name, text in (("dmesg", dmesg), ("nvidia-smi", smi)):
        if text is not None:
            program(tmp_path, text).rename(tmp_path / name)
    path = program(tmp_path, f"PATH={tmp_path}:$PATH exec {EXAMPLE}")
    said, _ = look(path)
    assert said.startswith(found) and bool(said) == bool(found), said
