"""The ladder of a requeue that does not start, against a scripted Slurm (no cluster waits two minutes in a test)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.controller import probe, requeue, tasks
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import ProbeHistory, ProbeResult, Target
from gemini_hpc.controller.requeue import Requeue
from gemini_hpc.controller.reservation import Held
from gemini_hpc.controller.survivors import Fence, Survivors
from gemini_hpc.slurm import SlurmRefused, SlurmUnreachable
from gemini_hpc.slurm.facts import Job, Node, Reservation, WatchedJob
from gemini_hpc.slurm.text import parse_node

from .fake_slurm import FakeSlurm
from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-pending.txt").read_text().splitlines()[0]
PENDING = dataclasses.replace(parse_job(LINE), req_nodes=(), restarts=1, start_time=4e9, reason="Resources")


class ScriptedSlurm(FakeSlurm):
    """One pending job that starts only when `starts` says so; every change is noted."""

    def __init__(self, starts: Callable[[ScriptedSlurm], bool] = lambda s: False) -> None:
        self.current = PENDING
        self.starts = starts
        self.done: list[str] = []
        self.held: dict[str, list[str]] = {}
        self.states = dict.fromkeys(("n1", "n3", "n4", "n5"), "IDLE")
        self.partition_is = "UP"

    async def read_job(self, raw_id: int) -> Job:
        if self.starts(self):
            self.current = dataclasses.replace(self.current, state="RUNNING", nodes=("n1", "n3", "n4"))
        return self.current

    async def read_nodes(self, names: Any = ()) -> dict[str, Node]:
        base = "CPUTot=4 RealMemory=2000 Partitions=main"
        return {n: parse_node(f"NodeName={n} NodeAddr={n} {base} State={s}") for n, s in self.states.items()}

    async def read_partitions(self) -> dict[str, str]:
        return {"main": self.partition_is}

    async def read_excluded(self, raw_id: int) -> tuple[str, ...]:
        return ()

    async def read_reservations(self) -> list[Reservation]:
        return [Reservation(k, tuple(v), (), "ACTIVE", frozenset()) for k, v in self.held.items()]

    async def change_reservation(self, name: str, nodes: Sequence[str]) -> None:
        assert self.held[name]
        if any(set(nodes) & set(v) for k, v in self.held.items() if k != name):
            raise SlurmRefused("Requested nodes are busy")
        self.held[name] = list(nodes)
        self.done.append(f"change {','.join(nodes)}")

    async def sort_by_end(self, names: Iterable[str]) -> list[str]:
        return sorted(names)

    async def create_reservation(self, name: str, nodes: Sequence[str], user_id: int, minutes: int = 10) -> None:
        if any(set(nodes) & set(v) for v in self.held.values()):
            raise SlurmRefused("Requested nodes are busy")
        self.held[name] = list(nodes)
        self.done.append(f"reserve {','.join(nodes)}")

    async def delete_reservation(self, name: str) -> bool:
        if self.current.reservation == name:
            return False
        self.held.pop(name, None)
        self.done.append("delete")
        return True

    async def pin_job(self, job: Job, nodes: Sequence[str], reservation: str) -> Job:
        self.current = dataclasses.replace(self.current, req_nodes=tuple(nodes), reservation=reservation)
        self.done.append(f"pin {','.join(nodes) or '-'}{' held' if reservation else ''}")
        return self.current

    async def set_start_time(self, job: Job, start: str) -> None:
        self.done.append(f"start {start}")

    async def detach_reservation(self, job: Job, previous: str = "") -> None:
        self.current = dataclasses.replace(self.current, reservation="")
        self.done.append("detach")

    async def read_attached(self, reservation: str) -> list[WatchedJob]:
        return []

    async def hold_job(self, job: Job, why: str) -> None:
        self.current = dataclasses.replace(self.current, reason="JobHeldUser")
        self.done.append(f"hold {why}")

    async def nudge_scheduler(self, job: Job) -> None:
        self.done.append("nudge")


def nothing(*_: object, **__: object) -> None:
    """No journal."""


def make(slurm: ScriptedSlurm, said: list[str], fence: Fence | None = None) -> Requeue:
    def say(event: str, host: str, detail: str) -> None:
        said.append(f"{event} {host}".strip())

    return Requeue(
        slurm=slurm,
        raw_id=1,
        restart=0,
        survivors=Survivors(
            names=["n1", "n3"],
            dead=["n2"],
            log_event=say,
            build_target=lambda node: Target(node.name, 6818, (17000,), range(17000, 17016)),
            is_vouched=lambda host: False,
            confirm_s=0.1,
            fence_node=fence,
        ),
        held=Held(slurm=slurm, raw_id=1, user_id=5001, log_event=say, write_journal=nothing),
        original=["n3"],
        log_event=say,
        write_journal=nothing,
    )


def steer(
    slurm: ScriptedSlurm, fence: Fence | None = None, limit_s: float = 5.0, wanted: int = 3
) -> tuple[str, list[str]]:
    said: list[str] = []

    async def work() -> str:
        made = make(slurm, said, fence)
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), wanted)
        return await made.steer_requeue(limit_s)

    return asyncio.run(work()), said


@pytest.fixture(autouse=True)
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, Port]:
    """What slurmd's port of each node does; the agent's is silent, and the kernel lives where slurmd's is not."""
    found: dict[str, Port] = {}

    async def looks(targets: Mapping[str, Target]) -> dict[str, ProbeResult]:
        of = {n: found.get(n, Port.ANSWERS) for n in targets}
        return {n: ProbeResult(port, Port.SILENT, port) for n, port in of.items()}

    monkeypatch.setattr(probe, "probe_nodes", looks)
    for name, value in (("PINNED_S", 0.6), ("REACHABLE_S", 0.6), ("HELD_GRACE_S", 0.2), ("SURVEY_S", 0.05)):
        monkeypatch.setattr(requeue, name, value)
    monkeypatch.setattr(requeue, "ASK_S", 0.1)
    return found


