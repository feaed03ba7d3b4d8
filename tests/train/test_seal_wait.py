"""The wait for a seal ends when there is nothing to wait for, and comes back with the next seal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from gemini_hpc.client.agent_connection import AgentLost
from gemini_hpc.client.seal_wait import SealGate, Wait
from gemini_hpc.format.slot_header import SlotLayout
from gemini_hpc.train.optimizer_gate import OptimizerGate, Times
from gemini_hpc.train.replication.replicator import Replicator
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.state.capture import Bound, CaptureJob
from gemini_hpc.train.state.layout import Plan
from gemini_hpc.train.transport.base import Head, VersionLost
from gemini_hpc.wire import control_page


class Scene:
    """A gate, its page, and what it said."""

    def __init__(self, timeout_s: float) -> None:
        self.fd = os.memfd_create("page")
        os.ftruncate(self.fd, control_page.PAGE_BYTES)
        self.page = control_page.ControlPage(self.fd, writable=True)
        self.page.set_state(control_page.STATE_PROTECTED)
        self.lost = False
        self.said: list[str] = []
        self.gate = SealGate(
            lambda: self.page,
            lambda: self.lost,
            3,
            timeout_s,
            self.said.append,
            lambda version: self.said.append(f"restored {version}"),
        )


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(60.0)
    yield made
    os.close(made.fd)


def test_sealed(scene: Scene) -> None:
    scene.page.set_sealed(3, 7)
    assert scene.gate.wait(7, lambda: False)
    assert not scene.said


def test_an_older_epoch_does_not_count(scene: Scene) -> None:
    scene.page.set_sealed(2, 9)
    assert not scene.gate.wait(7, lambda: True)


@pytest.mark.parametrize("how", ["lost", "told"])
def test_ends_at_once(scene: Scene, how: str) -> None:
    def happen() -> None:
        time.sleep(0.05)
        if how == "lost":
            scene.lost = True
        else:
            scene.gate.degrade("a holder refuses")

    threading.Thread(target=happen).start()
    assert not scene.gate.wait(1, lambda: False)
    assert len(scene.said) == 1 and scene.gate.degraded
    assert not scene.gate.wait(2, lambda: False), "no waiting while degraded"
    scene.lost = False
    scene.page.set_state(control_page.STATE_PROTECTED)
    scene.page.set_sealed(3, 4)
    assert not scene.gate.degraded
    assert scene.said[1:] == ["restored 4"]
    assert scene.gate.wait(4, lambda: False)


@pytest.mark.parametrize("state", [control_page.STATE_FROZEN, control_page.STATE_DEGRADED])
def test_agents_that_cannot_seal_are_given_the_time_that_there_is(state: int) -> None:
    """If a node is dead, a step that is completed now is one more to repeat; whatever still moves."""
    scene = Scene(0.2)
    scene.page.set_state(state)
    began = time.monotonic()
    assert not scene.gate.wait(1, lambda: False, time.monotonic)
    assert 0.2 <= time.monotonic() - began < 30
    assert scene.said == ["the agents cannot seal: a node is missing, or a recovery goes on"]
    again = Scene(60.0)
    again.page.set_state(state)
    threading.Timer(
        0.05, lambda: (again.page.set_state(control_page.STATE_PROTECTED), again.page.set_sealed(3, 1))
    ).start()
    assert again.gate.wait(1, lambda: False) and not again.said
    os.close(scene.fd)
    os.close(again.fd)


def test_runs_out(scene: Scene) -> None:
    other = Scene(0.05)
    assert not other.gate.wait(1, lambda: False)
    assert other.said == ["version 1 was not sealed within 0.05 s"]
    os.close(other.fd)


def test_suspended_time_is_not_waited_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped for longer than the time-out, in the middle of a wait; the seal comes after that."""
    real, stops = time.monotonic, iter([90.0, 90.0])
    ahead = 0.0

    def stopped(seconds: float) -> None:
        nonlocal ahead
        ahead += next(stops, seconds)
        if ahead > 180.0 + 0.01:
            scene.page.set_sealed(3, 7)

    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.sleep", stopped)
    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.monotonic", lambda: real() + ahead)
    assert scene.gate.wait(7, lambda: False)
    assert not scene.said, "nothing is degraded"


