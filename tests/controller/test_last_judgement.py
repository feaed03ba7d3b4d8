"""What a recovery does between "confirmed" and DOWN, when things change meanwhile, against a scripted Slurm."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller import probe
from gemini_hpc.controller.event_log import EventLogs
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.probe import ProbeResult
from gemini_hpc.controller.recoveries import Recoveries
from gemini_hpc.controller.registry import Registry, Track
from gemini_hpc.slurm import SlurmRefused, SlurmUnreachable
from gemini_hpc.slurm.facts import Job, Node, Reservation, WatchedJob
from gemini_hpc.wire.controller import Report

from .test_takeover import JOB, HalfDone

pytestmark = pytest.mark.slow

OTHER = dataclasses.replace(JOB, raw_id=JOB.raw_id + 1, nodes=("m1", "m2", "m3"))
SILENT, ALIVE = (ProbeResult(port, port, port) for port in (Port.SILENT, Port.ANSWERS))


class TwoJobs(HalfDone):
    """Two jobs on three nodes each. `reserving`, `setting_down`: what happens while Slurm does that."""

    def __init__(self) -> None:
        super().__init__("", frozenset())
        self.all |= {n: dataclasses.replace(self.all["n1"], name=n, address=n) for n in OTHER.nodes}
        self.jobs = {JOB.raw_id: JOB, OTHER.raw_id: OTHER}
        self.held: dict[str, list[str]] = {}
        self.requeue_refused = ""
        self.reserving: Callable[[], Awaitable[None]] | None = None
        self.setting_down: Callable[[], None] = lambda: None
        self.asked: Callable[[set[str]], None] = lambda names: None

    async def read_job(self, raw_id: int) -> Job:
        return self.jobs[raw_id]

    async def set_node_down(self, name: str, reason: str) -> Node:
        self.setting_down()
        await asyncio.sleep(0.3)
        self.done.append(f"down {name}")
        self.all[name] = dataclasses.replace(self.all[name], state="DOWN", reason=reason)
        for job in self.jobs.values():
            if name in job.nodes:
                self.jobs[job.raw_id] = dataclasses.replace(job, state="COMPLETING")
        return self.all[name]

    async def requeue_job(self, job: Job) -> None:
        self.jobs[job.raw_id] = dataclasses.replace(job, state="PENDING", restarts=job.restarts + 1)
        if self.requeue_refused:
            raise SlurmRefused(self.requeue_refused)

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        self.done.append(f"pin {','.join(nodes)}")
        return job

    async def set_start_time(self, job: Job, start: str) -> None: ...

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        self.asked(set(names))
        return await super().read_owners(names)

    async def read_reservations(self) -> list[Reservation]:
        return [Reservation(n, tuple(nodes), ("u",), "ACTIVE", frozenset()) for n, nodes in self.held.items()]

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        if self.reserving is not None:
            reserving, self.reserving = self.reserving, None
            await reserving()
        self.held[name] = list(nodes)

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        self.held[name] = list(nodes)

    async def delete_reservation(self, name: str) -> bool:
        return self.held.pop(name, None) is not None

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        return ()

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        return list(names)

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        return []


class Controller:
    """The recoveries of a controller that has just been told of dead nodes."""

    def __init__(self, slurm: TwoJobs, path: Path, **settings: float) -> None:
        given = {"fence_confirm_s": 0.4, "slurm_settle_s": 0.1} | settings
        whole = Settings(**given, state_dir=str(path))  # type: ignore[arg-type]
        self.slurm, self.path = slurm, path
        self.journal, registry = Journal(str(path / "journal")), Registry(str(path / "jobs"))
        logs = EventLogs(str(path / "jobs"))
        self.home = Recoveries(whole, slurm, self.journal, logs, registry, Primary(slurm), Lemons(str(path), 0))
        self._tracks = {raw_id: registry.track_job(job) for raw_id, job in slurm.jobs.items()}
        for track, job in zip(self._tracks.values(), slurm.jobs.values(), strict=True):
            track.stored.allocations[job.restarts] = list(job.nodes)

    def track(self, job: Job) -> Track:
        return self._tracks[job.raw_id]

    def report(self, job: Job, *dead: str) -> None:
        alive = tuple(n for n in job.nodes if n not in dead)
        for host in dead:
            message = Report(job.raw_id, job.restarts, host, alive, time.time())
            self.home.accept_report(self.track(job), alive[0], message)

    def events(self, job: Job) -> str:
        return (self.path / "jobs" / f"{job.raw_id}.jsonl").read_text()

    async def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    def end(self) -> None:
        self.home.cancel()
        self.journal.close()


def test_a_node_that_comes_back_while_others_are_reserved_is_not_set_down(
    tmp_path: Path, found: dict[str, ProbeResult]
) -> None:
    slurm, found["n2"] = TwoJobs(), SILENT

    async def back() -> None:
        del found["n2"]
        await asyncio.sleep(0.5)

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        slurm.reserving = back
        controller.report(JOB, "n2")
        await controller.until(lambda: not controller.home.is_active(JOB.raw_id))
        assert '"confirmed"' in controller.events(JOB) and slurm.done == []
        assert not slurm.held and not controller.journal.read_open(), "let go of, and closed"
        controller.end()

    asyncio.run(work())


def test_of_two_nodes_that_suspect_each_other_the_dead_one_is_set_down(
    tmp_path: Path, found: dict[str, ProbeResult]
) -> None:
    """Neither has another witness than the other."""
    slurm, found["n2"] = TwoJobs(), SILENT
    pair = dataclasses.replace(JOB, nodes=("n1", "n2"))
    slurm.jobs[JOB.raw_id] = pair

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        for alive, dead in (("n1", "n2"), ("n2", "n1")):
            message = Report(JOB.raw_id, JOB.restarts, dead, (alive,), time.time())
            controller.home.accept_report(controller.track(pair), alive, message)
        await controller.until(lambda: bool(slurm.done))
        assert slurm.done[0] == "down n2"
        told = [msgspec.json.decode(line) for line in controller.events(JOB).splitlines()]
        assert [e["host"] for e in told if e.get("name") == "dismissed"] == ["n1"]
        controller.end()

    asyncio.run(work())


def test_a_second_node_that_is_found_dead_while_others_are_reserved(
    tmp_path: Path, found: dict[str, ProbeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had been reported, too, and left to Slurm: its kernel lived then. It is set DOWN as a survivor that has
    died, once, and the recovery goes on."""
    slurm = TwoJobs()
    found |= {"n2": SILENT, "n3": ProbeResult(Port.REFUSES, Port.REFUSES, Port.REFUSES)}

    async def slow(targets: dict[str, probe.Target]) -> dict[str, ProbeResult]:
        found["n3"] = SILENT
        await asyncio.sleep(0.5)
        return {n: await probe.probe_node(t) for n, t in targets.items()}

    monkeypatch.setattr(probe, "probe_nodes", slow)

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        controller.report(JOB, "n2", "n3")
        await controller.until(lambda: "down n2" in slurm.done)
        await asyncio.sleep(0.5)
        assert slurm.done == ["down n3", "down n2"] and "task_died" not in controller.events(JOB)
        recovery = controller.home._active[JOB.raw_id, JOB.restarts]
        assert recovery.survivors is not None and sorted(recovery.survivors.dead) == ["n2", "n3"]
        controller.end()

    asyncio.run(work())