def test_the_order_of_a_good_requeue() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    outcome, _ = steer(slurm)
    assert outcome == "running"
    assert slurm.done == ["reserve n1,n3,n4,n5", "pin n1,n3 held", "start now+2", "detach", "delete"]
    assert not slurm.held


def test_the_running_job_is_known_before_its_recovery_is_over() -> None:
    """Between the two its nodes would be candidates for another owner's recovery, which has held them (26.05)."""
    slurm, seen = ScriptedSlurm(starts=lambda s: "start now+2" in s.done), list[str]()

    async def work() -> None:
        made = make(slurm, [])
        made.on_read = lambda job: seen.append(job.state)
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        assert await made.steer_requeue(5.0) == "running"

    asyncio.run(work())
    assert seen[-1] == "RUNNING"


def test_nothing_is_held_for_ever() -> None:
    slurm = ScriptedSlurm()
    outcome, said = steer(slurm)
    assert outcome == "unpinned" and said[-2:] == ["unpinned", "released"]
    assert slurm.current.req_nodes == ("n3",), "the user's own request is back"
    assert slurm.current.reservation == "" and not slurm.held


def test_a_limit_lets_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "PINNED_S", 60.0)
    slurm = ScriptedSlurm()
    slurm.current = dataclasses.replace(PENDING, reason="QOSMaxJobsPerUserLimit")
    assert steer(slurm)[0] == "held"
    assert not slurm.held


def test_a_job_whose_recoveries_lead_nowhere_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, said, before = ScriptedSlurm(), list[str](), list[int]()
    unreachable = [SlurmUnreachable("no answer")]

    async def hold_job(job: Job, why: str) -> None:
        if unreachable:
            raise unreachable.pop()
        await ScriptedSlurm.hold_job(slurm, job, why)

    monkeypatch.setattr(slurm, "hold_job", hold_job)

    async def work() -> None:
        made = make(slurm, said)
        made.explain_hold, made.on_hold = lambda: "5 recoveries in a row sealed nothing at all", before.append
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        assert await made.steer_requeue(5.0) == "held"

    asyncio.run(work())
    assert slurm.done[-1] == "delete" and "hold 5 recoveries in a row sealed nothing at all" in slurm.done
    assert "start now+2" not in slurm.done and not slurm.held and slurm.current.req_nodes in ((), ("n3",))
    assert before == [1] and said.count("held") == 1, "Slurm was asked again"


