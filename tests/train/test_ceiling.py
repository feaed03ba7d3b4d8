"""No training waits for its versions beyond the ceiling: what follows from the time between step() and seal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.core.seal_latency import SealLatency
from gemini_hpc.core.wait_budget import FIRST_S, MOST_SAVED_S, WaitBudget
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.interval_controller import Agreed, IntervalController
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.planner import Planner
from gemini_hpc.train.schedule.trace import Iteration
from gemini_hpc.train.schedule.traffic import Traffic

from .rank_session import rank_session
from .stopped_clock import Time
from .timed_device import TimedDevice


class Rounds:
    """The rounds of some ranks, which all start one before any of them reads it."""

    def __init__(self, ranks: int) -> None:
        self._said: list[list[int] | None] = [None] * ranks

    def of(self, rank: int) -> Any:
        def highest(words: Sequence[int]) -> None:
            self._said[rank] = list(words)
            link.sitting = True

        def words() -> list[int]:
            link.sitting = False
            return [max(of) for of in zip(*(said for said in self._said if said is not None), strict=True)]

        link = SimpleNamespace(sitting=False, start_max_round=highest, read_maxima=words)
        return link


class Training:
    """Ranks of one replica, iteration by iteration. sealed_s: from step() to the seal, by rank; a version is sealed
    with the slowest. left_s: the optimizer waits so long for the copy. cpu: core-seconds of a version, and cores that
    an agent may use, by rank."""

    def __init__(
        self,
        time: Time,
        sealed_s: Sequence[float],
        *,
        left_s: float = 0.0,
        cpu: Sequence[tuple[float, float]] = ((0.0, 0.0),) * 3,
        **traffic: Any,
    ) -> None:
        self.time, self.sealed_s, self.left_s = time, list(sealed_s), left_s
        self.version, self.waited_s, self.said = 0, 0.0, list[str]()
        self.sealed: tuple[int, float] = 0, 0.0  # on the page
        self.job: SimpleNamespace | None = None
        self.seals_at = 0.0
        self.saved = list[int]()
        self.late = 0
        rounds = Rounds(len(self.sealed_s))
        self.controllers = [
            IntervalController(
                rank_session(self.said.append, rank, seal=self._seal, cpu=cpu[rank]),
                Planner(Traffic(**traffic), rank, (), 0, LinkMeter(), None),
                rounds.of(rank) if len(self.sealed_s) > 1 else None,
                CollectiveMonitor(lambda ranks: True),
                Pacer(1 << 20, 4),
                SimpleNamespace(send_summary=lambda state, now: state()),  # type: ignore[arg-type]
            )
            for rank in range(len(self.sealed_s))
        ]

    def _seal(self) -> tuple[tuple[int, int], float]:
        if self.job is not None and self.time.now >= self.seals_at:
            self.sealed = self.job.version, self.seals_at
        return (1, self.sealed[0]), self.sealed[1]

    def run(self, iterations: int, length_s: float) -> float:
        """Return the share of the time that was lost."""
        began = self.time.now
        for _ in range(iterations):
            self.time.now += length_s
            self._gate()
            self.version += 1
            self._step()
        return (self.time.now - began) / (iterations * length_s) - 1

    def _gate(self) -> None:
        job, began = self.job, self.time.now
        for controller in self.controllers:
            controller.record_gate_reached()
        if job is not None and job.version == self.version:
            self.time.now = max(self.time.now, job.taken_at + self.left_s)
            for controller in self.controllers:
                controller.record_copy_wait(self.time.now - began)
        if job is not None and not job.late and self.controllers[0].is_due(job.version):
            for controller in self.controllers:
                controller.begin_seal_wait()
            patience_s = max(controller.patience_s for controller in self.controllers)
            self.time.now = max(self.time.now, min(self.seals_at, self.time.now + patience_s))
            job.late = self.time.now < self.seals_at
            self.late += job.late
        for controller in self.controllers:
            controller.record_wait(self.time.now - began)
        self.waited_s += self.time.now - began

    def _step(self) -> None:
        under_way = self.job is not None and self.time.now < self.seals_at
        saves = {self._saves(controller, under_way=under_way) for controller in self.controllers}
        assert len(saves) == 1, "all ranks save the same versions"
        assert not any(controller.problem for controller in self.controllers)
        if saves.pop() and not under_way:
            self._seal()
            self.saved.append(self.version)
            self.job = SimpleNamespace(
                version=self.version, taken_at=self.time.now, saved=True, late=False, copied_at=0.0, arrived_at=0.0
            )
            self.seals_at = self.time.now + max(self.sealed_s)
            for controller in self.controllers:
                controller.record_capture(self.time.now, None, self.job)

    def _saves(self, controller: IntervalController, *, under_way: bool) -> bool:
        controller.step(self.version, under_way)
        return controller.saves(self.version)


@pytest.mark.parametrize("length_s", [0.02, 0.107, 0.5, 2.0, 30.0])
@pytest.mark.parametrize("sealed_s", [[0.002], [0.1], [0.87], [4.0], [0.87, 0.87], [0.3, 0.87, 2.3], [20.0]])
def test_no_training_waits_beyond_the_ceiling(time: Time, length_s: float, sealed_s: list[float]) -> None:
    training = Training(time, sealed_s)
    training.run(25, length_s)
    assert training.waited_s <= FIRST_S + 0.01 * 25 * length_s
    first_s = training.waited_s
    assert training.run(1000, length_s) <= 0.01 + MOST_SAVED_S / (1000 * length_s)
    controller = training.controllers[0]
    iterations = 1 + max(sealed_s) / length_s
    assert controller.repeats <= 2 * iterations + 2, "and saves as often as that allows"
    gaps = {b - a for a, b in zip(training.saved[-4:], training.saved[-3:], strict=False)}
    assert len(gaps) == 1, "no flapping"
    assert bool(first_s >= 1.0) == any("has waited" in line for line in training.said)


@pytest.mark.parametrize("cpu", [[(0.39, 0.5)], [(0.1, 0.5), (0.39, 0.5)], [(3.1, 4.0), (0.0, 0.0)]])
def test_no_agent_uses_more_processors_than_it_may(time: Time, cpu: list[tuple[float, float]]) -> None:
    """Almost 0.8 s of an agent's cores in iterations of 0.1 s: all ranks save one version in eight."""
    training = Training(time, [0.002] * len(cpu), cpu=cpu)
    training.run(40, 0.1)
    del training.saved[:]
    training.run(200, 0.1)
    assert {b - a for a, b in itertools.pairwise(training.saved)} == {8}
    assert training.controllers[0].repeats == 8, "and is sealed as soon as ever"
    (line,) = training.said
    used_s, cores = max(cpu)
    assert (
        f"takes {used_s:.2g} core-seconds of an agent that may use {cores:.2g} cores, in iterations of 0.1 s" in line
    )
    assert line.endswith("saving one version in 8; a failure repeats at most 8 steps")
    reasons = [controller.build_state().reason for controller in training.controllers]
    assert reasons.pop(cpu.index(max(cpu))).endswith(
        "fewer bytes a rank, or a higher agent_cores in the site's settings"
    )
    assert not any(reasons), "what other ranks measure is no reason"