def test_a_seal_that_does_not_come_after_a_stop_still_ends_the_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, stops = time.monotonic, iter([90.0])
    ahead = 0.0

    def stopped(seconds: float) -> None:
        nonlocal ahead
        ahead += next(stops, 0.5)

    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.sleep", stopped)
    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.monotonic", lambda: real() + ahead)
    assert not scene.gate.wait(7, lambda: False)
    assert 90 + 60 <= ahead < 90 + 62 and scene.said == ["version 7 was not sealed within 60 s"]


def test_versions_that_are_missed_one_after_the_other_are_no_protection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.monotonic", lambda: now)
    scene.page.set_sealed(3, 4)
    scene.gate.record_miss(5)
    now += 300.0
    scene.page.set_sealed(3, 5)
    scene.gate.record_miss(7)
    now += 300.0
    scene.page.set_sealed(3, 8)
    scene.gate.record_miss(9)
    now += 59.0
    scene.gate.record_miss(10)
    scene.gate.record_miss(10)  # the same one again, at a later step
    assert not scene.said, "5 was sealed in the end, 8 after 7, and 9 was missed less than 60 s before 10"
    now += 2.0
    scene.gate.record_miss(11)
    scene.gate.record_miss(12)
    assert scene.said == ["no version was sealed from version 9 on"] and scene.gate.degraded
    scene.page.set_sealed(3, 13)
    assert not scene.gate.degraded and scene.said[1:] == ["restored 13"]
    scene.gate.record_miss(14)
    assert not scene.gate.degraded


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_is_gone_is_waited_for_once(scene: Scene, when: str) -> None:
    """It may be dead: its node's death ends this process soon, and until then no step is completed."""

    def gone() -> None:
        scene.gate.degrade("a link broke", gone=True)

    telling = threading.Timer(0.0 if when == "before" else 0.1, gone)
    telling.start()
    if when == "before":
        telling.join()
    began = time.monotonic()
    assert not scene.gate.wait(2, lambda: False, patience_s=0.6)
    assert time.monotonic() - began > 0.55
    telling.join()
    assert scene.gate.degraded and len(scene.said) == 1
    began = time.monotonic()
    for _ in range(3):
        assert not scene.gate.wait(3, lambda: False, patience_s=10.0)
    assert time.monotonic() - began < 5.0, "after that it is like any other reason"
    scene.page.set_sealed(3, 2)
    assert not scene.gate.degraded


def test_a_ceiling_does_not_cut_a_wait_short_while_a_node_may_be_dead() -> None:
    scene = Scene(0.4)
    try:
        assert not scene.gate.wait(1, lambda: False, patience_s=0.0, quiet_s=9.0)
        assert scene.gate.waited_s < 0.3 and not scene.said, "a version of healthy nodes is only late"
        scene.page.set_state(control_page.STATE_FROZEN)
        assert not scene.gate.wait(1, lambda: False, patience_s=0.0, quiet_s=9.0)
        assert scene.gate.waited_s > 0.35 and scene.said == [
            "the agents cannot seal: a node is missing, or a recovery goes on"
        ]
    finally:
        os.close(scene.fd)


class Holder:
    """The way to a holder that is gone, or does not take the version."""

    free = True

    def __init__(self, gone: bool) -> None:
        self.gone = gone

    def offer(self, head: Head) -> bool:
        if self.gone:
            raise VersionLost("it is dead")
        return False

    def announce_end(self) -> None:
        """Say goodbye to nobody."""


