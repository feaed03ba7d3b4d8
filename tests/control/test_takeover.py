"""What a restarted controller does with nodes that an earlier one had begun to fence, against a scripted Slurm."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.control import probe, recoveries, tasks
from gemini_hpc.control.eventlog import EventLogs
from gemini_hpc.control.fencing import REASON, Port
from gemini_hpc.control.journal import Journal
from gemini_hpc.control.primary import Primary
from gemini_hpc.control.probe import Look, Target
from gemini_hpc.control.recoveries import Recoveries
from gemini_hpc.control.recovery import Recovery
from gemini_hpc.control.registry import Registry
from gemini_hpc.control.slurm import UnknownJob
from gemini_hpc.control.slurm.facts import Config, Job, Node, Reservation
from gemini_hpc.control.slurm.text import parse_node

from .fake_slurm import FakeSlurm
from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-running.txt").read_text().splitlines()[0]
JOB = dataclasses.replace(parse_job(LINE), nodes=("n1", "n2", "n3"))


class HalfDone(FakeSlurm):
    """A running job; n2 was drained, and not yet set DOWN."""

    def __init__(self, reason: str = REASON, flags: frozenset[str] = frozenset(("DRAIN",))) -> None:
        line = "CPUTot=4 RealMemory=2000 State=ALLOCATED Partitions=main"
        self.all = {n: parse_node(f"NodeName={n} NodeAddr={n} {line}") for n in ("n1", "n2", "n3")}
        self.all["n2"] = dataclasses.replace(self.all["n2"], reason=reason, flags=flags)
        self.current: Job | None = JOB
        self.strangers: set[tuple[int, int]] = set()
        self.boot = 0.0
        self.done: list[str] = []

    async def job(self, raw_id: int) -> Job:
        if self.current is None:
            raise UnknownJob("gone")
        return self.current

    async def nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        wanted = list(names)
        return {n: node for n, node in self.all.items() if not wanted or n in wanted}

    async def owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        return {n: {(JOB.user_id, JOB.raw_id), *self.strangers} for n in names}

    async def config(self) -> Config:
        return Config((("ctl", "ctl"),), "/x", self.boot, {})

    async def reservations(self) -> list[Reservation]:
        return []

    async def partitions(self) -> dict[str, str]:
        return {"main": "UP"}

    async def node_down(self, name: str, reason: str) -> Node:
        self.done.append(f"down {name}")
        self.all[name] = dataclasses.replace(self.all[name], state="DOWN", reason=reason)
        self.current = dataclasses.replace(JOB, state="COMPLETED", restarts=JOB.restarts)
        return self.all[name]

    async def node_resume(self, name: str) -> None:
        self.done.append(f"resume {name}")
        self.all[name] = dataclasses.replace(self.all[name], flags=frozenset())


def take_over(slurm: HalfDone, path: Path, **settings: float) -> list[str]:
    """Begins where a controller was killed between DRAIN and DOWN of n2; what is done to nodes then."""
    journal = Journal(str(path / "journal"))
    key = f"{JOB.raw_id}.{JOB.restarts}"
    opened = {"members": ["n1", "n2", "n3"], "dead": ["n2"], "survivors": ["n1", "n3"]}
    journal.write(key, "open", "before", job=JOB.raw_id, restart=JOB.restarts, **opened)
    journal.write(key, "down", "before", node="n2", user_id=JOB.user_id)
    given = {"fence_confirm_s": 0.3, "slurm_settle_s": 0.1, "fence_budget_nodes": 1} | settings
    whole = Settings(**given, state_dir=str(path))  # type: ignore[arg-type]
    registry = Registry(str(path / "jobs"))

    async def work() -> None:
        primary, logs = Primary(slurm), EventLogs(str(path / "jobs"))
        home = Recoveries(whole, slurm, journal, logs, registry, primary)
        await home.resume()
        deadline = time.monotonic() + 10
        while home.active(JOB.raw_id) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        home.cancel()

    asyncio.run(work())
    journal.close()
    return slurm.done


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Look]:
    """n2 is silent in every way, the others answer."""
    found = {"n2": Look(Port.SILENT, Port.SILENT, Port.SILENT)}
    alive = Look(Port.ANSWERS, Port.ANSWERS, Port.ANSWERS)

    async def look(target: Target) -> Look:
        await asyncio.sleep(0.01)
        return found.get(target.address, alive)

    async def looks(targets: dict[str, Target]) -> dict[str, Look]:
        return {n: await look(t) for n, t in targets.items()}

    async def reached(targets: dict[str, tuple[str, int]]) -> dict[str, Port]:
        return {n: found.get(n, alive).slurmd for n in targets}

    monkeypatch.setattr(probe, "look", look)
    monkeypatch.setattr(probe, "looks", looks)
    monkeypatch.setattr(probe, "reached", reached)
    return found


def test_a_dead_one_is_finished_and_counts_once(tmp_path: Path) -> None:
    """The budget of one node is not spent by the same node."""
    assert take_over(HalfDone(), tmp_path) == ["down n2"]


@pytest.mark.parametrize("port", [Port.ANSWERS, Port.REFUSES, Port.HANGS])
def test_one_with_a_sign_of_life_is_given_back(tmp_path: Path, seen: dict[str, Look], port: Port) -> None:
    """slurmd that is just being started anew, or a kernel that accepts, is no death."""
    seen["n2"] = Look(port, Port.SILENT, port)
    assert take_over(HalfDone(), tmp_path) == ["resume n2"]


def test_a_living_kernel_is_enough(tmp_path: Path, seen: dict[str, Look]) -> None:
    seen["n2"] = Look(Port.SILENT, Port.SILENT, Port.REFUSES)
    assert take_over(HalfDone(), tmp_path) == ["resume n2"]


def test_the_other_vetoes_hold_too(tmp_path: Path) -> None:
    slurm = HalfDone()
    slurm.strangers = {(4242, 9)}
    assert take_over(slurm, tmp_path) == ["resume n2"]


def test_where_the_job_is_gone_nothing_is_fenced(tmp_path: Path) -> None:
    slurm = HalfDone()
    slurm.current = None
    assert take_over(slurm, tmp_path) == ["resume n2"]


@pytest.mark.parametrize(
    ("reason", "flags"),
    [("broken fan", frozenset(("DRAIN",))), (REASON, frozenset[str]()), ("", frozenset[str]())],
)
def test_a_node_that_we_have_not_drained_is_left_alone(tmp_path: Path, reason: str, flags: frozenset[str]) -> None:
    """A reason of ours without a drain is what Slurm from 24.11 on leaves of a node that was resumed."""
    assert take_over(HalfDone(reason, flags), tmp_path) == []


def test_a_takeover_that_fails_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.05)
    good, calls = recoveries.Recoveries._resume_one, list[int]()

    async def faulty(self: Recoveries, *args: object) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise ValueError("a fault of ours")
        await good(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(recoveries.Recoveries, "_resume_one", faulty)
    assert take_over(HalfDone(), tmp_path) == ["down n2"] and len(calls) == 3
    events = (tmp_path / "jobs" / f"{JOB.raw_id}.jsonl").read_text()
    assert events.count("task_died") == 2


# ---- faults and ends of the controller's own --------------------------------------------------------------

KEY = f"{JOB.raw_id}.{JOB.restarts}"


def make(path: Path, slurm: HalfDone, **settings: float) -> Recoveries:
    given = {"fence_confirm_s": 0.3, "slurm_settle_s": 0.1} | settings
    whole = Settings(**given, state_dir=str(path))  # type: ignore[arg-type]
    logs, registry = EventLogs(str(path / "jobs")), Registry(str(path / "jobs"))
    return Recoveries(whole, slurm, Journal(str(path / "journal")), logs, registry, Primary(slurm))


def opened(home: Recoveries, **more: int) -> None:
    """A recovery has begun."""
    data = {"members": ["n1", "n2", "n3"], "dead": ["n2"], "survivors": ["n1", "n3"]}
    home.journal.write(KEY, "open", "before", job=JOB.raw_id, restart=JOB.restarts, **data, **more)


async def until(said: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not said():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


def test_a_recovery_whose_death_cannot_be_told_is_still_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def work() -> None:
        home = make(tmp_path, HalfDone())
        track = home.registry.track(JOB)
        recovery = Recovery(home, track, JOB.restarts)
        opened(home)

        async def run() -> None:
            raise ValueError("a fault of ours")

        recovery.run = run  # type: ignore[method-assign]
        with monkeypatch.context() as patched:
            patched.setattr(EventLogs, "add", full)
            await home._run((JOB.raw_id, JOB.restarts), recovery)
        await until(lambda: not home.journal.left_open() and not home.active(JOB.raw_id))
        home.cancel()

    asyncio.run(work())