def test_an_agent_within_its_processors_changes_nothing(time: Time) -> None:
    """Nor does one that a user's own frequency keeps busy."""
    training = Training(time, [0.002], cpu=[(0.04, 0.5)])
    training.run(100, 0.1)
    assert (training.controllers[0].repeats, training.said) == (1, [])
    forced = Training(time, [0.002], cpu=[(4.0, 0.5)], every=2)
    forced.run(100, 0.1)
    assert forced.controllers[0].repeats == 2


def test_the_line_says_why_and_what_a_failure_repeats(time: Time) -> None:
    training = Training(time, [0.3, 0.87])
    training.run(200, 0.107)
    lines = [line for line in training.said if "saving one version" in line]
    j = training.controllers[0].repeats // 2 + 1
    assert len(lines) == 1, "one rank says it for all"
    assert "a version is sealed 0.87 s after step() (copy, digests, votes) in iterations of 0.11 s" in lines[0]
    assert f"saving one version in {j}; a failure repeats at most" in lines[0]


def test_a_copy_that_the_optimizer_has_to_wait_for_counts(time: Time) -> None:
    """It cannot be given up, so only fewer versions make it cheaper."""
    training = Training(time, [0.5], left_s=0.3)
    training.run(25, 0.1)
    assert training.run(2000, 0.1) <= 0.0125
    assert any("the optimizer waits 0.2 s for the copy" in line for line in training.said)


def test_seals_that_become_quicker_are_followed(time: Time) -> None:
    training = Training(time, [2.0])
    training.run(100, 0.1)
    assert training.controllers[0].repeats > 20
    training.sealed_s[0] = 0.05
    training.run(600, 0.1)
    assert training.controllers[0].repeats == 1


def test_a_forced_frequency_stays_and_is_awaited_as_late_as_it_can_be(time: Time) -> None:
    training = Training(time, [0.25], every=5)
    training.run(25, 0.1)
    assert training.run(500, 0.1) <= 0.01
    gaps = {b - a for a, b in zip(training.saved[1:], training.saved[2:], strict=False)}
    assert gaps == {5} and training.controllers[0].repeats == 5 + 3 - 1