def test_a_second_node_that_comes_back_while_the_first_is_set_down_is_a_survivor_again(
    tmp_path: Path, found: dict[str, ProbeResult]
) -> None:
    slurm = TwoJobs()
    found |= {"n2": SILENT, "n3": SILENT}

    def back() -> None:
        del found["n3"]

    slurm.setting_down = back

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        controller.report(JOB, "n2", "n3")
        await controller.until(lambda: bool(slurm.done))
        await asyncio.sleep(1.0)
        assert slurm.done == ["down n2"]
        recovery = controller.home._active[JOB.raw_id, JOB.restarts]
        assert recovery.survivors is not None and recovery.survivors.dead == ["n2"]
        assert recovery.survivors.names == ["n1", "n3"] and recovery.is_acting
        controller.end()

    asyncio.run(work())


def test_a_survivor_is_looked_at_once_more_before_it_is_set_down(
    tmp_path: Path, found: dict[str, ProbeResult]
) -> None:
    """It has been silent, and is back when Slurm has said what it knows of it."""
    slurm, found["n2"] = TwoJobs(), SILENT
    judged = list[set[str]]()

    def back(names: set[str]) -> None:
        if "n3" in names:
            judged.append(names)
            found.pop("n3", None)

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        controller.report(JOB, "n2")
        await controller.until(lambda: bool(slurm.done))
        slurm.asked, found["n3"] = back, SILENT
        await controller.until(lambda: bool(judged))
        await asyncio.sleep(1.0)
        assert slurm.done == ["down n2"]
        controller.end()

    asyncio.run(work())


def test_a_confirmed_node_that_stays_dead_is_set_down(tmp_path: Path, found: dict[str, ProbeResult]) -> None:
    slurm, found["n2"] = TwoJobs(), SILENT

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        controller.report(JOB, "n2")
        await controller.until(lambda: bool(slurm.done))
        assert slurm.done == ["down n2"] and slurm.held
        controller.end()

    asyncio.run(work())


