"""The interval between checkpoints, if the idle spans cannot take one in every iteration.

The source is the GEMINI paper, section 5.3, "Finish checkpointing within an iteration".

A version is saved every j-th iteration. Its chunks may be spread over s <= j iterations. Version v is awaited
(sealed, docs/dev/protocol.md, R2) before the optimizer step that makes v + s. A holder has two slots, so v is sealed
before v + j is written: hence s <= j.

The worst-case repetition follows. Until v is sealed, the version to fall back on is v - j. The last such moment is
just before the optimizer step that makes v + s, when v + s - 1 is complete: (v + s - 1) - (v - j) = j + s - 1 steps.
With j = s = 1 that is the one step of R2.

The cost has two parts, each once in j iterations. The part of a checkpoint that finds no place in the idle windows
of s iterations delays the training by need(s) seconds. The capture of the state delays it by own_s seconds, for any
s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import NamedTuple

from gemini_hpc.core.schedule import compute_capacity, compute_transfer_s
from gemini_hpc.core.spans import Window

CEILING = 0.01  # highest overhead, as a share of the training's time
LARGEST_J = 10_000  # beyond this, memory protects no better than a tier
# The controller evaluates up to LATEST cycles, once every BATCH. SURE is the number of standard deviations of the
# count of samples above a level, if half of all samples were above it.
BATCH = 16
LATEST = 128
SURE = 4.0
# A plan whose needs differ by less than this share of the iteration or of the need counts as the same plan.
SAME = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """Seconds by which the transfer of one checkpoint exceeds the idle windows of s iterations.

    The transfer goes to all m - 1 holders. The value is negative if idle time is left over. The closed form exceeds
    `schedule.plan_chunks` by at most the few alpha that the last chunks of the replicas cost, and is never less.
    """

    total_bytes: int
    before_bytes: int
    iteration_bytes: int
    chunk_bytes: int
    B: float
    alpha: float

    @classmethod
    def from_windows(
        cls, windows: Iterable[Window], C: int, m: int, R: int, p: int, B: float, alpha: float, mu: float
    ) -> Need:
        """Return the need for these windows.

        Letters and ValueErrors are those of `schedule`. A replica that ends in the middle of a span costs one more
        start there: the place of alpha * B bytes, or of a chunk if that is less.
        """
        before = after = 0
        for window in windows:
            room = compute_capacity(window.length_s, R, p, B, alpha, mu)
            before, after = (before + room, after) if window.before_gate else (before, after + room)
        ends = max(0, m - 2) * min(R // p, ceil(alpha * B) + 1)
        total = C * (m - 1) + ends if C > 0 and m > 1 else 0
        return cls(total, before, before + after, R // p, B, alpha)

    def __call__(self, s: int) -> float:
        """Return the need for s iterations in seconds."""
        rest = self.total_bytes - self.before_bytes - (s - 1) * self.iteration_bytes
        starts = max(0, ceil(rest / self.chunk_bytes))
        return compute_transfer_s(rest, self.B, starts * self.alpha)


@dataclass(frozen=True, slots=True)
class Frequency:
    """A save frequency: every j-th iteration, awaited s optimizer steps later.

    Attributes:
        j: Iterations between saved versions.
        s: Optimizer steps until a version is awaited.
        overhead: Cost as a share of the training's time.
        repeated: Completed steps that a failure repeats at worst.
        within: True if the overhead is at most the ceiling. If not, the link is too slow for the training or for the
            requested j.
    """

    j: int
    s: int
    overhead: float
    repeated: int
    within: bool


def choose_frequency(
    need: Callable[[int], float],
    iteration_s: float,
    *,
    ceiling: float = CEILING,
    spread: bool = True,
    forced: int | None = None,
    largest: int = LARGEST_J,
    own_s: float = 0.0,
) -> Frequency:
    """Return the smallest j, and its smallest s <= j, that keep the overhead at or below `ceiling`.

    If no j up to `largest` is within the ceiling, or the forced j is not, the largest or forced j is returned. Its s
    is then the smallest of those that cost least: training takes precedence over protection. The search calls `need`
    about 30 times at most.

    Args:
        need: Function of s that returns seconds and never rises with s.
        iteration_s: Length of an iteration in seconds.
        ceiling: Highest overhead, as a share of the training's time.
        spread: False for a transport that must have sent before the next optimizer step; then s is 1.
        forced: j that the user has forced; it is kept.
        largest: Largest j to consider.
        own_s: Seconds that the capture takes.

    Raises:
        ValueError: The iteration or the ceiling is not above 0, or j < 1.
    """
    if not (iteration_s > 0 and ceiling > 0):
        raise ValueError(f"an iteration of {iteration_s} s, a ceiling of {ceiling}: both are above 0")
    for asked in (largest, forced):
        if asked is not None and asked < 1:
            raise ValueError(f"a checkpoint every {asked} iterations: j is 1 or more")

    def compute_overhead(j: int, s: int) -> float:
        return (max(0.0, need(s)) + own_s) / (j * iteration_s)

    def find_widest(j: int) -> int:
        return j if spread else 1

    j = forced
    if j is None:
        j = _find_first(lambda j: compute_overhead(j, find_widest(j)) <= ceiling, largest)
    bound = max(ceiling, compute_overhead(j, find_widest(j)))
    s = _find_first(lambda s: compute_overhead(j, s) <= bound, find_widest(j))
    return Frequency(j, s, compute_overhead(j, s), j + s - 1, compute_overhead(j, s) <= ceiling)


def _find_first(good: Callable[[int], bool], last: int) -> int:
    """Return the smallest good number of 1..last, or `last` if none is good.

    All numbers after a good number must be good.
    """
    high = 1
    while high < last and not good(high):
        high = min(2 * high, last)
    low = high // 2 + 1 if high < last else 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return high


class _Trial(NamedTuple):
    """The state to return to if spreading over more than s iterations does not help.

    `typical_s` is the typical cost with s.
    """

    extra_s: float
    s: int
    typical_s: float


@dataclass(slots=True)
class OverheadController:
    """A controller that keeps the overhead at or below the ceiling if the plan was too optimistic.

    The controller is given the real cost of each cycle (j iterations, one checkpoint). If the cost is surely above
    the ceiling, the part that the plan does not explain is attributed. The test uses the order of the samples, so
    neither outliers nor noise of any shape raise anything.

    The unexplained part is first attributed to `extra_s`: more to send than planned, which idle time of further
    iterations can take. If spreading has saved less than half of the expected gain, the part is attributed to
    `fixed_s`. Every checkpoint costs `fixed_s`, and only a larger j amortizes it. Both are below what the samples
    make likely. So j is approached from below, and without noise never exceeds the smallest j that keeps the
    ceiling.

    Measurements only raise the expected cost; only a fresh plan lowers it. Once spreading hides an extra cost, its
    end cannot be measured. So `extra_s` stays until a different plan arrives. A smaller j is then adopted if it is
    smaller by 2 at least, or if the old j is not within the ceiling.
    """

    need: Callable[[int], float]
    iteration_s: float
    ceiling: float = CEILING
    spread: bool = True
    forced: int | None = None
    largest: int = LARGEST_J
    extra_s: float = 0.0
    fixed_s: float = 0.0
    own_s: float = 0.0
    frequency: Frequency = field(init=False)
    _samples: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=LATEST))
    _new_samples: int = field(init=False, default=0)
    _trial: _Trial | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.frequency = self._choose_frequency(self.forced)

    def predict_cost_s(self, s: int) -> float:
        """Return the expected cost of a cycle in seconds."""
        return max(0.0, self.need(s) + self.extra_s) + self.fixed_s + self.own_s

    def observe_cycle(self, lost_s: float, *, judge: bool = True) -> Frequency:
        """Record the seconds that one cycle has lost, and return the frequency.

        `lost_s` is the excess over j iterations without a checkpoint.

        Noise can make `lost_s` negative. The result is another object if the frequency has changed. Without `judge`
        the frequency never changes.
        """
        self._samples.append(lost_s)
        self._new_samples += 1
        if self._new_samples < BATCH or not judge:
            return self.frequency
        self._new_samples = 0
        j, s = self.frequency.j, self.frequency.s
        low_s = _find_lower_bound(self._samples)
        if low_s > self.ceiling * j * self.iteration_s and low_s > self.predict_cost_s(s):
            self._explain_cost(s)
            self._adopt_frequency(self._choose_frequency(self.forced))
        return self.frequency

    def add_extra(self, late_s: float) -> None:
        """Record that versions are late by `late_s` more than planned and are not waited for.

        More iterations absorb this delay.
        """
        self.extra_s, self._trial = self.extra_s + late_s, None
        self._adopt_frequency(self._choose_frequency(self.forced))

    def replan(self, need: Callable[[int], float], iteration_s: float, own_s: float = 0.0) -> Frequency:
        """Adopt a fresh plan, and return the frequency.

        If the new plan differs from the old one, all learnt costs beyond the old plan are forgotten. If it is the
        same, only the part that the latest cycles surely do not show is forgotten.
        """
        s = self.frequency.s
        scale = max(abs(self.need(s)), abs(self.need(1)), self.iteration_s)
        same = (
            abs(iteration_s - self.iteration_s) <= SAME * self.iteration_s
            and abs(own_s - self.own_s) <= SAME * scale
            and all(abs(need(at) - self.need(at)) <= SAME * scale for at in (1, s))
        )
        self.need, self.iteration_s, self.own_s, self._trial = need, iteration_s, own_s, None
        if not same:
            self.extra_s = self.fixed_s = 0.0
        elif len(self._samples) >= BATCH:
            surplus_s = max(0.0, self.predict_cost_s(s) - max(0.0, find_upper_bound(self._samples)))
            of_extra_s = min(surplus_s, max(0.0, need(s) + self.extra_s))
            self.extra_s -= of_extra_s
            self.fixed_s -= min(self.fixed_s, surplus_s - of_extra_s)
        fresh = self._choose_frequency(self.forced)
        if fresh.j == self.frequency.j - 1:
            kept = self._choose_frequency(self.frequency.j)
            fresh = kept if kept.within else fresh
        self._adopt_frequency(fresh)
        return self.frequency

    def _choose_frequency(self, j: int | None) -> Frequency:
        return choose_frequency(
            self.predict_cost_s,
            self.iteration_s,
            ceiling=self.ceiling,
            spread=self.spread,
            forced=j,
            largest=self.largest,
        )

    def _explain_cost(self, s: int) -> None:
        """Update the plan so that it explains the cost that the samples with s surely show."""
        typical_s = median(self._samples)
        # Between the sure and the likely cost: from the sure cost alone, j would creep up by many small steps.
        cost_s = (_find_lower_bound(self._samples) + typical_s) / 2
        if (trial := self._trial) is not None and s > trial.s:
            hoped_s = self.predict_cost_s(trial.s) - self.predict_cost_s(s)
            if trial.typical_s - typical_s < hoped_s / 2:
                self.extra_s, self._trial = trial.extra_s, None
                self.fixed_s = cost_s - self.own_s - max(0.0, self.need(s) + self.extra_s)
                return
        if self.spread:
            self._trial = _Trial(self.extra_s, s, typical_s)
            self.extra_s = cost_s - self.own_s - self.fixed_s - self.need(s)
        else:
            self.fixed_s = cost_s - self.own_s - max(0.0, self.need(s) + self.extra_s)

    def _adopt_frequency(self, fresh: Frequency) -> None:
        if (fresh.j, fresh.s) != (self.frequency.j, self.frequency.s):
            self._samples.clear()
            self._new_samples = 0
        if fresh != self.frequency:
            self.frequency = fresh


def _find_lower_bound(samples: Collection[float]) -> float:
    """Return a sample that the median is surely not below.

    Only if half of the samples were above it, would so many be above.
    """
    return sorted(samples)[max(0, int(len(samples) / 2 - SURE * len(samples) ** 0.5 / 2))]


def find_upper_bound(samples: Collection[float]) -> float:
    """Return a sample that the median is surely not above."""
    return -_find_lower_bound([-sample for sample in samples])