# ---- the parts -----------------------------------------------------------------------------------------


def test_the_budget_is_spent_once_and_earned_slowly() -> None:
    budget = WaitBudget(0.01)
    assert budget.left_s == FIRST_S
    budget.spend(3.0)
    budget.add_training(100.0)
    assert budget.left_s == pytest.approx(FIRST_S - 3.0 + 1.0) and budget.first_waited_s == 3.0
    budget.end_first_phase()
    assert budget.left_s == MOST_SAVED_S
    budget.spend(2.0)
    assert budget.left_s == 0.0
    budget.add_training(60.0)
    assert budget.left_s == pytest.approx(0.1), "what was lost beyond it is made up for first"


def job(version: int, taken_at: float, **more: Any) -> Any:
    return SimpleNamespace(version=version, taken_at=taken_at, saved=True, copied_at=0.0, arrived_at=0.0, **more)


def test_only_the_seal_of_the_version_itself_is_measured() -> None:
    seal = [(1, 0), 0.0]
    latency = SealLatency(lambda: (seal[0], seal[1]))  # type: ignore[arg-type,return-value]
    one = job(5, 10.0)
    latency.begin_version(one)
    seal[:] = [(1, 4), 10.1]
    latency.poll()
    assert latency.whole_s == 0.0
    one.copied_at, one.arrived_at = 10.2, 10.7
    seal[:] = [(1, 5), 10.8]
    latency.poll()
    latency.poll()
    assert latency.whole_s == pytest.approx(0.8) and latency.fixed_s == pytest.approx(0.3)
    for sealed, at in ((6, 9.0), (6, 1e7), (7, 12.0)):  # of another epoch, another clock, another version
        latency.begin_version(job(6, 11.0))
        seal[:] = [(1, sealed), at]
        latency.poll()
    assert latency.whole_s == pytest.approx(0.8)


def test_versions_in_time_are_seen_too_and_a_new_plan_begins_anew() -> None:
    """A version of several iterations is sealed before it is due: else only late ones would count, however rare."""
    seal = [(1, 0), 0.0]
    latency = SealLatency(lambda: (seal[0], seal[1]))  # type: ignore[arg-type,return-value]

    def save(version: int, lag_s: float) -> None:
        latency.begin_version(job(version, 10.0 * version))
        seal[:] = [(1, version), 10.0 * version + 1 + lag_s]
        if lag_s < 0:
            latency.poll()
        for iteration in range(1, 4):  # until the next version begins
            latency.record_due(10.0 * version + iteration)
            latency.poll()

    for version in range(1, 41):
        save(version, 0.5 if version % 4 == 0 else -0.5)
        assert latency.measure_lag_s(0.01) == 0.0
    for version in range(41, 45):
        save(version, 0.5)
    assert latency.measure_lag_s(0.01) == pytest.approx(0.5), "later iterations do not count as versions in time"
    for version in range(45, 49):
        save(version, 0.5)
    latency.follow_plan()
    assert latency.measure_lag_s(0.01) == 0.0, "these were of another plan"


def test_versions_that_are_late_again_and_again_are_seen() -> None:
    seal = [(1, 0), 0.0]
    latency = SealLatency(lambda: (seal[0], seal[1]))  # type: ignore[arg-type,return-value]
    for version, lag_s in enumerate((0.0, 0.5, 0.4, 0.6), 1):
        assert latency.measure_lag_s(0.01) == 0.0
        latency.begin_version(job(version, 10.0 * version))
        latency.record_due(10.0 * version + 1)
        seal[:] = [(1, version), 10.0 * version + 1 + lag_s]
        latency.poll()
    assert latency.measure_lag_s(0.55) == 0.0, "so much is allowed"
    assert latency.measure_lag_s(0.01) == pytest.approx(0.45)
    assert latency.measure_lag_s(0.01) == 0.0, "the next answer is of other versions"


# ---- the first version of a training whose traffic is planned -------------------------------------------