def test_nodes_that_are_confirmed_and_not_yet_down_count_as_silent(
    tmp_path: Path, found: dict[str, ProbeResult]
) -> None:
    """While one recovery reserves, another one's node falls silent: both are more than the budget has room for."""
    slurm = TwoJobs()
    found |= {"n2": SILENT, "m2": SILENT}

    async def work() -> None:
        controller = Controller(slurm, tmp_path, fence_budget_nodes=1)
        home = controller.home

        async def the_other() -> None:
            assert home.list_silent({"x"}) == home.list_silent({"x"}, JOB.user_id) == {"x", "n2"}
            controller.report(OTHER, "m2")
            await asyncio.sleep(1.2)

        slurm.reserving = the_other
        controller.report(JOB, "n2")
        await controller.until(lambda: not home.is_active(JOB.raw_id))
        await asyncio.sleep(0.5)
        assert slurm.done == [], "a mass outage: nobody is fenced"
        assert '"not_fenced"' in controller.events(JOB) and '"not_fenced"' in controller.events(OTHER)
        controller.end()

    asyncio.run(work())


def test_a_node_that_is_being_set_down_counts_once(tmp_path: Path, found: dict[str, ProbeResult]) -> None:
    slurm, found["n2"] = TwoJobs(), SILENT
    counted: list[tuple[set[str], int]] = []

    async def work() -> None:
        controller = Controller(slurm, tmp_path)

        def count() -> None:
            counted.append((controller.home.list_silent({"x"}), controller.journal.count_fenced(600.0)))

        slurm.setting_down = count
        controller.report(JOB, "n2")
        await controller.until(lambda: bool(slurm.done))
        controller.end()

    asyncio.run(work())
    assert counted == [({"x"}, 1)]


@pytest.mark.parametrize("sight", [SILENT, ProbeResult(Port.UNKNOWN, Port.UNKNOWN, Port.UNKNOWN)])
def test_who_cannot_reach_nodes_whose_agents_speak_fences_nobody(
    tmp_path: Path, found: dict[str, ProbeResult], monkeypatch: pytest.MonkeyPatch, sight: ProbeResult
) -> None:
    """What agents send comes in, and no connect of the controller's gets out."""
    slurm, found["n2"] = TwoJobs(), SILENT
    found |= {"n1": sight, "n3": sight}

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        monkeypatch.setattr(controller.home.registry, "is_vouched", lambda host: True)
        controller.report(JOB, "n2")
        await asyncio.sleep(2.0)
        assert slurm.done == [] and not slurm.held and '"confirmed"' not in controller.events(JOB)
        del found["n1"], found["n3"]
        await controller.until(lambda: bool(slurm.done))
        assert slurm.done == ["down n2"]
        controller.end()

    asyncio.run(work())


def test_a_slurm_that_is_silent_while_nodes_are_reserved_is_asked_again(
    tmp_path: Path, found: dict[str, ProbeResult]
) -> None:
    slurm, found["n2"] = TwoJobs(), SILENT

    async def silent() -> None:
        raise SlurmUnreachable("no answer")

    async def work() -> None:
        slurm.reserving = silent
        controller = Controller(slurm, tmp_path)
        controller.report(JOB, "n2")
        await controller.until(lambda: "down n2" in slurm.done)
        assert slurm.held and "task_died" not in controller.events(JOB)
        controller.end()

    asyncio.run(work())


def test_slurm_may_send_a_job_back_faster_than_we_do(tmp_path: Path, found: dict[str, ProbeResult]) -> None:
    """The batch host has booted, and its registration comes between our last look at the job and our requeue."""
    slurm, found["n2"] = TwoJobs(), ProbeResult(Port.ANSWERS, Port.SILENT, Port.ANSWERS)
    slurm.all["n2"] = dataclasses.replace(slurm.all["n2"], slurmd_start=time.time(), flags=frozenset())

    async def work() -> None:
        controller = Controller(slurm, tmp_path)
        slurm.requeue_refused = "Job is pending or completing"
        controller.report(JOB, "n2")
        await controller.until(lambda: '"refused"' in controller.events(JOB))
        await controller.until(lambda: bool(slurm.done))
        assert slurm.held and slurm.done[0].startswith("pin") and "task_died" not in controller.events(JOB), (
            "its survivors stay held"
        )
        controller.end()

    asyncio.run(work())


def test_a_slurm_that_stays_silent_is_waited_for_from_the_journal(
    tmp_path: Path, found: dict[str, ProbeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemini_hpc.controller.recovery.RESERVE_S", 0.0)
    slurm, found["n2"] = TwoJobs(), SILENT

    async def silent() -> None:
        slurm.reserving = silent
        raise SlurmUnreachable("no answer")

    async def work() -> None:
        slurm.reserving = silent
        controller = Controller(slurm, tmp_path)
        controller.report(JOB, "n2")
        await controller.until(
            lambda: "detected" in controller.events(JOB) and not controller.home.is_active(JOB.raw_id)
        )
        assert not slurm.done and not slurm.held and not controller.journal.read_open()
        assert "task_died" not in controller.events(JOB)
        controller.end()

    asyncio.run(work())