class Silent:
    """An agent that is gone, and a slot of no bytes."""

    def request(self, message: Any) -> Any:
        raise AgentLost("gone")

    def view(self) -> memoryview:
        return memoryview(b"")

    def put(self, at: int, data: bytes) -> None:
        """Drop a header."""


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "refused"])
def test_a_version_is_given_up_and_waited_for_where_its_holder_is_gone(scene: Scene, gone: bool) -> None:
    """Over the agents, too: their link heals, but the holder's node may be dead."""
    told: list[str] = []
    silent: Any = Silent()
    boxes: Any = {1: Holder(gone)}
    session: Any = SimpleNamespace(
        name="default",
        rank=0,
        world=2,
        homes=[0, 1],
        epoch=3,
        protected=True,
        gate=scene.gate,
        require_agent=lambda: silent,
        record_incident=lambda name, version, reason: told.append(name),
        report_version=lambda name, version, reason: told.append(name),
        end_protection=told.append,
    )
    plan = Plan(silent, b"", SlotLayout.plan(0, 0, 0), frozenset(), 0, {})
    replicator = Replicator(session, plan, boxes, Pacer(1 << 20, 4), max_repeated=1, catch_up=lambda: None)
    job = CaptureJob(7, b"", [], Bound([]), [], None)
    replicator._commit(job, 0, silent, 0.0)
    scene.page.set_state(control_page.STATE_DEGRADED)
    replicator._thread.start()
    time.sleep(0.5)
    assert told == ["degraded" if gone else "refused"], "living ranks may still make the copies of a dead group"
    scene.page.set_state(control_page.STATE_PROTECTED)
    until(lambda: told[1:] == ["skipped"], what="the report, after which no other rank waits for the version")
    assert replicator.stop(5.0)
    assert scene.gate.degraded and len(scene.said) == 1
    assert not job.saved and job.left.is_set() and job.hopeless is not gone
    began = time.monotonic()
    assert not scene.gate.wait(7, lambda: job.hopeless, patience_s=0.3)
    assert (time.monotonic() - began > 0.25) is gone


def test_a_version_that_the_agents_have_given_up_is_known_as_such(scene: Scene) -> None:
    """The rank that voids it names it: the others have nothing to tell."""
    scene.page.set_abandoned(3, 7)
    assert not scene.gate.wait(7, lambda: False)
    assert scene.gate.is_abandoned(7) and not scene.gate.is_abandoned(8) and not scene.said


class Agenda:
    """The waits' clock, which goes on only while something waits, and what happens at its moments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *events: tuple[float, Callable[[], None]]) -> None:
        self.now, self.events = 0.0, sorted(events, key=itemgetter(0))
        monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.monotonic", lambda: self.now)
        monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.now >= self.events[0][0]:
            self.events.pop(0)[1]()


def test_seconds_in_which_a_node_is_missing_are_no_cost_of_a_version(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They neither end the training's patience nor make versions rarer."""
    back, seal = lambda: scene.page.set_state(control_page.STATE_PROTECTED), lambda: scene.page.set_sealed(3, 7)
    scene.page.set_state(control_page.STATE_DEGRADED)
    Agenda(monkeypatch, (0.6, back), (0.8, seal))
    whole = Wait(scene.gate.is_stuck)
    assert scene.gate.wait(7, lambda: False, patience_s=0.5, part_of=whole)
    assert whole.failing_s == pytest.approx(0.6, abs=0.01) and whole.count_own_s() == pytest.approx(0.2, abs=0.01)
    assert scene.gate.waited_s == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("missing_s", "stopped", "arrives", "ends"),
    [
        (3.0, False, 0.0, 4.5),
        (3.0, False, 4.0, 5.5),  # a device that comes when all nodes are back
        (0.0, True, 0.0, 61.5),
        (61.0, True, 0.0, 62.5),
        (61.0, True, 62.0, 63.5),
    ],
)
def test_patience_is_the_time_in_which_the_version_could_have_been_sealed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, missing_s: float, stopped: bool, arrives: float, ends: float
) -> None:
    """No second is taken off twice, nor one from before the device has come."""
    back = missing_s, lambda: scene.page.set_state(control_page.STATE_PROTECTED)
    agenda = Agenda(monkeypatch, *[(1.0, lambda: agenda.sleep(60.0))] * stopped, back)
    scene.page.set_state(control_page.STATE_DEGRADED)
    agenda.sleep(0.0)
    came = lambda: min(agenda.now, arrives)  # noqa: E731
    assert not scene.gate.wait(7, lambda: False, patience_s=1.5, began_at=came)
    assert agenda.now == pytest.approx(ends, abs=0.01) and not scene.said


