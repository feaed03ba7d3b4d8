"""Trainings that hang, or seem to, with real agents: found or left alone, told, and begun again by launchers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from .agents import RealJob
from .launch import Process, environments

pytestmark = pytest.mark.slow

STEPS, AT = 60, 40
HANG_S = 5
MakeJob = Callable[..., RealJob]


class Ranks:
    """One on each node of a job; launchers: each below one of its own."""

    def __init__(self, job: RealJob | None, how: str, *, launchers: bool = True, most: int = 3, **more: str) -> None:
        arguments = [str(STEPS), str(AT), how]
        script = str(Path(__file__).with_name("hanging.py"))
        self.processes = []
        for rank, place in enumerate(environments(3)):
            env = {**place, "GEMINI_STEP": "1.0", **more}
            if job is not None:
                env["GEMINI_SOCKET"] = job.nodes[rank].path
            if launchers:
                words = [f"--max-restarts={most}", script, *arguments]
                self.processes.append(Process(env, module="gemini_hpc.launch", arguments=words))
            else:
                self.processes.append(Process(env, module="tests.train.hanging", arguments=arguments))

    def output(self) -> str:
        """Return the output of the ranks."""
        return "".join(text for process in self.processes for text in process.read())

    def wait(self) -> list[str]:
        """What the ranks have come to."""
        codes = [process.wait(120) for process in self.processes]
        assert codes == [0, 0, 0], self.output()
        return sorted(re.findall(r"rank \d+ result [-+.0-9a-fxp]+;", self.output()))

    def begun(self) -> set[tuple[int, int]]:
        """Attempts, and the version that each began with."""
        found = re.findall(r"rank \d+ attempt (\d+) begins at (\d+);", self.output())
        return {(int(attempt), int(version)) for attempt, version in found}


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def begin(job: RealJob | None, how: str, **more: object) -> Ranks:
        made.append(Ranks(job, how, **more))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for process in (p for r in made for p in r.processes):
        process.signal(signal.SIGKILL)
        process.wait(10)


def events(job: RealJob, name: str) -> list[tuple[str, str]]:
    """Host and detail."""
    found = [(node.name, e.detail) for node in job.nodes for e in job.inspect(node).events if e.name == name]
    return sorted(set(found))


def test_one_rank_sleeps_for_ever(real_job: MakeJob, ranks: Callable[..., Ranks]) -> None:
    job = real_job(3, 2, hang=HANG_S)
    run = ranks(job, "sleep")
    results = run.wait()
    [(host, told)] = events(job, "hung")
    assert host == job.nodes[1].name and told.startswith("rank 1: no progress for "), told
    assert f"collectives of step {AT}" in told and "wait in allreduce" in told, told
    assert "forgotten (hanging.py:" in told and "< train (hanging.py:" in told, told
    path = Path(told.rpartition("; ")[2])
    assert path.parent == Path(job.nodes[1].path).parent and "in forgotten" in path.read_text(), told
    assert run.begun() == {(0, 0), (1, AT - 1)}
    [(_, why)] = events(job, "relaunch")
    assert f"attempt 1 begins: hung: {host}: rank 1: " in why
    assert len(results) == 3 and results == ranks(None, "none").wait(), "bit for bit"


def test_one_rank_is_stopped(real_job: MakeJob, ranks: Callable[..., Ranks]) -> None:
    job = real_job(3, 2, hang=HANG_S)
    run = ranks(job, "stop")
    run.wait()
    [(host, told)] = events(job, "hung")
    assert (
        host == job.nodes[1].name and told.startswith("rank 1: ") and told.endswith("its stack could not be read")
    ), told
    # it was stopped while its last version was on its way, or after that
    assert run.begun() in ({(0, 0), (1, AT - 1)}, {(0, 0), (1, AT - 2)})


def test_a_pause_of_all_ranks_is_no_hang(real_job: MakeJob, ranks: Callable[..., Ranks]) -> None:
    job = real_job(3, 2, hang=HANG_S)
    run = ranks(job, "pause")
    run.wait()
    assert not events(job, "hung") and run.begun() == {(0, 0)}


def test_where_no_restart_is_left(real_job: MakeJob, ranks: Callable[..., Ranks]) -> None:
    job = real_job(3, 2, hang=HANG_S)
    run = ranks(job, "sleep", most=0)
    assert all(process.wait(120) for process in run.processes)
    assert run.begun() == {(0, 0)} and len(events(job, "hung")) == 1
    [(_, why)] = events(job, "not_relaunched")
    assert " hung: " in why and "--max-restarts=0 is reached" in why, why


@pytest.mark.parametrize("restarted", [False, True], ids=["told", "killed"])
def test_without_launchers(real_job: MakeJob, ranks: Callable[..., Ranks], *, restarted: bool) -> None:
    """Killed only where somebody starts the step again."""
    job = real_job(3, 2, hang=HANG_S)
    run = ranks(job, "sleep", launchers=False, **({"GEMINI_RESTARTS_STEP": "1"} if restarted else {}))
    until(lambda: events(job, "hung"), 60, 0.2, what="hung")
    if restarted:
        assert run.processes[1].wait(20) == -signal.SIGKILL
        return
    told = {node.name: job.inspect(node).trainings[0].hung for node in job.nodes}
    assert all(text.startswith(f"{job.nodes[1].name}: rank 1: ") for text in told.values()), told
    assert all(process.poll() is None for process in run.processes)
