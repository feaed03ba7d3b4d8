"""Whom the reaper ends, and when: its rules over a real ledger, with steps and answers as a test has them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.node import job_steps, ledger, reaper, stale_jobs
from gemini_hpc.node.ledger import LedgerEntry

SETTINGS = Settings(retention_s=10.0, held_retention_s=1000.0, tier_flush_s=0.0, attach_timeout_s=1.0)
SILENT_S, ANSWERING_S = reaper.compute_grace_periods(SETTINGS)
JOB = 7


class Node:
    """One job's agent: whether its job has a step, whether it answers, how long ago things were."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = path / "run"
        self.run_dir.mkdir(0o755)
        self.settings = replace(SETTINGS, run_dir=str(self.run_dir))
        self.inside, self.answers, self.step = [4711], False, False
        self.killed = 0
        self.now_s = 100_000.0
        monkeypatch.setattr(ledger, "read_boot_clock_s", lambda: self.now_s)
        monkeypatch.setattr(reaper, "list_agent_pids", lambda entry: self.inside)
        monkeypatch.setattr(reaper, "_answers", lambda run_dir, entry: self.answers)
        monkeypatch.setattr(reaper, "kill_pids", self._kill)
        monkeypatch.setattr(reaper, "AGAIN_S", ())
        monkeypatch.setattr(job_steps, "find_jobs_with_steps", lambda: {JOB} if self.step else set())
        with ledger.open_ledger(self.settings.run_dir) as entries:
            entries.record_start(JOB, 65534, 0)

    def _kill(self, entry: LedgerEntry, inside: list[int]) -> None:
        self.killed += 1
        self.inside = []

    def entry(self) -> LedgerEntry | None:
        with ledger.open_ledger(self.settings.run_dir) as entries:
            return entries.get(JOB)

    def after(self, seconds: float) -> float | None:
        """A look so much later."""
        self.now_s += seconds
        return reaper.check_entries(self.settings)

    def ended(self) -> None:
        with ledger.open_ledger(self.settings.run_dir) as entries:
            entries.record_end(JOB, 65534, 0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    if os.geteuid() != 0:
        pytest.skip("the ledger is root's")
    return Node(tmp_path, monkeypatch)


def test_silent_one_is_ended_after_the_retention(node: Node) -> None:
    node.ended()
    assert node.after(1.0) == pytest.approx(SILENT_S - 1.0), "the next look is when it is due"
    assert node.after(SILENT_S - 2.0) is not None and not node.killed
    assert node.after(2.0) is None and node.killed and node.entry() is None


def test_one_that_answers_has_the_time_of_held_jobs(node: Node) -> None:
    node.answers = True
    node.ended()
    assert node.after(ANSWERING_S - 1.0) is not None and not node.killed
    assert node.after(2.0) is None and node.killed


def test_one_that_has_let_go_is_struck_out(node: Node) -> None:
    node.ended()
    node.inside = []
    assert node.after(0.1) is None and not node.killed and node.entry() is None


def test_one_that_just_starts_is_not_doubted(node: Node) -> None:
    """Its socket is not there yet, nor has its job a step."""
    assert node.after(0.5) == pytest.approx(SETTINGS.attach_timeout_s + reaper.YOUNG_S - 0.5), "looked at again"
    entry = node.entry()
    assert entry is not None and entry.doubted_s is None and not node.killed


@pytest.mark.parametrize("way", ["answers", "step"])
def test_a_doubt_is_taken_back(node: Node, way: str) -> None:
    """Silent between two steps for a while, a day ago: then neither its silence nor its epilog is an old one."""
    assert node.after(60.0) is not None
    entry = node.entry()
    assert entry is not None and entry.doubted_s is not None
    setattr(node, way, True)
    assert node.after(1.0) is None
    assert node.entry() == replace(entry, doubted_s=None)
    node.answers, node.step = False, False
    assert node.after(86_400.0) is not None and not node.killed, "a doubt of its own"
    node.answers = True
    node.ended()
    entry = node.entry()
    assert entry is not None and entry.ended_s == node.now_s and entry.doubted_s is None
    assert node.after(SILENT_S + 1.0) is not None and not node.killed


def test_doubt_for_as_long_as_the_retention_ends_it(node: Node) -> None:
    node.after(60.0)
    assert node.after(SILENT_S - 1.0) is not None and not node.killed
    assert node.after(2.0) is None and node.killed and node.entry() is None


def test_gone_without_an_epilog_is_struck_out(node: Node) -> None:
    node.inside = []
    node.step = True
    assert node.after(60.0) is None and node.entry() is not None, "its supervisor has it started again"
    node.step = False
    assert node.after(1.0) is None and node.entry() is None and not node.killed


def test_job_that_runs_here_again_is_out_of_its_hands(node: Node) -> None:
    node.ended()
    with ledger.open_ledger(node.settings.run_dir) as entries:
        entries.record_start(JOB, 65534, 1)
    node.step = True
    assert node.after(10 * ANSWERING_S) is None and not node.killed
    entry = node.entry()
    assert entry is not None and (entry.restart, entry.ended_s) == (1, None)


def test_job_that_goes_on_here_without_a_prolog_is_not_ended(node: Node) -> None:
    """slurmd skips one at times: the incarnation after the one whose epilog came has steps here."""
    node.ended()
    node.step = True
    for _ in range(5):
        node.after(ANSWERING_S + 10.0)
        node.now_s += SILENT_S
    assert not node.killed and (entry := node.entry()) is not None and entry.ended_s is None
    node.step = False
    with ledger.open_ledger(node.settings.run_dir) as entries:
        entries.record_end(JOB, 65534, 1)
    entry = node.entry()
    assert entry is not None and (entry.restart, entry.ended_s) == (1, node.now_s), "its own end counts"


def test_a_later_incarnations_end_is_not_the_earlier_ones(node: Node) -> None:
    node.ended()
    node.now_s += 500.0
    with ledger.open_ledger(node.settings.run_dir) as entries:
        entries.record_end(JOB, 65534, 0)
        assert (entry := entries.get(JOB)) is not None and entry.ended_s == node.now_s - 500.0, "told twice"
        entries.record_end(JOB, 65534, 1)
        assert (entry := entries.get(JOB)) is not None and entry.ended_s == node.now_s


def test_directories_that_ended_jobs_have_left_go_after_a_moment(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another job's prolog; a job that the ledger knows is waited for otherwise."""
    monkeypatch.setattr(stale_jobs, "_answers", lambda directory, uid: directory.endswith("/7"))
    for name in ("7", "9", "12"):
        (node.run_dir / name).mkdir()
    os.utime(node.run_dir / "7", (0, 0))
    os.utime(node.run_dir / "9", (0, 0))
    assert reaper.sweep_directories(node.settings), "the youngest one's owner may look at its log"
    assert sorted(path.name for path in node.run_dir.glob("[0-9]*")) == ["12", "7"]
    os.utime(node.run_dir / "12", (0, 0))
    assert not reaper.sweep_directories(node.settings)
    assert [path.name for path in node.run_dir.glob("[0-9]*")] == ["7"]


def test_command_lines_of_users_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in memory that a user can make hang."""
    read: list[str] = []
    usual = open

    def opened(path: str, mode: str = "r") -> object:
        read.append(path)
        return usual(path, mode)

    monkeypatch.setattr(job_steps, "open", opened, raising=False)
    monkeypatch.setattr(job_steps, "has_real_uid", lambda pid, uid: pid == str(os.getpid()))
    job_steps.find_jobs_with_steps()
    assert read == [f"/proc/{os.getpid()}/cmdline"]