def test_a_survivor_that_dies_is_left_out(ports: dict[str, Port]) -> None:
    ports["n3"] = Port.SILENT
    fenced: list[str] = []

    async def fence(host: str, seen: ProbeHistory) -> bool:
        assert seen.silent_s >= 0.1
        fenced.append(host)
        return True

    slurm = ScriptedSlurm(starts=lambda s: "pin n1 held" in s.done and bool(fenced))
    outcome, said = steer(slurm, fence)
    assert outcome == "running" and "survivor_left_out n3" in said and fenced == ["n3"]


def test_a_survivor_that_dies_while_the_job_waits_is_not_allocated(ports: dict[str, Port]) -> None:
    """It is no candidate, and the job does not start before it can be fenced."""

    def starts(slurm: ScriptedSlurm) -> bool:
        if "pin n1 held" in slurm.done:
            ports["n3"] = Port.ANSWERS
        elif "start now+2" in slurm.done:
            ports["n3"] = Port.SILENT
        return slurm.done.count("pin n1,n3 held") == 2

    slurm = ScriptedSlurm(starts)
    outcome, said = steer(slurm)
    first, away, back = (i for i, done in enumerate(slurm.done) if done.startswith("pin"))
    assert outcome == "running" and slurm.done[first] == slurm.done[back] == "pin n1,n3 held"
    assert slurm.done[away - 2 : away + 1] == ["start now+2", "change n1,n4,n5", "pin n1 held"]
    assert slurm.done[away + 1 : back] == ["change n1,n4,n5,n3"] and {"narrowed", "widened"} < set(said)


def test_a_cancelled_job_frees_everything() -> None:
    slurm = ScriptedSlurm()
    slurm.current = dataclasses.replace(PENDING, state="CANCELLED")
    assert steer(slurm)[0] == "CANCELLED"
    assert not slurm.held


def test_an_overlap_with_somebody_elses_reservation_leaves_their_nodes_out() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.held["weekly"] = ["n4", "n1"]
    assert steer(slurm)[0] == "running"
    assert slurm.done[:2] == ["reserve n3,n5", "pin n3 held"] and slurm.held == {"weekly": ["n4", "n1"]}


def test_the_jobs_own_reservation_is_kept() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.current = dataclasses.replace(PENDING, reservation="weekly")
    assert steer(slurm)[0] == "running"
    assert slurm.done == ["pin n1,n3 held", "start now+2"] and slurm.current.reservation == "weekly"


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_an_epilogs_hold_leaves_no_pin_behind(state: str) -> None:
    """Its time is over and the job waits: in the reservation, but for no node in particular."""
    slurm = ScriptedSlurm()
    slurm.current = dataclasses.replace(PENDING, state=state)

    async def work() -> str:
        made = make(slurm, [])
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        return await made.steer_requeue(0.4, leave_held=True)

    assert asyncio.run(work()) == "given up" and "pin n1,n3 held" in slurm.done
    assert slurm.current.req_nodes == ("n3",), "the user's own request is back"
    assert list(slurm.held) == [slurm.current.reservation] and "delete" not in slurm.done


# ---- scripts that have ended -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "finished", "goes_on", "requeue", "back"),
    [
        ("COMPLETED", False, False, True, True),
        ("COMPLETED", True, False, True, False),
        ("COMPLETED", False, True, True, False),
        ("COMPLETED", False, False, False, False),
        ("FAILED", True, False, True, True),  # its ranks had closed, and the script failed with a node
        ("CANCELLED", False, False, True, False),
        ("TIMEOUT", False, False, True, False),
    ],
)
def test_what_a_lost_node_has_ended_is_sent_back_once(
    state: str, finished: bool, goes_on: bool, requeue: bool, back: bool
) -> None:
    """Unless its training had finished, goes on with a spare, or its user does not want it back."""
    slurm, said = ScriptedSlurm(starts=lambda s: "start now+2" in s.done), list[str]()
    slurm.current = dataclasses.replace(PENDING, state=state, restarts=0, may_requeue=requeue)

    async def send_back(job: Job) -> None:
        slurm.done.append("requeue")
        slurm.current = dataclasses.replace(job, state="PENDING", restarts=job.restarts + 1)

    async def work() -> str:
        made = make(slurm, said)
        made.may_requeue, made.has_finished, made.has_gone_on = True, lambda: finished, lambda: goes_on
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        return await made.steer_requeue(5.0)

    slurm.requeue_job = send_back  # type: ignore[method-assign]
    assert asyncio.run(work()) == ("running" if back else state)
    assert slurm.done.count("requeue") == said.count("sent_back") == back and not slurm.held


