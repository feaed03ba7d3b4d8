"""Removal in a directory whose owner changes it between any two of root's calls, at a moment that is chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemini_hpc.node import job_directory, stale_jobs
from gemini_hpc.node.job_directory import JobDirError

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run directory with job 7's in it, a directory `real` in that; and beside it what must stay."""
    (tmp_path / "run" / "7" / "real").mkdir(parents=True)
    (tmp_path / "run" / "7" / "real" / "file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()
    fd = os.open(tmp_path / "run", os.O_RDONLY | os.O_DIRECTORY)
    yield tmp_path, fd
    os.close(fd)


def when(monkeypatch: pytest.MonkeyPatch, call: str, name: str, after: bool, swap: Callable[[], None]) -> None:
    """`swap`, once, right before or after root's `call` on `name`."""
    real = getattr(os, call)
    done: list[str] = []

    def wrapped(path: str, *args: object, **kwargs: object) -> object:
        first = path == name and not done
        if first:
            done.append(path)
        if first and not after:
            swap()
        try:
            return real(path, *args, **kwargs)
        finally:
            if first and after:
                swap()

    monkeypatch.setattr(os, call, wrapped)


@pytest.mark.parametrize(
    ("call", "after"), [("unlink", False), ("unlink", True), ("open", False), ("open", True), ("rmdir", False)]
)
def test_directory_that_becomes_a_link(
    run_dir: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    path, fd = run_dir
    inside = path / "run" / "7"

    def swap() -> None:
        (inside / "real").rename(path / "elsewhere")
        (inside / "real").symlink_to(path / "target")

    when(monkeypatch, call, "real", after, swap)
    try:
        job_directory.remove(fd, "7")
    except JobDirError:
        pass
    else:
        assert not inside.exists()
    assert (path / "target" / "precious").exists()


def test_new_entries_while_it_is_emptied(run_dir: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What came too late is left for another time, and said."""
    path, fd = run_dir
    when(monkeypatch, "rmdir", "7", False, (path / "run" / "7" / "late").touch)
    with pytest.raises(JobDirError, match="could not be removed"):
        job_directory.remove(fd, "7")
    job_directory.remove(fd, "7")
    assert not (path / "run" / "7").exists()


def test_owners_who_take_up_the_time_do_not_keep_other_leftovers(
    run_dir: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner can stop the child that looks after an agent, and each time costs the most that it may."""
    path, fd = run_dir
    for job in (*range(100, 120), 200):
        (path / "run" / str(job)).mkdir()

    def slow(run_fd: int, run_dir: str, name: str, age_s: float) -> bool:
        if name != "200":
            time.sleep(0.01)
        return name == "200"

    monkeypatch.setattr(stale_jobs, "TIMEOUT_S", 0.04)
    monkeypatch.setattr(stale_jobs, "_is_leftover", slow)
    for _ in range(200):
        stale_jobs.remove(fd, str(path / "run"), except_job=7)
        if not (path / "run" / "200").exists():
            break
    assert not (path / "run" / "200").exists()
