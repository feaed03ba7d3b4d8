"""The site's program that hears of a spent budget."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest

from gemini_hpc.config import Settings, find_program_problem
from gemini_hpc.controller import alert
from gemini_hpc.controller.alert import Alerts
from gemini_hpc.controller.journal import Journal


def program(tmp_path: Path, body: str, mode: int = 0o755) -> Path:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(mode)
    return path


def tell(tmp_path: Path, path: Path | str, *what: tuple[str, int, str, str], wait_s: float = 1.0) -> None:
    journal = Journal(str(tmp_path / "journal"))

    async def work() -> None:
        alerts = Alerts(Settings(alert_program=str(path)), journal)
        for one in what:
            alerts.send_alert(*one)
        deadline = time.monotonic() + wait_s
        while alerts._tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        alerts.close()
        await asyncio.sleep(0.1)

    asyncio.run(work())
    journal.close()


def test_it_gets_four_arguments_and_a_fixed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_LIKE", "x")
    path = program(tmp_path, f'{{ for a; do echo "$a"; done; pwd; env; }} >{tmp_path}/said')
    text = "budget: 2 nodes fenced; $(touch /tmp/never) `id` \"'"
    tell(tmp_path, path, ("budget", 7, "n2", text), wait_s=10)
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines[:5] == ["budget", "7", "n2", text, "/"]
    assert {line.split("=")[0] for line in lines[5:]} <= {"PATH", "LC_ALL", "PWD", "SHLVL", "_", "OLDPWD"}


def test_the_same_is_told_once_and_one_kind_seldom(tmp_path: Path) -> None:
    path = program(tmp_path, f"echo $2 >>{tmp_path}/said")
    told = [("budget", job, "n2", "x") for job in (7, 7, 8)] + [("user budget", 9, "n2", "x")]
    tell(tmp_path, path, *told, wait_s=10)
    assert (tmp_path / "said").read_text().split() == ["7", "9"]
    lines = (tmp_path / "journal").read_text().splitlines()
    assert sum('"alert"' in line for line in lines) == 3, "in the journal each job and node once"


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert, "PROGRAM_S", 0.5)
    path = program(tmp_path, f"sleep 4711 & echo $! >{tmp_path}/pid; wait")
    tell(tmp_path, path, ("budget", 7, "n2", "x"), wait_s=10)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_what_is_not_run(tmp_path: Path) -> None:
    good = program(tmp_path, "true")
    assert find_program_problem(str(good)) == ""
    assert "absolute" in find_program_problem("program")
    assert find_program_problem(str(tmp_path / "nowhere"))
    assert find_program_problem(str(tmp_path))
    for mode in (0o775, 0o757, 0o644):
        good.chmod(mode)
        assert find_program_problem(str(good)), oct(mode)
    good.chmod(0o755)
    os.chown(good, 5001, 5001)
    assert "root" in find_program_problem(str(good))
    os.chown(good, 0, 0)
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    good.rename(other := shared / "true")
    assert "in its place" in find_program_problem(str(other)) and str(shared) in find_program_problem(str(other))
    (link := tmp_path / "link").symlink_to(other)
    assert "in its place" in find_program_problem(str(link))
    shared.chmod(0o1777)
    assert find_program_problem(str(other)) == ""


def test_one_that_is_not_fit_is_logged_and_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, "relative", ("budget", 7, "n2", "x"))
    assert "event=alert-failed" in caplog.text and "absolute" in caplog.text


def test_a_journal_that_cannot_be_written_does_not_keep_the_program_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "write_line", full)
    path = program(tmp_path, f"echo $1 $2 >>{tmp_path}/said")
    tell(tmp_path, path, ("task died", 0, "", "watcher: OSError"), wait_s=10)
    assert (tmp_path / "said").read_text() == "task died 0\n" and "event=alert-not-kept" in caplog.text