def test_the_training_counts_the_missing_seconds_of_its_own_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replicator has waited for the version before for 2 s when the training comes to wait for the copy."""
    agenda = Agenda(monkeypatch, (2.3, lambda: end_replicators_wait()))  # noqa: PLW0108 - defined later
    monkeypatch.setattr("gemini_hpc.train.optimizer_gate.time", SimpleNamespace(perf_counter=lambda: agenda.now))
    scene.page.set_state(control_page.STATE_DEGRADED)
    job: Any = CaptureJob(2, b"", [], Bound([]), [], None)

    def end_replicators_wait() -> None:
        """Finish the wait of the replicator, which began at 0.0."""
        now, agenda.now = agenda.now, 0.0
        agenda.events = [(now, seal)]
        assert scene.gate.wait(1, lambda: False)
        agenda.events = [(2.4, job.left.set)]

    def seal() -> None:
        scene.page.set_state(control_page.STATE_PROTECTED)
        scene.page.set_sealed(3, 1)

    def wait(seconds: float) -> bool:
        until = agenda.now + seconds
        while agenda.now < until and not job.left.is_set():
            agenda.sleep(0.001)
        return bool(job.left.is_set())

    monkeypatch.setattr(job.left, "wait", wait)
    waits: list[tuple[float, float]] = []
    copies: list[float] = []
    nothing = lambda *_: None  # noqa: E731
    gate: Any = OptimizerGate.__new__(OptimizerGate)
    gate._session = SimpleNamespace(
        gate=scene.gate,
        guard=SimpleNamespace(is_leaving=lambda: False, wait_for_seal=nothing, waited_s=0.0),
        protected=True,
        epoch=3,
        version=2,
        seal_timeout_s=60.0,
    )
    controller = SimpleNamespace(
        scheme="gemini",
        repeats=2,
        record_gate_reached=nothing,
        record_copy_wait=copies.append,
        is_due=lambda version: False,
        record_wait=lambda spent_s, ours_s: waits.append((spent_s, ours_s)),
    )
    plan = SimpleNamespace(capture=SimpleNamespace(audit=lambda job: ()))
    gate._engine = SimpleNamespace(
        running=SimpleNamespace(controller=controller, plan=plan), pacer=SimpleNamespace(wake=nothing)
    )
    gate.job, gate.resumed_from, gate.uncaptured_version, gate._max_repeated, gate._times = job, None, 0, 2, Times()
    agenda.sleep(2.0)
    gate._wait()
    assert waits == [(pytest.approx(0.4, abs=0.02), pytest.approx(0.1, abs=0.02))]
    assert copies == [pytest.approx(0.1, abs=0.02)], "nor does it make versions rarer"


def test_an_abandoned_version_ends_no_wait_while_a_node_may_be_dead(scene: Scene) -> None:
    """The dead node's peers give up what they were sending it; one more step would be one more to repeat."""
    scene.page.set_abandoned(3, 7)
    scene.page.set_state(control_page.STATE_DEGRADED)
    threading.Timer(0.3, lambda: scene.page.set_state(control_page.STATE_PROTECTED)).start()
    assert not scene.gate.wait(7, lambda: False)
    assert scene.gate.waited_s > 0.25 and not scene.gate.degraded


def test_after_an_abandoned_version_a_degraded_rank_waits_again(scene: Scene) -> None:
    """The agents decide again. A rank that ran ahead of the others would skip each version that they save."""
    scene.gate.degrade("a rank has lost its copies")
    for version in range(1, 9):
        scene.page.set_abandoned(3, version)
        assert not scene.gate.wait(version, lambda: False)
    assert not scene.gate.wait(9, lambda: True), "given up by this rank itself"
    threading.Timer(0.1, lambda: scene.page.set_sealed(3, 10)).start()
    assert scene.gate.wait(10, lambda: False)
    assert not scene.gate.degraded and scene.said[1:] == ["restored 10"]


def test_a_wait_now_and_then_while_degraded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait and ranks that do not would come to save different versions."""
    real, ahead = time.monotonic, 0.0

    def passes(seconds: float) -> None:
        nonlocal ahead
        ahead += 0.05

    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.sleep", passes)
    monkeypatch.setattr("gemini_hpc.client.seal_wait.clock.monotonic", lambda: real() + ahead)
    scene.gate.degrade("a rank has skipped a version")
    waited_s = []
    for version in range(1, 17):
        before = ahead
        assert not scene.gate.wait(version, lambda: False)
        waited_s.append(ahead - before)
    assert [number for number, seconds in enumerate(waited_s, 1) if seconds] == [1, 3, 7, 15]
    assert max(waited_s) < 0.5 and len(scene.said) == 1
    scene.page.set_sealed(3, 16)
    assert scene.gate.wait(16, lambda: False)
    scene.gate.degrade("again")
    scene.page.set_sealed(3, 17)
    assert scene.gate.wait(17, lambda: False), "counted anew"
    scene.lost = True
    scene.gate.degrade("the agent is gone")
    assert not scene.gate.wait(18, lambda: False)
