"""What a restarted controller does with nodes that an earlier one had begun to fence, against a scripted Slurm."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller import recoveries, tasks
from gemini_hpc.controller.event_log import EventLogs
from gemini_hpc.controller.fencing import REASON, Port
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import LOCK, LockTakenError, Primary, acquire_lock
from gemini_hpc.controller.probe import ProbeResult
from gemini_hpc.controller.recoveries import Recoveries
from gemini_hpc.controller.recovery import Recovery
from gemini_hpc.controller.registry import Registry
from gemini_hpc.controller.reservation import PREFIX
from gemini_hpc.controller.server import Controller
from gemini_hpc.slurm import SlurmRefused, SlurmUnreachable, UnknownJob
from gemini_hpc.slurm.facts import Job, Node, Reservation, SlurmConfig, WatchedJob
from gemini_hpc.slurm.text import parse_node
from gemini_hpc.wire.controller import Report

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

    async def read_job(self, raw_id: int) -> Job:
        if self.current is None:
            raise UnknownJob("gone")
        return self.current

    async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
        wanted = list(names)
        return {n: node for n, node in self.all.items() if not wanted or n in wanted}

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        return {n: {(JOB.user_id, JOB.raw_id), *self.strangers} for n in names}

    async def read_config(self) -> SlurmConfig:
        return SlurmConfig((("ctl", "ctl"),), "/x", self.boot, {})

    async def read_reservations(self) -> list[Reservation]:
        return []

    async def read_partitions(self) -> dict[str, str]:
        return {"main": "UP"}

    async def set_node_down(self, name: str, reason: str) -> Node:
        self.done.append(f"down {name}")
        self.all[name] = dataclasses.replace(self.all[name], state="DOWN", reason=reason)
        self.current = dataclasses.replace(JOB, state="COMPLETED", restarts=JOB.restarts)
        return self.all[name]

    async def resume_node(self, name: str) -> None:
        self.done.append(f"resume {name}")
        self.all[name] = dataclasses.replace(self.all[name], flags=frozenset())


def take_over(slurm: HalfDone, path: Path, **settings: float) -> list[str]:
    """Begins where a controller was killed between DRAIN and DOWN of n2; what is done to nodes then."""
    journal = Journal(str(path / "journal"))
    key = f"{JOB.raw_id}.{JOB.restarts}"
    opened = {"members": ["n1", "n2", "n3"], "dead": ["n2"], "survivors": ["n1", "n3"]}
    journal.write_line(key, "open", "before", job=JOB.raw_id, restart=JOB.restarts, **opened)
    journal.write_line(key, "down", "before", node="n2", user_id=JOB.user_id)
    given = {"fence_confirm_s": 0.3, "slurm_settle_s": 0.1, "fence_budget_nodes": 1} | settings
    whole = Settings(**given, state_dir=str(path))  # type: ignore[arg-type]
    registry = Registry(str(path / "jobs"))

    async def work() -> None:
        primary, logs = Primary(slurm), EventLogs(str(path / "jobs"))
        home = Recoveries(whole, slurm, journal, logs, registry, primary, Lemons(str(path), 0))
        await home.resume_open()
        deadline = time.monotonic() + 10
        while home.is_active(JOB.raw_id) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        home.cancel()

    asyncio.run(work())
    journal.close()
    return slurm.done


@pytest.fixture(autouse=True)
def seen(found: dict[str, ProbeResult]) -> dict[str, ProbeResult]:
    """n2 is silent in every way, the others answer."""
    found["n2"] = ProbeResult(Port.SILENT, Port.SILENT, Port.SILENT)
    return found


def test_a_dead_one_is_finished_and_counts_once(tmp_path: Path) -> None:
    """The budget of one node is not spent by the same node."""
    assert take_over(HalfDone(), tmp_path) == ["down n2"]


@pytest.mark.parametrize("port", [Port.ANSWERS, Port.REFUSES, Port.HANGS])
def test_one_with_a_sign_of_life_is_given_back(tmp_path: Path, seen: dict[str, ProbeResult], port: Port) -> None:
    """slurmd that is just being started anew, or a kernel that accepts, is no death."""
    seen["n2"] = ProbeResult(port, Port.SILENT, port)
    assert take_over(HalfDone(), tmp_path) == ["resume n2"]


def test_a_living_kernel_is_enough(tmp_path: Path, seen: dict[str, ProbeResult]) -> None:
    seen["n2"] = ProbeResult(Port.SILENT, Port.SILENT, Port.REFUSES)
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


class Meddled(HalfDone):
    """An administrator takes the node back while it is being judged."""

    async def read_owners(self, names: Iterable[str]) -> dict[str, set[tuple[int, int]]]:
        self.all["n2"] = dataclasses.replace(self.all["n2"], reason="", flags=frozenset())
        return await super().read_owners(names)


def test_a_node_that_is_taken_back_while_it_is_judged_is_left_alone(tmp_path: Path) -> None:
    slurm = Meddled()
    assert take_over(slurm, tmp_path) == []
    assert not slurm.all["n2"].reason, "it was judged, or this test shows nothing"


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
    return Recoveries(
        whole, slurm, Journal(str(path / "journal")), logs, registry, Primary(slurm), Lemons(str(path), 0)
    )


def opened(home: Recoveries, **more: int) -> None:
    """A recovery has begun."""
    data = {"members": ["n1", "n2", "n3"], "dead": ["n2"], "survivors": ["n1", "n3"]}
    home.journal.write_line(KEY, "open", "before", job=JOB.raw_id, restart=JOB.restarts, **data, **more)


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
        track = home.registry.track_job(JOB)
        recovery = Recovery(home, track, JOB.restarts)
        opened(home)

        async def run() -> None:
            raise ValueError("a fault of ours")

        recovery.run = run  # type: ignore[method-assign]
        with monkeypatch.context() as patched:
            patched.setattr(EventLogs, "append_events", full)
            await home._run((JOB.raw_id, JOB.restarts), recovery)
        await until(lambda: not home.journal.read_open() and not home.is_active(JOB.raw_id))
        home.cancel()

    asyncio.run(work())


# ---- reservations ------------------------------------------------------------------------------------------

NAME = f"{PREFIX}{JOB.raw_id}_0123456789ab"


class Reserving(HalfDone):
    """Knows reservations; nobody is drained."""

    def __init__(self) -> None:
        super().__init__("", frozenset())
        self.held: dict[str, list[str]] = {}
        self.at_create: Callable[[str], None] = lambda name: None

    async def read_reservations(self) -> list[Reservation]:
        return [Reservation(k, tuple(v), (), "ACTIVE", frozenset()) for k, v in self.held.items()]

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        self.held[name] = list(nodes)
        self.at_create(name)

    async def delete_reservation(self, name: str) -> bool:
        self.held.pop(name, None)
        return True

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        self.held[name] = list(nodes)

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        return ()

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        return list(names)

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        return []


async def settled(home: Recoveries) -> None:
    """What a restarted controller does with what is open."""
    await home.resume_open()
    await until(lambda: not home.is_active(JOB.raw_id))
    home.cancel()
    assert not home.journal.read_open()


@pytest.mark.parametrize("state", ["CANCELLED", "RUNNING"])
def test_a_reservation_that_was_made_and_not_noted_is_deleted(tmp_path: Path, state: str) -> None:
    """Killed after `scontrol create`; then the job is cancelled, or its node is back."""

    async def work() -> None:
        slurm = Reserving()
        home = make(tmp_path, slurm)
        opened(home)
        home.journal.write_line(KEY, "reserve", "before", name=NAME, nodes=["n1", "n3"])
        slurm.held[NAME] = ["n1", "n3"]
        slurm.current = dataclasses.replace(JOB, state=state)
        await settled(home)
        assert not slurm.held

    asyncio.run(work())


def test_a_reservation_is_not_forgotten_where_slurm_gives_no_answer(tmp_path: Path) -> None:
    async def work() -> None:
        slurm, calls = Reserving(), list[str]()
        home = make(tmp_path, slurm)
        opened(home)
        home.journal.write_line(KEY, "reserve", "after", name=NAME)
        slurm.held[NAME] = ["n1", "n3"]
        good = slurm.delete_reservation

        async def silent_once(name: str) -> bool:
            calls.append(name)
            if len(calls) == 1:
                raise SlurmUnreachable("no answer")
            return await good(name)

        slurm.delete_reservation = silent_once  # type: ignore[method-assign]
        await settled(home)
        assert not slurm.held

    asyncio.run(work())


async def held_ahead(home: Recoveries, slurm: Reserving) -> None:
    """n2 is silent, and somebody else's job runs there: its fencing is left to Slurm, the other nodes are held."""
    slurm.strangers = {(4242, 9)}
    track = home.registry.track_job(JOB)
    home.accept_report(track, "n1", Report(JOB.raw_id, JOB.restarts, "n2", ("n1", "n3"), time.time()))
    await until(lambda: slurm.held)
    assert [sorted(nodes) for nodes in slurm.held.values()] == [["n1", "n3"]]


