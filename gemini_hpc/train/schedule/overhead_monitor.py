"""Measured cost of a plan, and checks whether the training still matches its profile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gemini_hpc.core import spans
from gemini_hpc.core.ranges import merge_ranges
from gemini_hpc.core.save_interval import BATCH, OverheadController, find_upper_bound
from gemini_hpc.core.spans import Profile, Trace
from gemini_hpc.train.schedule.pacer import Sent

IN_A_ROW = 5  # a profile is out of date after this many consecutive iterations unlike it
# A training that does not wait for its versions may have become slower by itself. It is then profiled again only
# after this many iterations, ...
SETTLED = 250
# ... or once the time lost beyond the ceiling since the last profile equals this many iterations, which is about the
# cost of a profile. The limit doubles each time.
WORTH = 5.0
# A profile whose iterations are longer than today's by this share hides the cost of versions. It is renewed after
# SETTLED iterations, then after twice as many, and so on: where profiling itself makes iterations longer, no new
# profile helps.
SHORTER = 0.05


@dataclass(frozen=True)
class Pictured:
    """A recorded iteration under a plan, after step() number `version`.

    Attributes:
        version: Number of the step() before the iteration.
        trace: The iteration's collectives; its times include the wait and the capture.
        chunks: Chunks sent lately, with times of CLOCK_MONOTONIC.
        copies: Copies into the own slot.
        waited_s: Seconds that the training waited at the optimizer.
        own_s: Seconds that the training spent in the capture.
    """

    version: int
    trace: Trace
    chunks: tuple[Sent, ...]
    copies: tuple[tuple[float, float, int], ...]  # (from, to, bytes) of each
    waited_s: float
    own_s: float = 0.0

    def measure_overlap(self) -> tuple[int, float, float]:
        """Return the number of chunks in this iteration, their seconds, and the seconds beside a collective.

        The second number is the time with at least one chunk on the network. The third is the part of this time in
        which a collective was on the network too.
        """
        began, length_s = self.trace.started_s, self.trace.length_s
        chunks = [(c.sent_at - began, c.acked_at - began) for c in self.chunks]
        inside = [(max(0.0, a), min(b, length_s)) for a, b in chunks if b > 0 and a < length_s]
        busy = merge_ranges(inside)
        beside = spans.intersect_intervals(busy, merge_ranges((op.start_s, op.end_s) for op in self.trace.ops))
        return len(inside), sum(b - a for a, b in busy), sum(b - a for a, b in beside)


class OverheadMonitor:
    """A monitor of each iteration under a plan: its cost, and its likeness to the profile."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._profile: Profile | None = None
        self._controller: OverheadController | None = None
        self._cycle: list[float] = []  # lengths of the iterations since the last version was saved
        self._alike: list[Trace] = []
        self._unlike = self._others = 0
        self._age = 0  # iterations since the profile
        self._trusted = SETTLED  # iterations before a profile may be renewed because of its longer iterations
        self._worth = WORTH
        self._waited_s = 0.0  # in this cycle
        self._costs: deque[float] = deque(maxlen=64)
        self._waits: deque[float] = deque(maxlen=64)
        self.pictured: Pictured | None = None

    def adopt_plan(self, profile: Profile | None, controller: OverheadController | None) -> None:
        """Follow another plan, or another frequency, from now on."""
        if profile is not self._profile:
            self._costs.clear()
            self._waits.clear()
            self._age = 0
        self._profile, self._controller = profile, controller
        self._alike.clear()
        self._unlike = self._others = 0
        self.pause()

    def pause(self) -> None:
        """Discard the iterations since the last version."""
        self._cycle.clear()
        self._waited_s = 0.0

    @property
    def overhead(self) -> float | None:
        """Return the median share of the training's time that versions have cost lately; None before the first."""
        return median(self._costs) if self._costs else None

    @property
    def ceiling(self) -> float:
        """Return the share of the training's time that versions may cost."""
        return self._ceiling

    @property
    def judged_in(self) -> int:
        """Return the iterations until any overhead above the ceiling makes versions rarer; 0: it does now.

        Until then overhead counts only where the training waits for its versions, or where much time has been lost
        (`WORTH`).
        """
        return max(0, SETTLED - self._age)

    @property
    def _lost(self) -> float:
        """Return the iterations' worth of time lost beyond the ceiling since the profile."""
        return self._age * (median(self._costs) - self._ceiling)

    @property
    def waited_s(self) -> float | None:
        """Return the usual wait at the optimizer in seconds; None where unknown."""
        return median(self._waits) if self._waits else None

    def judge_iteration(self, length_s: float, waited_s: float, launched: int, j: int, saved: bool) -> str:
        """Record an iteration. Return the reason to profile the training again, or ''.

        Args:
            length_s: Length of the iteration in seconds.
            waited_s: Seconds that the training waited at the optimizer.
            launched: Number of collectives in the iteration.
            j: One version in j is saved.
            saved: Whether the version that ends the iteration is saved.
        """
        profile, controller = self._profile, self._controller
        if profile is None or controller is None:
            return ""
        self._age += 1
        self._cycle.append(length_s)
        self._waited_s += waited_s
        self._waits.append(waited_s)
        self._unlike = 0 if launched == profile.ops else self._unlike + 1
        if self._unlike >= IN_A_ROW:
            return f"an iteration launches {launched} collectives, the profile has {profile.ops}"
        if not saved or len(self._cycle) < j:
            return ""
        usual_s = len(self._cycle) * profile.iteration_s
        lost_s = sum(self._cycle) - usual_s
        ours = self._waited_s > self._ceiling * usual_s
        self.pause()
        self._costs.append(lost_s / usual_s)
        early = not ours and self._age < SETTLED
        before = controller.frequency
        judge = not early or (controller.forced is None and self._lost >= self._worth)  # a forced j stays
        if controller.observe_cycle(lost_s, judge=judge) is not before:
            self._worth *= 1 + early
            cost, allowed = 100 * median(self._costs), 100 * self._ceiling
            return f"a version costs {cost:.2g} % of the time, {allowed:.2g} % are allowed"
        if self._age < self._trusted or len(self._costs) < BATCH:
            return ""
        if (gained := -find_upper_bound(self._costs)) > SHORTER:
            self._trusted *= 2
            return f"iterations take {100 * gained:.2g} % less than in the profile"
        return ""

    def compare_with_profile(self, picture: Pictured) -> str:
        """Compare a recorded iteration with the profile. Return the reason to profile the training again, or ''."""
        profile, self.pictured = self._profile, picture
        if profile is None:
            return ""
        trace = subtract_capture(subtract_wait(picture.trace, picture.waited_s), picture.own_s)
        if spans.hash_pattern(trace.ops) != profile.pattern:
            self._others += 1
            return "" if self._others < IN_A_ROW else "an iteration launches other collectives than the profile has"
        self._others = 0
        self._alike.append(trace)
        if len(self._alike) < IN_A_ROW:
            return ""
        usual = build_median_trace(self._alike)
        self._alike.clear()
        return spans.describe_drift(profile, usual)