def test_a_script_that_goes_on_after_its_training_is_let_go_on() -> None:
    """--no-kill: Slurm has taken the lost node from the job; what it has not to train any more it does not need."""
    slurm, said = ScriptedSlurm(), list[str]()
    slurm.current = dataclasses.replace(PENDING, state="RUNNING", restarts=0, nodes=("n1", "n3"))

    async def work() -> str:
        made = make(slurm, said)
        made.may_requeue, made.has_finished = True, lambda: True
        return await made.steer_requeue(5.0)

    assert asyncio.run(work()) == "goes on" and said == ["goes_on"]


# ---- survivors that cannot be pinned ---------------------------------------------------------------------


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "ALLOCATED+MAINT", "MIXED+REBOOT_REQUESTED", "DOWN"])
def test_a_survivor_that_slurm_would_not_allocate_is_not_pinned(state: str) -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.states["n1"] = state
    outcome, said = steer(slurm)
    assert outcome == "running" and "survivor_left_out n1" in said
    assert slurm.done[:3] == ["reserve n3,n4,n5", "pin n3 held", "start now+2"]


def test_a_survivor_drained_while_the_job_waits_and_taken_in_again() -> None:
    slurm = ScriptedSlurm(starts=lambda s: s.done.count("pin n1,n3 held") == 2)

    def starts(s: ScriptedSlurm) -> bool:
        if "pin n1,n3 held" in s.done:
            s.states["n1"] = "IDLE+DRAIN" if "pin n3 held" not in s.done else "IDLE"
        return s.done.count("pin n1,n3 held") == 2

    slurm.starts = starts
    outcome, said = steer(slurm)
    assert outcome == "running" and [line for line in said if "survivor" in line] == [
        "survivor_left_out n1",
        "survivor_back n1",
    ]


def test_where_no_survivor_can_be_pinned_the_job_still_goes_to_what_is_held() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.states["n1"] = slurm.states["n3"] = "IDLE+DRAIN"
    outcome, _ = steer(slurm)
    assert outcome == "running" and slurm.done[:3] == ["reserve n4,n5", "pin - held", "start now+2"]


def test_one_missed_probe_after_a_long_wait_fences_nobody(ports: dict[str, Port]) -> None:
    """However long the job has been pending: nothing but the judgement, on a silence of its own, may fence."""
    asked: list[float] = []

    async def fence(host: str, seen: ProbeHistory) -> bool:
        asked.append(seen.silent_s)
        return False

    def starts(s: ScriptedSlurm) -> bool:
        if not missed and time.monotonic() - began > 0.8:
            missed.append(1)
            ports["n3"] = Port.SILENT
        elif missed and "pin n1 held" in s.done:
            ports["n3"] = Port.ANSWERS
        return s.done.count("pin n1,n3 held") == 2

    began, missed = time.monotonic(), list[int]()
    slurm = ScriptedSlurm(starts=starts)
    outcome, said = steer(slurm, fence)
    assert outcome == "running" and missed and "survivor_back n3" in said
    assert all(silent_s >= 0.1 for silent_s in asked)


@pytest.mark.parametrize("port", [Port.REFUSES, Port.HANGS])
def test_a_survivor_whose_kernel_lives_is_left_out_and_never_judged_dead(ports: dict[str, Port], port: Port) -> None:
    ports["n3"] = port

    async def fence(host: str, seen: ProbeHistory) -> bool:
        raise AssertionError("there is nothing to judge: the kernel answers")

    slurm = ScriptedSlurm(starts=lambda s: "pin n1 held" in s.done and time.monotonic() - began > 0.5)
    began = time.monotonic()
    outcome, said = steer(slurm, fence)
    assert outcome == "running" and "survivor_left_out n3" in said and "task_died" not in said