@pytest.mark.parametrize("unanswered", [False, True])
def test_what_was_held_ahead_is_let_go_of_where_nothing_comes_of_it(
    tmp_path: Path, seen: dict[str, ProbeResult], unanswered: bool
) -> None:
    """Also where `scontrol create` had no answer, and took effect."""

    async def work() -> None:
        slurm = Reserving()

        def no_answer(name: str) -> None:
            raise SlurmUnreachable("no answer")

        if unanswered:
            slurm.at_create = no_answer
        home = make(tmp_path, slurm)
        await held_ahead(home, slurm)
        del seen["n2"]
        await until(lambda: not home.is_active(JOB.raw_id))
        assert not slurm.held and not home.journal.read_open() and not slurm.done
        home.cancel()

    asyncio.run(work())


@pytest.mark.parametrize("node", ["DOWN", "ALLOCATED"])
def test_what_was_held_ahead_when_the_controller_died(tmp_path: Path, node: str) -> None:
    """Slurm has requeued the job meanwhile: because it found the node dead, or for a reason of somebody else's."""

    async def work() -> None:
        slurm = Waiting()
        slurm.held, slurm.current = {}, JOB
        home = make(tmp_path, slurm)
        await held_ahead(home, slurm)
        home.cancel()
        await asyncio.sleep(0.1)
        home.journal.close()
        slurm.current = dataclasses.replace(JOB, state="PENDING", restarts=JOB.restarts + 1, nodes=())
        slurm.all["n2"] = dataclasses.replace(slurm.all["n2"], state=node)
        after = make(tmp_path, slurm)
        await after.resume_open()
        if node == "DOWN":
            await until(lambda: "start" in slurm.done)
            assert "pin n1,n3" in slurm.done and slurm.held
            slurm.current = dataclasses.replace(slurm.current, state="RUNNING", nodes=("n1", "n3", "n4"))
        await until(lambda: not after.is_active(JOB.raw_id))
        assert not slurm.held and not after.journal.read_open()
        assert slurm.done == ([] if node == "ALLOCATED" else ["pin n1,n3", "start"])
        after.cancel()

    asyncio.run(work())