def build_median_trace(traces: Sequence[Trace]) -> Trace:
    """Return an iteration with the median times of several iterations of one pattern."""
    ops = tuple(
        same[0]._replace(start_s=median(op.start_s for op in same), end_s=median(op.end_s for op in same))
        for same in zip(*(trace.ops for trace in traces), strict=True)
    )
    length_s = max([median(t.length_s for t in traces), *(op.start_s for op in ops)])
    return Trace(traces[-1].started_s, length_s, min(length_s, median(t.gate_s for t in traces)), ops)


def subtract_wait(trace: Trace, waited_s: float) -> Trace:
    """Return the iteration as if the training had not waited at the optimizer."""

    def move_earlier(time_s: float) -> float:
        return max(trace.gate_s, time_s - waited_s) if time_s > trace.gate_s else time_s

    ops = tuple(op._replace(start_s=move_earlier(op.start_s), end_s=move_earlier(op.end_s)) for op in trace.ops)
    return replace(trace, length_s=move_earlier(trace.length_s), ops=ops)


def subtract_capture(trace: Trace, own_s: float, others_s: float = 0.0) -> Trace:
    """Return the iteration as if no rank had captured anything in step() at its beginning.

    Args:
        trace: The recorded iteration.
        own_s: Seconds of this rank's capture.
        others_s: Seconds that another rank's capture takes longer; the first collective waits for it.
    """
    first = trace.ops[0] if trace.ops else None
    cut_s = min(others_s, first.end_s - first.start_s) if first is not None else 0.0
    end_s = first.end_s if first is not None else 0.0

    def move_earlier(time_s: float) -> float:
        waited_s = min(cut_s, max(0.0, time_s - (end_s - cut_s)))
        return max(0.0, time_s - waited_s - own_s)

    ops = tuple(op._replace(start_s=move_earlier(op.start_s), end_s=move_earlier(op.end_s)) for op in trace.ops)
    return replace(trace, length_s=move_earlier(trace.length_s), gate_s=move_earlier(trace.gate_s), ops=ops)
