"""Choice of the versions to save, the time they may take, and the idle spans in which they travel.

A training begins in stage `recall`: where the profiles of an earlier incarnation make a plan on all ranks, it goes on
with stage `agree`. Otherwise it goes on with stage `profile`. There every version is saved, but its chunks wait until
the training waits for them at the optimizer. The collectives of these iterations are therefore timed without any
traffic of ours, and protection runs from the first step. Until a version is sealed nothing is protected, so chunks go
at once, and the iterations do not count.

After enough iterations the ranks exchange profiles (stage `plan`). Each rank plans on the spans in which its holders
are idle too (Algorithm 2). All ranks take the largest j and s that one of them needs (stage `agree`), and enter stage
`steady`. There every j-th version is saved and may take s iterations.

Periodically the ranks run a round. A rank may find that its profile no longer describes the training, or that the
overhead is too high. The round then brings all ranks back to `profile`. The same rounds show whether the ranks have
to distribute the state anew (`Replanning`). Then they exchange the size of their offers (stage `sizes`) and the
offers (stage `offers`), and begin with `profile` again.

No version costs the training more than the ceiling. Everything in the training's thread counts: the capture inside
step(), the copy that the optimizer waits for, and the wait for a seal. `WaitBudget` bounds that wait. Hence j and s
follow from the time between step() and seal (`SealLatency`) wherever that is longer than the transfer. Where nothing
is sent (one replica) they follow from that time alone.

Everything that must be the same on all ranks follows from the version's number and from the rounds of
`AsyncCollectives` only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from gemini_hpc import clock
from gemini_hpc.client import stats_messages
from gemini_hpc.client.session import RankSession
from gemini_hpc.core import schedule
from gemini_hpc.core.interval_reporter import IntervalReporter, Reason, explain_late_seals
from gemini_hpc.core.moments import Moment
from gemini_hpc.core.pace import IterationPace
from gemini_hpc.core.seal_latency import SealLatency
from gemini_hpc.core.spans import Trace
from gemini_hpc.core.wait_budget import MOST_SAVED_S, WaitBudget
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.schedule.async_collectives import AsyncCollectives, CollectivesBroken
from gemini_hpc.train.schedule.capture_cost import CaptureCost
from gemini_hpc.train.schedule.chunk_schedule import Route
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.overhead_monitor import (
    IN_A_ROW,
    OverheadMonitor,
    Pictured,
    subtract_capture,
    subtract_wait,
)
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.planner import BLOB_BYTES, Planner
from gemini_hpc.train.schedule.replanning import Replanning
from gemini_hpc.train.schedule.stats_reporter import StatsReporter
from gemini_hpc.train.schedule.traffic import Scheme
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.wire.traffic import TrafficState

PROFILED = 20  # clean iterations that make a profile (paper, section 5.4)
PROFILED_AGAIN = 8
_OFFERS_S = 10.0  # wait for the offers before a new plan, which are large where ranks are many
_COUNT_EVERY = 5
_BEHIND = 16  # iterations that a device may lag behind its host and still be accounted for
_RECORD_EVERY = 50  # times are recorded for `IN_A_ROW` iterations, then not for this many
_WORD_EVERY_S = 5.0  # a profile takes this long or more, and each word is a collective
_POINT_S = 1e-6  # a microsecond: times travel as whole numbers of it
_QUIET = 4  # times the usual time to a seal: longest time without progress; while that time is unknown, ...
_UNKNOWN = 3  # ... times the user's timeout
_RANKS = 1 << 20
_PLANNED: tuple[Scheme, ...] = ("gemini", "naive", "no_pipeline")

Stage = Literal["recall", "profile", "plan", "agree", "steady", "sizes", "offers"]


@dataclass(frozen=True)
class Agreed:
    """The frequency that all ranks follow.

    Attributes:
        j: Every j-th version is saved.
        s: Iterations that a version may take.
        base: The first version that is saved.
    """

    j: int = 1
    s: int = 1
    base: int = 0

    def saves(self, version: int) -> bool:
        """Return whether the version is saved."""
        return version >= self.base and (version - self.base) % self.j == 0

    def find_free_version(self, version: int) -> int:
        """Return the first version, from `version` on, by which no earlier version is in transfer."""
        if version < self.base:
            return self.base
        last = version - (version - self.base) % self.j
        return version if last == version else max(version, last + self.s)


class IntervalController:
    """The controller of one rank's versions, used by the training's thread only."""

    def __init__(
        self,
        session: RankSession,
        planner: Planner,
        collectives: AsyncCollectives | None,
        monitor: CollectiveMonitor,
        pacer: Pacer,
        reporter: StatsReporter,
        replanning: Replanning | None = None,
        find_costliest: Callable[[float], str] = lambda seconds: "",
    ) -> None:
        """Create a controller, and set the pacer.

        Args:
            session: The rank's session with its agent.
            planner: Planner of the rank's versions.
            collectives: Rounds with the other ranks; None where there is no other rank.
            monitor: Monitor of the training's collectives.
            pacer: Pacer of the sending thread.
            reporter: Reporter to the agent.
            replanning: Agreement on new plans; None where the state's distribution never changes.
            find_costliest: Returns the object that takes most of a capture of that many seconds; "" if none does.
        """
        self._planner, self._driver, self._traffic = planner, planner.driver, planner.traffic
        self._rank, self._say, self._gate = session.rank, session.say, session.gate
        self._collectives, self._monitor, self._pacer = collectives, monitor, pacer
        self._reporter, self._replanning = reporter, replanning
        traffic, self._sends = planner.traffic, bool(session.outgoing)
        self._offer, self._room_bytes = b"", 0
        self._compared = 0  # rounds since the state was distributed
        self._scheme: Scheme = traffic.scheme
        self._wanted_scheme: Scheme = traffic.scheme
        self._stage: Stage = "recall"
        self._since = -1
        self._version = 0
        self._find_costliest = find_costliest
        self._agreed = self._former = Agreed() if self._sends else Agreed(max(1, traffic.every))
        self._because = 0  # the rank that needs the j in effect
        self._cost = CaptureCost(_BEHIND)
        self._others_s = 0.0  # seconds of the longest capture of all ranks
        self._pace = IterationPace(traffic.overhead)
        self._latency, self._budget = SealLatency(lambda: session.gate.seal), WaitBudget(traffic.overhead)
        self._waits: deque[float] = deque(maxlen=4)  # seconds of the waits for the latest versions
        self._version_iterations = 0  # iterations that a version takes, where profiling must not wait for it; else 0
        self._interval_reporter = IntervalReporter(session.rank, traffic.overhead, session.say)
        self._waited_for = False
        self._wanted = PROFILED
        self._dirty = True
        self._dirties: deque[bool] = deque([True] * _BEHIND, maxlen=_BEHIND)
        self._waited_s = self._failing_s = 0.0  # of this iteration; `_failing_s` is a part of `_waited_s`
        self._route: Route | None = None
        self._plan: schedule.Plan | None = None
        self._overhead = OverheadMonitor(traffic.overhead)
        self._next_word = self._record_from = 0
        self._renew = ""
        self._history: deque[tuple[int, int, int]] = deque(maxlen=100)
        self._begun_at = clock.monotonic()
        self.problem = ""
        self.unsealed = 0  # versions that were in transfer when the training had to go on
        if (collectives is not None and self._sends) or monitor.on_device:
            pacer.traffic = monitor
        self._apply_stage()

    # ---- queries of the checkpointer -------------------------------------------------------------------

    @property
    def scheme(self) -> Scheme:
        """Return the scheme in effect. The setter takes effect at the next step()."""
        return self._scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        self._wanted_scheme = scheme

    def saves(self, version: int) -> bool:
        """Return whether this version is saved."""
        if self._scheme == "none":
            return False
        return not self._paced or self._agreed.saves(version)

    def saves_one_in(self, iterations: int, version: int) -> bool:
        """Return whether to save this version of those that are saved, where one in so many iterations is enough.

        All ranks agree on it.
        """
        agreed = self._agreed if self._paced else Agreed()
        return (version - agreed.base) // agreed.j % -(-iterations // agreed.j) == 0

    def is_due(self, version: int) -> bool:
        """Return whether this version must be sealed before the next optimizer step.

        True may come later than at the due step, if step() was called without an optimizer step.
        """
        agreed = self._agreed if version >= self._agreed.base else self._former
        return self._version - version + 1 >= (agreed.s if self._paced else 1)

    @property
    def agrees(self) -> bool:
        """Return whether the ranks can agree on changes."""
        return self._planned

    @property
    def repeats(self) -> int:
        """Return the number of steps that a failure may cost now."""
        agreed = self._agreed if self._version >= self._agreed.base else self._former
        return agreed.j + agreed.s - 1 if self._paced else 1

    def record_capture(self, began: float, mark: Event | None, job: CaptureJob | None = None) -> None:
        """Record that a version has been captured in this step(); see `CaptureCost`."""
        self._cost.record_capture(began, mark)
        self._budget.spend(self._cost.seconds)
        if job is not None:
            self._latency.begin_version(job)

    def read_moment(self) -> Moment:
        """Return the moment of the training at this `step()`; called once in each, before anything else."""
        return self._monitor.count.read()

    def record_gate_reached(self) -> None:
        """Record that the training has reached the optimizer."""
        self._pace.note_gate(clock.monotonic() - self._begun_at)
        self._monitor.record_gate_reached()
        if self._driver is not None:
            self._driver.prepare_for_gate()

    def begin_seal_wait(self) -> None:
        """Record that the training begins to wait for the seal of the newest version."""
        self._waited_for = True
        self._latency.record_due(clock.monotonic())

    def record_copy_wait(self, seconds: float) -> None:
        """Record the seconds that the optimizer has waited for the newest version's copy."""
        if not self._monitor.on_device:
            self._cost.add_wait(seconds)

    def record_wait(self, seconds: float, ours_s: float | None = None) -> None:
        """Record a finished wait at the optimizer.

        Args:
            seconds: Seconds of the whole wait.
            ours_s: Seconds of these in which no node or agent was missing; None: all of them.
        """
        ours_s = seconds if ours_s is None else ours_s
        if self._scheme != "blocking" and not self._monitor.on_device:  # a device's wait is known only later
            self._budget.spend(ours_s)
        self._waited_s += seconds
        self._failing_s += seconds - ours_s
        self._monitor.record_gate_passed(seconds - ours_s)
        self._pacer.record_gate_passed()

    @property
    def patience_s(self) -> float:
        """Return the longest wait at the optimizer for a version in transfer, in seconds."""
        if self._scheme == "blocking":  # this scheme exists to show the cost of waiting
            return math.inf
        if not self._latency.whole_s:  # the first version, whose time to the seal is unknown
            return self._budget.left_s
        expected_s = self._plan.late_s if self._plan is not None and self._stage == "steady" else 0.0
        return min(self._budget.left_s, MOST_SAVED_S + 2 * expected_s)

    def compute_quiet_s(self, timeout_s: float) -> float:
        """Return the longest seconds without progress of a healthy version, as digests and votes take time.

        Args:
            timeout_s: The least result, the user's `seal_timeout_s`.
        """
        return max(timeout_s, _QUIET * self._latency.whole_s or _UNKNOWN * timeout_s)

    def resize(self, shard_bytes: int, key: str) -> None:
        """Use another size of copies from the next plan on.

        Args:
            shard_bytes: Bytes of one copy.
            key: Key of the profile that is kept for the next incarnation.
        """
        self._planner.resize(shard_bytes)
        self._reporter.rename(key)

    def close(self) -> None:
        """Stop the monitor; the training is over."""
        self._monitor.stop()

    def await_round(self, patience_s: float) -> bool:
        """Wait for the round in flight, once the monitor has stopped, and return whether gloo has let go of it."""
        return self._collectives is None or self._collectives.await_end(patience_s)

    # ---- each iteration --------------------------------------------------------------------------------

    @property
    def _planned(self) -> bool:
        return self._sends and self._scheme in _PLANNED and self._collectives is not None and not self.problem

    @property
    def _defers(self) -> bool:
        """Return whether chunks wait until the training waits for them, so that its collectives are timed alone."""
        return (
            self._planned and self._stage != "steady" and not self._version_iterations and self._latency.whole_s > 0
        )

    @property
    def _paced(self) -> bool:
        """Return whether `_agreed` decides which versions are saved."""
        return self._planned or not self._sends or self._collectives is None

    def step(self, version: int, under_way: bool) -> None:
        """Process the end of an iteration and the beginning of the next. Never raises.

        Args:
            version: Number of the step() that has been reached.
            under_way: Whether an earlier version is still in transfer.
        """
        try:
            stage = self._stage
            try:
                self._step(version, under_way)
            except CollectivesBroken as error:
                self._give_up(str(error))
            self._reporter.send_summary(self.build_state, now=self._stage != stage)
        except Exception as error:  # our own failure must not reach the training
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self.problem:
            self.problem = reason
            if self._replanning is not None:
                self._replanning.break_off(reason)
            if self._driver is not None:
                self._driver.fail(reason)
            lost = (
                "traffic scheduling is off, copies now travel at any time"
                if self._sends
                else "the frequency of versions does not change any more"
            )
            self._say(f"rank {self._rank}: {lost}: {reason}")
        self._apply_stage()

    def _step(self, version: int, under_way: bool) -> None:
        trace = self._monitor.mark() if self._pacer.traffic is not None else None
        waited_s, self._waited_s = self._waited_s, 0.0
        # a device waits less than its host, and its wait is known later
        device_s, held_s = self._monitor.waited_s, self._monitor.held_s
        held_s = waited_s if held_s is None else held_s
        failing_s, self._failing_s = self._failing_s, 0.0
        if device_s is not None and self._scheme != "blocking":
            self._budget.spend(device_s)
        self._latency.poll()
        self._pacer.deferred = self._defers
        length_s = clock.monotonic() - self._begun_at
        self._budget.add_training(max(0.0, length_s - waited_s))
        self._pace.note_iteration(length_s - waited_s - self._cost.begun_s)
        self._version = version
        self._dirties.append(self._dirty or self._pacer.used_pause)
        self._pacer.begin_iteration(version)
        self._cost.begin_iteration()
        if self._since < 0:
            self._since = self._next_word = version
        if not self._sends and self._scheme != self._wanted_scheme:
            self._scheme = self._wanted_scheme
            self._apply_stage()
        if not self._planned and self._scheme in _PLANNED:
            self._begun_at = clock.monotonic()
            self._follow_pace(version)
            return
        if self._collectives is None or self.problem:
            return
        if self._collectives.sitting:
            self._process_round(version, waited_s)
        if trace is not None:
            self._record_trace(subtract_wait(trace, held_s), version)
        if self._stage == "steady" and self._scheme == "gemini":
            ours_s = waited_s - failing_s if device_s is None else device_s
            self._judge_iteration(ours_s, failing_s, trace, held_s, version)
        self._begun_at = clock.monotonic()
        if self._pacer.meter.known:
            self._monitor.bytes_per_s = self._pacer.meter.B
        if self._planned and self._stage == "profile" and self._waited_for:
            self._waits.append(waited_s - failing_s)
        self._waited_for = False
        if self._scheme != self._wanted_scheme:
            self._scheme = self._wanted_scheme
            self._apply_stage()
        self._start_due_round(version)
        self._dirty = under_way or (not self._pacer.deferred and self.saves(version))

    def _follow_pace(self, version: int) -> None:
        """Choose j and s, where no traffic is planned, by the time to the seal and the cost of a version."""
        due, agreed, collectives = self._pace.is_due(version - self._since), self._agreed, self._collectives
        common = not self._sends and not self.problem
        if collectives is not None and collectives.sitting and common:
            words = collectives.read_maxima()
            j, self._because = words[0] // _RANKS, _RANKS - 1 - words[0] % _RANKS
            self._adopt_pace(j, words[1], version)
        elif due and common:
            wish = self._pace.choose_frequency(
                agreed.j, agreed.s, self._latency.whole_s, self._version_s, self._traffic.every
            )
            if collectives is not None:
                collectives.start_max_round([wish.j * _RANKS + _RANKS - 1 - self._rank, wish.s])
            else:
                self._adopt_pace(wish.j, wish.s, version)
        elif due and self._cost.seconds and not self._traffic.every:
            wish = self._pace.choose_frequency(agreed.j, agreed.s, 0.0, self._cost.whole_s, 0)
            self._report_interval(wish.j, self._pace.usual_s, in_force=wish.j == agreed.j)

    def _adopt_pace(self, j: int, s: int, version: int) -> None:
        """Follow j and s from this version on, as all ranks do."""
        if (j, s) != (self._agreed.j, self._agreed.s):
            self._change_interval(j, s, version)
            self._history.append((self._agreed.base, j, s))
        self._stage = "steady"
        self._interval_reporter.end_first_phase(self._budget)
        self._report_interval(j, self._pace.usual_s)

    def _change_interval(self, j: int, s: int, version: int) -> None:
        """Follow j and s from this version on, or from the first that has no earlier version in transfer."""
        self._former, self._agreed = self._agreed, Agreed(j, s, self._agreed.find_free_version(version))

    def _profile_again(self, wanted: int, version: int) -> None:
        self._stage, self._wanted, self._version_iterations = "profile", wanted, 0
        self._waits.clear()
        self._planner.discard_iterations()
        self._since, self._next_word = version, version + min(wanted, self._choose_profiling_interval())
        if self._agreed.s > 1 and not self._traffic.every:  # waiting for each version would exceed the ceiling
            self._version_iterations = self._agreed.s
        self._change_interval(max(1, 2 * self._version_iterations), max(1, self._version_iterations), version)
        self._apply_stage()

    def _compute_haste(self) -> int:
        """Return the iterations that a version takes, where profiling must not wait for versions; else 0."""
        if self._traffic.every or (self._driver is not None and not self._driver.ended):
            return 0
        waits_s = median(self._waits) if self._waits else 0.0
        left = max(0, self._wanted - self._planner.clean)
        if waits_s * left <= self._budget.left_s:
            return 0
        return max(1, math.ceil(max(self._latency.whole_s, waits_s) / self._pace.usual_s))

    def _profile_soon(self, iterations: int, version: int) -> None:
        """Save one version in 2 * `iterations`, so that half of the profiled iterations have no traffic of ours."""
        if iterations > self._version_iterations:
            self._version_iterations = iterations
            self._change_interval(2 * iterations, iterations, version)
            self._apply_stage()

    def _choose_profiling_interval(self) -> int:
        """Return the number of iterations to the next round while profiling.

        The first rounds come soon, because replicas that differ for long mostly differ from the beginning.
        """
        return min(_COUNT_EVERY, 1 << self._compared)

    def _record_trace(self, trace: Trace, version: int) -> None:
        ago = self._monitor.ago
        clean = self._find_recorded_version(version) >= self._since and not self._dirties[-1 - ago]
        if self._stage == "profile" and clean and self._planned:
            own_s = self._cost.read_past_s(ago)
            others_s = max(0.0, self._others_s - own_s)
            self._planner.record_iteration(
                self._find_recorded_version(version), subtract_capture(trace, own_s, others_s)
            )

    def _find_recorded_version(self, version: int) -> int:
        """Return the version after whose step() the recorded iteration began; -1: too long ago."""
        ago = self._monitor.ago
        return version - 1 - ago if ago < _BEHIND else -1

    def _judge_iteration(
        self, ours_s: float, failing_s: float, trace: Trace | None, held_s: float, version: int
    ) -> None:
        """Judge an iteration under the plan."""
        length_s = clock.monotonic() - self._begun_at - failing_s
        seen, j = self._overhead, self._agreed.j
        why = seen.judge_iteration(length_s, ours_s, self._monitor.launched_before, j, self.saves(version))
        if trace is not None and self._find_recorded_version(version) >= self._since:
            journal, copies = tuple(self._pacer.journal), tuple(self._pacer.copies)
            number = self._find_recorded_version(version)
            own_s = self._cost.read_past_s(self._monitor.ago)
            picture = Pictured(number, trace, journal, copies, held_s, own_s)
            why = seen.compare_with_profile(picture) or why
            self._reporter.draw(seen.pictured, self._planner.profile, self._monitor.names)
        self._renew = why or self._renew
        self._monitor.recording = self._next_word - version <= IN_A_ROW and version >= self._record_from
        if self._monitor.recording and version + 1 >= self._next_word:
            self._record_from = version + _RECORD_EVERY

    def _start_due_round(self, version: int) -> None:
        """Start the round that is due at this version, if one is."""
        collectives = self._collectives
        assert collectives is not None
        if not self._planned or version < self._next_word or collectives.sitting:
            return
        self._planner.own_s = self._version_s
        if self._driver is None or self._driver.ended:  # over NCCL, copies travel while they are made
            self._planner.fixed_s = self._latency.fixed_s
        if self._stage == "recall":
            collectives.start_gather_round(self._planner.encode_kept(), BLOB_BYTES)
        elif self._stage == "profile":
            # without a working monitor there will be no profile, so the stage ends
            most = self._wanted if self._monitor.problem else self._planner.clean
            self._start_round(
                [-most, version - self._since, round(self._cost.usual_s / _POINT_S), self._compute_haste()]
            )
        elif self._stage == "plan":
            collectives.start_gather_round(self._planner.encode_standing(collectives.over_at), BLOB_BYTES)
        elif self._stage == "agree":
            self._planner.adjust_size(*self._pacer.copy_bytes)
            self._start_round(self._compute_wish(fresh=True))
        elif self._stage == "sizes":
            collectives.start_max_round([len(self._offer)])
        elif self._stage == "offers":
            collectives.start_gather_round(self._offer, self._room_bytes)
        else:
            drifted = self._planner.has_drifted(self._route) or self._planner.adjust_size(*self._pacer.copy_bytes)
            allowed_s = self._traffic.overhead * self._agreed.j * self._pace.usual_s
            self._planner.lag_s = self._latency.measure_lag_s(allowed_s)
            wanted = self._compute_wish(fresh=drifted)
            if drifted:
                self._apply_stage()
            self._start_round([1 if self._renew else 0, *wanted])

    def _compute_wish(self, *, fresh: bool) -> tuple[int, int]:
        """Return numbers for a round: j combined with this rank's number, and s."""
        j, s = self._planner.choose_interval(self._agreed.j, fresh=fresh)
        return j * _RANKS + _RANKS - 1 - self._rank, s

    def _start_round(self, words: Sequence[int]) -> None:
        assert self._collectives is not None
        also = self._replanning.list_words() if self._replanning is not None else []
        self._compared += 1
        self._collectives.start_max_round(
            [*words, *also, *(self._driver.list_words() if self._driver is not None else ())]
        )

    def _process_round(self, version: int, waited_s: float) -> None:
        """Process the round that was started at the version before."""
        collectives = self._collectives
        assert collectives is not None
        if self._stage == "recall":
            if self._planner.remember(collectives.read_blobs(waited_s)):
                self._stage, self._next_word = "agree", version
            else:
                self._profile_again(PROFILED, version)
            return
        if self._stage == "offers":
            assert self._replanning is not None
            offers, self._offer, self._compared = collectives.read_blobs(patience_s=_OFFERS_S), b"", 0
            self._replanning.adopt_offers(offers, version)
            self._profile_again(PROFILED_AGAIN, version)
            return
        if self._stage == "plan":
            self._planner.adopt_records(collectives.read_blobs(waited_s))
            self._stage, self._next_word = "agree", version
            if self._driver is not None and self._driver.has_just_left():
                self._profile_again(PROFILED_AGAIN, version)
            return
        words = collectives.read_maxima(waited_s, _OFFERS_S if self._stage == "sizes" else None)
        if self._stage == "sizes":
            self._stage, self._next_word, self._room_bytes = "offers", version, words[0] + 8
            return
        if self._replanning is not None:
            first = {"agree": 2, "profile": 4}.get(self._stage, 3)
            if self._replanning.on_round(words[first : first + self._replanning.count]):
                self._stage, self._next_word, self._offer = "sizes", version, self._replanning.build_offer()
                return
        if self._driver is not None:
            self._driver.on_round(words)
            if self._driver.has_just_left():
                self._profile_again(PROFILED_AGAIN, version)
                return
        if self._stage == "profile":
            enough = -words[0] >= self._wanted or words[1] >= 5 * self._wanted
            self._stage = "plan" if enough else "profile"
            self._others_s = words[2] * _POINT_S
            self._next_word = version + (0 if enough else self._choose_profiling_interval())
            if not enough:
                self._profile_soon(words[3], version)
        elif self._stage == "agree":
            self._adopt_interval(words[0], words[1], version)
        elif words[0]:
            if self._renew:
                self._reporter.send_event("profiled_again", version, self._renew)
            self._renew = ""
            self._profile_again(PROFILED_AGAIN, version)
        elif (words[1] // _RANKS, words[2]) != (self._agreed.j, self._agreed.s):
            self._adopt_interval(words[1], words[2], version)
        else:
            self._next_word = version + self._choose_round_interval()

    def _choose_round_interval(self) -> int:
        """Return the number of iterations between two rounds.

        The number is the same on all ranks, because it follows from exchanged values only.
        """
        return min(100, max(5, math.ceil(_WORD_EVERY_S / max(self._planner.longest_s, 1e-3))))

    @property
    def _version_s(self) -> float:
        """Return the seconds that a version takes of the training's time.

        Where the agent's processors allow fewer versions, the result is as long as if the training's thread allowed
        no more.
        """
        used_s, cores = self._gate.cpu
        return max(self._cost.whole_s, self._traffic.overhead * used_s / cores if cores else 0.0)

    # ---- the plan --------------------------------------------------------------------------------------

    def _adopt_interval(self, wish: int, s: int, version: int) -> None:
        """Adopt j and s of all ranks, in stage `steady`.

        Args:
            wish: The largest j of all ranks, combined with the rank that wants it; see `_compute_wish`.
            s: Iterations that a version may take.
            version: Number of this step().
        """
        j, self._because = wish // _RANKS, _RANKS - 1 - wish % _RANKS
        self._stage, self._since, self._version_iterations = "steady", version, 0
        self._change_interval(j, s, version)
        self._latency.follow_plan()
        self._interval_reporter.end_first_phase(self._budget)
        self._history.append((self._agreed.base, j, s))
        self._overhead.adopt_plan(self._planner.profile, self._planner.controller)
        self._renew = ""
        self._record_from, self._next_word = version, version + self._choose_round_interval()
        self._apply_stage()
        self._report_interval(j, self._planner.profile.iteration_s if self._planner.profile is not None else 0.0)
        cached_profile = self._planner.build_cached_profile()
        if cached_profile is not None:
            self._reporter.send_profile(cached_profile)

    def _apply_stage(self) -> None:
        """Set monitor, pacer and driver by stage and scheme, from the next version on."""
        pacer, monitor = self._pacer, self._monitor
        if self._planned or (not self._sends and monitor.on_device):
            monitor.start()
            monitor.recording = self._stage == "profile"
        else:
            monitor.rest()
        self._overhead.pause()
        alone = self._stage == "steady" and self._scheme in ("naive", "no_pipeline")
        pacer.chunk_bytes, parts = self._planner.cut
        pacer.p = 1 if alone else parts
        pacer.timetable, self._plan, self._route = None, None, None
        pacer.deferred = self._defers
        pacer.unscheduled = not self._planned and self._scheme != "blocking"
        if self._planned and self._stage == "steady":
            self._route = self._planner.build_route(self._scheme)
            if self._route is not None:
                self._plan = self._route.plan(self._agreed.s)
                if self._driver is None or self._driver.ended or self._scheme != "gemini":
                    pacer.timetable = self._route.build_timetable(self._agreed.s)
        if self._driver is not None:
            self._driver.set_route(self._route, self._agreed.s, active=self._planned and self._scheme == "gemini")

    @property
    def transport(self) -> str:
        """Return the name of the present carrier of the copies."""
        if self._driver is not None:
            return "gloo" if self._driver.problem else "nccl"
        return "host" if self._sends else "none"

    # ---- reports ---------------------------------------------------------------------------------------

    def _find_reason(self, usual_s: float, *, name: bool) -> Reason:
        """Return the reason why not every version is saved, and a remedy.

        Args:
            usual_s: Length of an iteration in seconds.
            name: Whether to name the object that costs most; finding it takes as long as a capture.
        """
        allowed_s, whole = self._traffic.overhead * usual_s, f"in iterations of {usual_s:.2g} s"
        used_s, cores = self._gate.cpu
        if cores and used_s > cores * usual_s * max(1, self._agreed.j - 1):
            why = f"a version takes {used_s:.2g} core-seconds of an agent that may use {cores:.2g} cores"
            return Reason(f"{why}, {whole}", "fewer bytes a rank, or a higher agent_cores in the site's settings")
        if self._cost.seconds > allowed_s and self._cost.seconds >= self._cost.held_s:
            what = self._find_costliest(self._cost.seconds) if name else ""
            why = (
                f"step() takes {self._cost.seconds:.2g} s to capture the state{f', mostly {what},' if what else ''} "
            )
            beside = "tensors of 64 KiB and more are captured beside the training"
            return Reason(why + f"{whole} ({beside})", f"less state in extra: {beside}")
        if self._cost.held_s > allowed_s:
            why = f"the optimizer waits {self._cost.held_s:.2g} s for the copy of a version {whole}"
            return Reason(why, "fewer bytes a rank: the state sharded over more ranks")
        if not self._sends or self._planner.seals_late:
            return explain_late_seals(self._latency.whole_s, usual_s)
        why = "the network has too little idle time for a copy in each iteration"
        return Reason(why, "a faster network between the agents, or parity in place of whole copies")

    def _report_interval(self, j: int, usual_s: float, *, in_force: bool = True) -> None:
        """Tell the user which versions are not saved, or should not be.

        Args:
            j: One version in j is saved, or should be.
            usual_s: Length of an iteration in seconds.
            in_force: Whether j is in effect.
        """
        if self._traffic.every:
            return
        self._interval_reporter.report(
            j,
            self._agreed.s,
            lambda news: self._find_reason(usual_s, name=news),
            is_cause=self._rank == self._because,
            advice="" if in_force else f"these ranks cannot agree on saving fewer versions: pass Traffic(every={j})",
        )

    def _collect_facts(self) -> dict[str, Any]:
        """Return the part of the state that the agent and `report` show alike."""
        profile, plan, seen = self._planner.profile, self._plan, self._overhead
        return {
            "scheme": self._scheme,
            "transport": self.transport,
            "stage": self._stage,
            "problem": self.problem or self._monitor.problem,
            "j": self._agreed.j,
            "s": self._agreed.s,
            "iteration_s": profile.iteration_s if profile else None,
            "idle_s": profile.idle_s if profile else None,
            "deviation": profile.deviation if profile else None,
            "largest_chunk_bytes": max((part.size for part in plan.partitions), default=0) if plan else 0,
            "fitting_bytes": plan.fitting_bytes if plan else 0,
            "spilled_bytes": plan.spilled_bytes if plan else 0,
            "late_s": plan.late_s if plan else 0.0,
            "overhead": seen.overhead,
            "waited_s": seen.waited_s,
            "unsealed": self.unsealed,
            "mu": self._traffic.mu,
            "ceiling": seen.ceiling,
            "judged_in": seen.judged_in,
            "reason": self._interval_reporter.reason,
        }

    def build_state(self) -> TrafficState:
        """Return the state for the agent."""
        meter, profile, plan = self._planner.meter, self._planner.profile, self._plan
        state = TrafficState(
            t=clock.time(),
            **self._collect_facts(),
            repeated=self._agreed.j + self._agreed.s - 1,
            spans=len(profile.spans) if profile else 0,
            collectives=profile.ops if profile else 0,
            bytes_per_s=meter.B or None,
            alpha_s=meter.alpha if meter.known else None,
            chunks=len(plan.partitions) if plan else 0,
            total_bytes=plan.total_bytes if plan else 0,
            buffer_bytes=math.prod(self._planner.cut),
            chunks_per_span=stats_messages.count_chunks_per_span(
                [part.span for part in plan.partitions] if plan else (), plan.spans if plan else 0
            ),
            sealed_s=self._latency.whole_s or None,
        )
        return stats_messages.bound_traffic(state)

    def report(self) -> dict[str, Any]:
        """Return the state for people and tests."""
        meter, profile, plan = self._planner.meter, self._planner.profile, self._plan
        overlap = self._overhead.pictured.measure_overlap() if self._overhead.pictured is not None else None
        return {
            **self._collect_facts(),
            "collectives": profile.ops if profile else None,
            "history": [list(entry) for entry in self._history],
            "B": meter.B,
            "alpha": meter.alpha,
            "spans": [[s.after, s.before_gate, s.start_s, s.length_s] for s in profile.spans] if profile else [],
            "chunk_bytes": self._planner.cut[0],
            "buffers": self._planner.cut[1],
            "chunks": len(plan.partitions) if plan else 0,
            "overlap": dict(zip(("chunks", "chunks_s", "beside_s"), overlap, strict=True)) if overlap else None,
            "capture_s": self._cost.seconds,
            "sealed_s": self._latency.whole_s,
        }