def test_what_was_held_ahead_is_known_when_the_recovery_acts(tmp_path: Path) -> None:
    home = make(tmp_path, Reserving())
    opened(home, ahead=1)
    home.journal.write_line(KEY, "reserve", "after", name=NAME)
    opened(home)
    for journal in (home.journal, Journal(str(tmp_path / "journal"))):
        first, *rest = journal.read_open()[KEY]
        assert "ahead" not in first.data and NAME in [r.data.get("name") for r in rest]


# ---- what Slurm refuses for ever ---------------------------------------------------------------------------


def test_a_node_that_slurm_has_no_record_of_any_more_is_done_with(tmp_path: Path) -> None:
    """`scontrol show node` of one that was removed fails: all nodes are asked for."""

    class Removed(Reserving):
        async def read_nodes(self, names: Iterable[str] = ()) -> dict[str, Node]:
            if "n2" in list(names):
                raise SlurmRefused("Node n2 not found")
            return {n: node for n, node in self.all.items() if n != "n2"}

    async def work() -> None:
        slurm = Removed()
        home = make(tmp_path, slurm)
        opened(home)
        home.journal.write_line(KEY, "down", "before", node="n2", user_id=JOB.user_id)
        slurm.current = None
        await settled(home)

    asyncio.run(work())