# ---- the survey ------------------------------------------------------------------------------------------


def test_a_survey_that_dies_is_told_and_started_again(
    monkeypatch: pytest.MonkeyPatch, ports: dict[str, Port]
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.05)
    good, calls = probe.probe_nodes, list[int]()

    async def faulty(targets: Mapping[str, Target]) -> dict[str, ProbeResult]:
        calls.append(1)
        if len(calls) in (2, 3):
            raise ValueError("a fault of ours")
        return await good(targets)

    monkeypatch.setattr(probe, "probe_nodes", faulty)
    slurm = ScriptedSlurm(starts=lambda s: len(calls) > 5)
    outcome, said = steer(slurm)
    assert outcome == "running" and said.count("task_died") == 2


def test_a_question_that_the_double_does_not_know_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poor(ScriptedSlurm):
        async def read_attached(self, reservation: str) -> list[WatchedJob]:
            return await FakeSlurm.read_attached(self, reservation)

    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.05)
    assert "task_died" in steer(Poor())[1]


# ---- two recoveries --------------------------------------------------------------------------------------


def test_survivors_are_taken_back_out_of_another_recoverys_reservation() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.held["gemini_2_abc"] = ["n1", "n5", "n6"]
    said: list[str] = []

    async def work() -> str:
        made = make(slurm, said)
        made.held.find_survivors = lambda name: {"n6"} if name == "gemini_2_abc" else None
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        assert slurm.done[:2] == ["change n5,n6", "reserve n1,n3,n4"]
        return await made.steer_requeue(5.0)

    assert asyncio.run(work()) == "running" and "taken_back" in said
    assert slurm.held == {"gemini_2_abc": ["n5", "n6"]} and "pin n1,n3 held" in slurm.done


def test_what_is_another_recoverys_survivor_too_stays_with_it() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.held["gemini_2_abc"] = ["n1", "n5"]

    async def work() -> str:
        made = make(slurm, [])
        made.held.find_survivors = lambda name: {"n1"}
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        return await made.steer_requeue(5.0)

    assert asyncio.run(work()) == "running"
    assert slurm.held == {"gemini_2_abc": ["n1", "n5"]} and "pin n3 held" in slurm.done


def test_nodes_of_other_owners_protected_jobs_are_no_candidates() -> None:
    slurm = ScriptedSlurm(starts=lambda s: "start now+2" in s.done)
    slurm.states["n4"] = "MIXED"

    async def work() -> str:
        made = make(slurm, [])
        made.held.list_protected = lambda: {"n4", "n5"}
        await made.reserve_nodes(slurm.current, await slurm.read_nodes(), 3)
        return await made.steer_requeue(5.0)

    assert asyncio.run(work()) == "running" and slurm.done[0] == "reserve n1,n3"


def test_what_becomes_free_meanwhile_is_held() -> None:
    """On a full cluster the first recovery holds all candidates; when they are free again the other needs one."""
    slurm = ScriptedSlurm(starts=lambda s: "change n1,n3,n4" in s.done)
    slurm.held["gemini_2_abc"] = ["n4"]
    slurm.states["n5"] = "DOWN"

    def starts(s: ScriptedSlurm) -> bool:
        if "start now+2" in s.done:
            s.held.pop("gemini_2_abc", None)
        return "change n1,n3,n4" in s.done

    slurm.starts = starts
    outcome, said = steer(slurm)
    assert outcome == "running" and "widened" in said


@pytest.mark.parametrize(
    ("followed_s", "answer_s", "pause_s"),
    [(1.0, 0.005, 0.03), (1.0, 0.1, 0.3), (1.0, 30.0, 1.0), (1000.0, 0.01, 0.5), (1000.0, 0.3, 0.9)],
)
def test_a_slurm_that_takes_its_time_is_asked_less_often(followed_s: float, answer_s: float, pause_s: float) -> None:
    assert requeue._choose_pause_s(followed_s, answer_s) == pytest.approx(pause_s)
