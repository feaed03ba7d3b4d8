"""Which directories a prolog's sweep removes: not those of a job that is just starting here as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini_hpc.node import job_steps, ledger, stale_jobs


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    """With an old directory of job 7, whose agent nobody hears from."""
    if os.geteuid() != 0:
        pytest.skip("the ledger is root's")
    run = tmp_path / "run"
    (run / "7").mkdir(parents=True)
    os.utime(run / "7", (0, 0))
    monkeypatch.setattr(job_steps, "find_jobs_with_steps", set)
    monkeypatch.setattr(stale_jobs, "_answers", lambda directory, uid: False)
    run_fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    yield run, run_fd
    os.close(run_fd)


def sweep(run_dir: tuple[Path, int]) -> bool:
    """Whether it is there still when job 8 has begun here."""
    path, run_fd = run_dir
    assert stale_jobs.remove(run_fd, str(path), except_job=8) == []
    return (path / "7").exists()


def test_a_leftover_goes(run_dir: tuple[Path, int]) -> None:
    assert not sweep(run_dir)


def test_a_job_that_begins_here_in_this_moment_keeps_its_directory(
    run_dir: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prolog has found it there from before; it has no step yet, and its agent does not answer yet."""
    with ledger.open_ledger(str(run_dir[0])) as entries:
        entries.record_start(7, 65534, 1)
    assert sweep(run_dir)
    later_s = ledger.read_boot_clock_s() + stale_jobs.AGE_MIN_S + 1.0
    monkeypatch.setattr(ledger, "read_boot_clock_s", lambda: later_s)
    assert not sweep(run_dir)
