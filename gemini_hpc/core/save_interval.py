"""How often a checkpoint is taken, where the idle spans cannot take one in every iteration (GEMINI paper, section
5.3, "Finish checkpointing within an iteration").

A version is saved every j-th iteration. Its chunks may be spread over s <= j iterations: version v is awaited
(sealed, docs/protocol.md, R2) before the optimizer step that makes v + s. A holder has two slots, so v is sealed
before v + j is written: hence s <= j.

What is repeated at worst: until v is sealed, the version to fall back on is v - j. The last moment of that is just
before the optimizer step that makes v + s, when v + s - 1 is complete: (v + s - 1) - (v - j) = j + s - 1 steps. With
j = s = 1 that is the one step of R2.

What it costs: the part of a checkpoint that finds no place in the idle windows of s iterations holds the training up
for need(s) seconds, once in j iterations; so does the capture of the state, for own_s seconds, whatever s is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import NamedTuple

from gemini_hpc.core.schedule import capacity, seconds
from gemini_hpc.core.spans import Window

CEILING = 0.01  # share of the training's time
LARGEST_J = 10_000  # beyond that, protection in memory says nothing that a tier would not
# The controller looks at up to LATEST cycles, every BATCH. It is as sure as this many standard deviations of the
# count of samples above a level, if half of them were.
BATCH = 16
LATEST = 128
SURE = 4.0
# A plan whose needs differ by less than this share of the iteration, or of the need, is the same plan measured again.
SAME = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """Seconds that the transfer of one checkpoint to all m - 1 holders goes beyond the idle windows of s iterations;
    negative where idle time is left over. In closed form, at most the few alpha more than `schedule.plan` that the
    last chunks of the replicas cost, and never less."""

    total_bytes: int
    before_bytes: int
    iteration_bytes: int
    chunk_bytes: int
    B: float
    alpha: float

    @classmethod
    def of(cls, windows: Iterable[Window], C: int, m: int, R: int, p: int, B: float, alpha: float, mu: float) -> Need:
        """Letters as in `schedule`, which also says what raises ValueError. A replica that ends in the middle of a
        span costs one start more there: the place of alpha * B bytes, or of a chunk if that is less."""
        before = after = 0
        for window in windows:
            room = capacity(window.length_s, R, p, B, alpha, mu)
            before, after = (before + room, after) if window.before_gate else (before, after + room)
        ends = max(0, m - 2) * min(R // p, ceil(alpha * B) + 1)
        total = C * (m - 1) + ends if C > 0 and m > 1 else 0
        return cls(total, before, before + after, R // p, B, alpha)

    def __call__(self, s: int) -> float:
        rest = self.total_bytes - self.before_bytes - (s - 1) * self.iteration_bytes
        starts = max(0, ceil(rest / self.chunk_bytes))
        return seconds(rest, self.B, starts * self.alpha)


@dataclass(frozen=True, slots=True)
class Frequency:
    """Every j-th iteration, awaited s optimizer steps later. `overhead` is the share of the training's time, and
    `repeated` the completed steps that a failure repeats at worst. `within`: the overhead is at or below the ceiling;
    if not, the link is too slow for the training, or for the j that was asked for."""

    j: int
    s: int
    overhead: float
    repeated: int
    within: bool


def choose(
    need: Callable[[int], float],
    iteration_s: float,
    *,
    ceiling: float = CEILING,
    spread: bool = True,
    forced: int | None = None,
    largest: int = LARGEST_J,
    own_s: float = 0.0,
) -> Frequency:
    """The smallest j for which some s <= j keeps the overhead at or below `ceiling`; of these s, the smallest.

    `need(s)` is in seconds and never rises with s; `own_s` is what the capture takes. Without `spread` (a transport
    that must have sent before the next optimizer step) s is 1. A j that the user has forced is kept. Where nothing is
    within the ceiling (no j up to `largest`, or not the forced one) the result is the largest, or forced, j with the
    smallest of those s that cost least: training goes before protection. Asks for some 30 needs at most.

    Raises ValueError for an iteration or a ceiling that is not above 0, and for j < 1.
    """
    if not (iteration_s > 0 and ceiling > 0):
        raise ValueError(f"an iteration of {iteration_s} s, a ceiling of {ceiling}: both are above 0")
    for asked in (largest, forced):
        if asked is not None and asked < 1:
            raise ValueError(f"a checkpoint every {asked} iterations: j is 1 or more")

    def overhead(j: int, s: int) -> float:
        return (max(0.0, need(s)) + own_s) / (j * iteration_s)

    def widest(j: int) -> int:
        return j if spread else 1

    j = forced
    if j is None:
        j = _first(lambda j: overhead(j, widest(j)) <= ceiling, largest)
    bound = max(ceiling, overhead(j, widest(j)))
    s = _first(lambda s: overhead(j, s) <= bound, widest(j))
    return Frequency(j, s, overhead(j, s), j + s - 1, overhead(j, s) <= ceiling)


def _first(good: Callable[[int], bool], last: int) -> int:
    """The smallest number of 1..last that is good, as are all after it; `last` if none is."""
    high = 1
    while high < last and not good(high):
        high = min(2 * high, last)
    low = high // 2 + 1 if high < last else 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return high


class _Trial(NamedTuple):
    """What is gone back to where spreading over more than s iterations does not help, and the cost with s."""

    extra_s: float
    s: int
    typical_s: float


@dataclass(slots=True)
class Controller:
    """Keeps the overhead at or below the ceiling where measurement says that the plan was too hopeful.

    It is told what each cycle (j iterations, one checkpoint) has really cost. Where that is surely above the ceiling
    (a test on the order of the samples, so that neither outliers nor noise of any shape raise anything), what the
    plan does not explain is first taken as `extra_s`, more to send than planned, which idle time of further
    iterations can take; where spreading has saved less than half of what that hoped for, as `fixed_s`, which every
    checkpoint costs and only a larger j amortizes. Both are less than the samples make likely: so j is approached
    from below, and without noise never goes beyond the smallest that keeps the ceiling.

    Measurements only raise; what lowers is a fresh plan. What was extra for a while, and is hidden by spreading
    since, cannot be seen to have gone: it stays until a plan comes that is another one. A smaller j is then taken up
    if it is smaller by 2 at least, or if the old one is not within the ceiling.
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
        self.frequency = self._choose(self.forced)

    def expected_s(self, s: int) -> float:
        """What a cycle is now expected to cost."""
        return max(0.0, self.need(s) + self.extra_s) + self.fixed_s + self.own_s

    def observe(self, lost_s: float, *, judge: bool = True) -> Frequency:
        """One cycle has taken `lost_s` longer than j iterations without a checkpoint; by noise that may be below 0.
        The frequency from now on: another object where it has changed, which it never has without `judge`."""
        self._samples.append(lost_s)
        self._new_samples += 1
        if self._new_samples < BATCH or not judge:
            return self.frequency
        self._new_samples = 0
        j, s = self.frequency.j, self.frequency.s
        low_s = _sure_low(self._samples)
        if low_s > self.ceiling * j * self.iteration_s and low_s > self.expected_s(s):
            self._explain(s)
            self._adopt(self._choose(self.forced))
        return self.frequency

    def add_extra(self, late_s: float) -> None:
        """Versions are late by so much more than planned, and are not waited for: more iterations take it."""
        self.extra_s, self._trial = self.extra_s + late_s, None
        self._adopt(self._choose(self.forced))

    def replan(self, need: Callable[[int], float], iteration_s: float, own_s: float = 0.0) -> Frequency:
        """A fresh plan. What had been learnt beyond the old one is forgotten if the new one is another; if it says
        the same, only that part is forgotten which the latest cycles surely do not show."""
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
            surplus_s = max(0.0, self.expected_s(s) - max(0.0, sure_high(self._samples)))
            of_extra_s = min(surplus_s, max(0.0, need(s) + self.extra_s))
            self.extra_s -= of_extra_s
            self.fixed_s -= min(self.fixed_s, surplus_s - of_extra_s)
        fresh = self._choose(self.forced)
        if fresh.j == self.frequency.j - 1:
            kept = self._choose(self.frequency.j)
            fresh = kept if kept.within else fresh
        self._adopt(fresh)
        return self.frequency

    def _choose(self, j: int | None) -> Frequency:
        return choose(
            self.expected_s,
            self.iteration_s,
            ceiling=self.ceiling,
            spread=self.spread,
            forced=j,
            largest=self.largest,
        )

    def _explain(self, s: int) -> None:
        """Has the plan explain what the samples with s surely show."""
        typical_s = median(self._samples)
        # On the way from what is sure to what is likely: from the first alone, j would creep up by many small steps.
        cost_s = (_sure_low(self._samples) + typical_s) / 2
        if (trial := self._trial) is not None and s > trial.s:
            hoped_s = self.expected_s(trial.s) - self.expected_s(s)
            if trial.typical_s - typical_s < hoped_s / 2:
                self.extra_s, self._trial = trial.extra_s, None
                self.fixed_s = cost_s - self.own_s - max(0.0, self.need(s) + self.extra_s)
                return
        if self.spread:
            self._trial = _Trial(self.extra_s, s, typical_s)
            self.extra_s = cost_s - self.own_s - self.fixed_s - self.need(s)
        else:
            self.fixed_s = cost_s - self.own_s - max(0.0, self.need(s) + self.extra_s)

    def _adopt(self, fresh: Frequency) -> None:
        if (fresh.j, fresh.s) != (self.frequency.j, self.frequency.s):
            self._samples.clear()
            self._new_samples = 0
        if fresh != self.frequency:
            self.frequency = fresh


def _sure_low(samples: Collection[float]) -> float:
    """A sample that the median is surely not below: only if half were, there are so many above."""
    return sorted(samples)[max(0, int(len(samples) / 2 - SURE * len(samples) ** 0.5 / 2))]


def sure_high(samples: Collection[float]) -> float:
    """A sample that the median is surely not above."""
    return -_sure_low([-sample for sample in samples])