def test_a_takeover_that_slurm_always_refuses_is_given_up_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is open the watcher leaves the job alone, and a reservation stands."""
    monkeypatch.setattr(recoveries, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(recoveries, "RETRY_S", 0.05)

    async def work() -> None:
        slurm, calls, told = Reserving(), list[int](), list[tuple[str, int]]()
        home = make(tmp_path, slurm)
        monkeypatch.setattr(home.alerts, "send_alert", lambda kind, job, host, text: told.append((kind, job)))
        opened(home)
        home.journal.write_line(KEY, "reserve", "after", name=NAME)
        home.journal.write_line(KEY, "down", "before", node="n2", user_id=JOB.user_id)
        slurm.held[NAME] = ["n1", "n3"]

        async def refused(*_: object) -> None:
            calls.append(1)
            # No answer is no refusal, however often.
            raise SlurmUnreachable("no answer") if len(calls) < 10 else SlurmRefused("no")

        monkeypatch.setattr(home, "_resume_one", refused)
        await settled(home)
        assert len(calls) > 11 and not slurm.held and told == [("recovery given up", JOB.raw_id)]
        assert '"given up"' in (tmp_path / "journal").read_text()

    asyncio.run(work())


# ---- a controller that steps down --------------------------------------------------------------------------


class Waiting(Reserving):
    """The job waits for its second start."""

    def __init__(self) -> None:
        super().__init__()
        self.current = dataclasses.replace(JOB, state="PENDING", restarts=JOB.restarts + 1, nodes=())
        self.held[NAME] = ["n1", "n3"]

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        self.done.append(f"pin {','.join(nodes)}")
        return job

    async def set_start_time(self, job: Job, start: str) -> None:
        self.done.append("start")


def steering(home: Recoveries) -> Recovery:
    """A recovery that is about to steer the job to the end."""
    track = home.registry.track_job(JOB)
    recovery = home._active[JOB.raw_id, JOB.restarts] = Recovery(home, track, JOB.restarts)
    opened(home)
    home.journal.write_line(KEY, "reserve", "after", name=NAME)
    helper = recovery.build_requeue(JOB, ["n1", "n3"], ["n2"])
    helper.held.name = NAME

    async def run() -> None:
        await recovery.finish_requeue(helper)

    recovery.run = run  # type: ignore[method-assign]
    home._start(f"recovery {KEY}", lambda: home._run((JOB.raw_id, JOB.restarts), recovery), recovery.on_task_death)
    return recovery


@pytest.mark.parametrize("at_once", [True, False], ids=["the journal is closed at once", "the journal stays open"])
def test_a_controller_that_steps_down_begins_nothing_and_leaves_what_is_held(tmp_path: Path, at_once: bool) -> None:
    async def work() -> None:
        slurm = Waiting()
        home = make(tmp_path, slurm)
        steering(home)
        await until(lambda: slurm.done)
        home.cancel()
        before = list(slurm.done)
        if at_once:
            home.journal.close()
        await asyncio.sleep(0.5)
        assert not home._tasks and slurm.done == before
        assert list(slurm.held) == [NAME], "the next controller goes on with it"
        track = home.registry.track_job(JOB)
        home.accept_report(track, "n1", Report(JOB.raw_id, JOB.restarts, "n2", ("n3",), time.time()))
        home._take_over(KEY)
        assert not home._tasks

    asyncio.run(work())


def test_the_locks_are_kept_until_all_work_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(state_dir=str(tmp_path / "state"), controller_host="localhost")
    object.__setattr__(settings, "controller_port", 0)
    slurm = Waiting()
    ended = list[bool]()

    async def work() -> None:
        controller = Controller(settings, slurm, Primary(slurm), str(tmp_path))
        lock = os.path.join(str(tmp_path), LOCK)

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.2)
                controller.journal.write_line(KEY, "close", "after", outcome="test")
                with pytest.raises(LockTakenError):
                    acquire_lock(lock)
                ended.append(True)

        serving = asyncio.create_task(controller.serve())
        await asyncio.sleep(0.1)
        controller.recoveries._start("slow", slow, lambda why: None)
        await asyncio.sleep(0.05)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert ended
        acquire_lock(lock).close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("ago_s", "counts_s"),
    [(90.0, 90.0), (1e6, recoveries.SILENT_MOST_S), (-50.0, 0.0)],
    ids=["before this controller began", "a wrong clock", "a clock that is ahead"],
)
def test_a_node_counts_as_silent_since_its_job_found_it_so(
    tmp_path: Path, seen: dict[str, ProbeResult], ago_s: float, counts_s: float
) -> None:
    async def work() -> None:
        home = make(tmp_path, Reserving())
        track, now = home.registry.track_job(JOB), time.time()
        home.accept_report(track, "n1", Report(JOB.raw_id, JOB.restarts, "n2", ("n3",), now - ago_s))
        (recovery,) = home._active.values()
        assert recovery.suspects["n2"].found_at == pytest.approx(now - counts_s, abs=5.0)
        home.cancel()

    asyncio.run(work())


def test_nodes_of_a_job_that_has_not_been_read_yet_are_no_candidates(tmp_path: Path) -> None:
    """A controller that has just started knows from its disk that the job is protected, and where."""

    async def work() -> None:
        home = make(tmp_path, Reserving())
        home.registry.track_job(JOB).write_entry()
        home.cancel()
        again = make(tmp_path, Reserving())
        assert again.list_protected(JOB.user_id + 1) == {"n1", "n2", "n3"}
        assert again.list_protected(JOB.user_id) == set()
        again.cancel()

    asyncio.run(work())