class Sending:
    """The controller of a rank that sends copies. The rounds say what this rank says."""

    def __init__(self, time: Time, monitor: CollectiveMonitor | None = None) -> None:
        self.time, self.version, self.sealed = time, 0, ((0, 0), 0.0)
        self.pacer, self._said = Pacer(1 << 20, 4), list[Any]()
        self._link = SimpleNamespace(
            sitting=False,
            over_at=0.0,
            start_gather_round=lambda blob, size: self._begin([blob]),
            start_max_round=self._begin,
            read_blobs=self._end,
            read_maxima=self._end,
        )
        self.controller = IntervalController(
            rank_session(lambda text: None, outgoing=[1], seal=lambda: self.sealed),
            Planner(Traffic(), 0, [1], 1 << 20, self.pacer.meter, None),
            cast(Any, self._link),
            monitor or CollectiveMonitor(lambda ranks: True),
            self.pacer,
            cast(Any, SimpleNamespace(send_summary=lambda state, now: state(), draw=lambda *_: None)),
        )

    def _begin(self, words: Sequence[Any]) -> None:
        self._link.sitting, self._said = True, list(words)

    def _end(self, *patience: Any) -> list[Any]:
        self._link.sitting = False
        return self._said

    def step(self, *, under_way: bool = False, waits_s: float = 0.0, ours_s: float = 0.0) -> None:
        """The next step(), whose version is saved. ours_s: of the wait, with nothing missing."""
        self.time.now += 0.5
        self.version += 1
        self.controller.record_gate_reached()
        self.time.now += waits_s
        self.controller.record_wait(waits_s, ours_s)
        self.controller.step(self.version, under_way)
        assert not self.controller.problem and self.controller.saves(self.version)
        self.job: Any = SimpleNamespace(
            version=self.version, taken_at=self.time.now, saved=True, copied_at=0.0, arrived_at=0.0
        )
        self.controller.record_capture(self.time.now, None, self.job)

    def seal(self) -> None:
        """The newest version is sealed."""
        self.sealed = (1, self.version), self.time.now + 0.1


def test_nothing_waits_for_the_optimizer_before_a_version_is_sealed(time: Time) -> None:
    """The timed iterations have no traffic of ours, and those before them do not count."""
    training = Sending(time)
    try:
        for under_way in (False, True, True):
            training.step(under_way=under_way)
            assert not training.pacer.deferred, "nothing is protected yet"
        training.seal()
        for number in range(5):
            training.step()
            assert training.controller.build_state().stage == "profile"
            assert training.pacer.deferred
            assert training.controller._planner.clean == number
            training.seal()
    finally:
        training.controller.close()


def test_seconds_in_which_a_node_is_missing_make_no_version_rarer(time: Time) -> None:
    training = Sending(time)
    try:
        training.step()
        training.seal()
        left_s = training.controller._budget.left_s
        for _ in range(4):
            training.controller.begin_seal_wait()
            training.time.now += 1.5
            training.controller.record_wait(1.5, 0.01)
            training.step()
            training.seal()
        assert training.controller._budget.left_s > left_s - 0.1
        assert training.controller._compute_haste() == 0
    finally:
        training.controller.close()


def test_a_device_is_charged_for_a_wait_without_its_missing_seconds(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device ends an iteration later than its host, so both come from the same iteration."""
    monkeypatch.setattr(Iteration, "has_all_times", lambda *_: False)  # no profile
    device = TimedDevice()
    device.clock = lambda: time.now  # type: ignore[method-assign]
    monitor = CollectiveMonitor(lambda ranks: True, device=lambda: device)
    monitor.start()
    training = Sending(time, monitor)
    try:
        for waits_s in (0.0, 0.0, 20.0, 0.0, 0.0):
            training.step(waits_s=waits_s)
        assert training.controller._budget.first_waited_s == pytest.approx(0.0, abs=1e-3)
        for waits_s, ours_s in ((21.0, 1.0), (0.0, 0.0), (0.0, 0.0)):
            training.step(waits_s=waits_s, ours_s=ours_s)
        assert training.controller._budget.first_waited_s == pytest.approx(1.0, abs=1e-3)
    finally:
        training.controller.close()
        assert not monitor.problem


def test_a_plan_is_judged_without_the_seconds_in_which_a_node_is_missing(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, judged = Sending(time), list[tuple[float, float]]()
    try:
        for _ in range(3):
            training.step()
        training._link.sitting, training.controller._stage = False, "steady"
        monkeypatch.setattr(
            training.controller._overhead,
            "judge_iteration",
            lambda length_s, waited_s, *_, **__: judged.append((length_s, waited_s)) or "",
        )
        training.step(waits_s=21.0, ours_s=1.0)
        assert judged == [(pytest.approx(1.5), pytest.approx(1.0))]
    finally:
        training.controller.close()


@pytest.mark.parametrize("j", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("base", range(13))
def test_of_thinned_versions_one_in_four_iterations_is_saved(time: Time, j: int, base: int) -> None:
    """Whatever the interval is: else versions that are skipped together would never be sealed again."""
    training = Sending(time)
    training.controller._agreed = Agreed(j, 1, base)
    saved = [version for version in range(base, base + 60) if training.controller.saves(version)]
    thinned = [version for version in saved if training.controller.saves_one_in(4, version)]
    gaps = {after - before for before, after in pairwise(thinned)}
    assert thinned[0] == base and gaps == {-(-4 // j) * j}
