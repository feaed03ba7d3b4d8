"""A simulation of a training under failures, event by event.

The simulation includes effects that the averages of `schemes` omit.

They are failures during a recovery, loss of all copies, nodes that are missing for hours, and bursts of failures
(Weibull). Time is wall-clock time in seconds. Only failures are events, so a month of ten thousand nodes takes
seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import floor, gamma
from random import Random

from gemini_hpc.clock import DAY_S
from gemini_hpc.forecast.schemes import Scheme


@dataclass(frozen=True)
class NodeFailure:
    """A failure of one node.

    With `hardware`, the node and its memory are gone. Otherwise the program has ended there.
    """

    at_s: float
    node: int
    hardware: bool


@dataclass(frozen=True)
class Faults:
    """The distribution of node failures.

    Attributes:
        per_day: Failures of one node a day.
        hardware: Share of failures that take the node.
        shape: Shape of the Weibull distribution of a node's time to the next failure. Below 1, failures come in
            bursts.
        repair_s: Time until a lost node can be used again.
        replace_s: Time until another node arrives, if no standby is ready.
    """

    per_day: float = 0.015
    hardware: float = 1.0
    shape: float = 1.0
    repair_s: float = DAY_S
    replace_s: float = 330.0  # GEMINI, section 7.3: 4 to 7 minutes

    def draw_failures(self, nodes: int, days: float, random: Random) -> Iterator[NodeFailure]:
        """Yield the failures in order of time."""
        if not (self.per_day >= 0 and self.shape > 0 and 0 <= self.hardware <= 1):
            raise ValueError("failures a day are not below 0, a shape is above 0, a share is from 0 to 1")
        if not self.per_day:
            return
        scale = DAY_S / self.per_day / gamma(1 + 1 / self.shape)
        # The nodes have all ages, and a moment falls into a long gap more often than into a short one.
        shape = self.shape
        gaps = (scale * random.gammavariate(1 + 1 / shape, 1.0) ** (1 / shape) for _ in range(nodes))
        due = [(random.random() * gap, node) for node, gap in enumerate(gaps)]
        heapq.heapify(due)
        while due[0][0] < days * DAY_S:
            at, node = due[0]
            heapq.heapreplace(due, (at + random.weibullvariate(scale, self.shape), node))
            yield NodeFailure(at, node, random.random() < self.hardware)


@dataclass
class RunOutcome:
    """The outcome of one run, in wall-clock seconds.

    Attributes:
        total_s: Simulated time.
        useful_s: Training that was kept.
        stalled_s: Stalls for checkpoints.
        repeated_s: Training done again.
        down_s: Recoveries, and waits for nodes.
        failures: Failures of nodes.
        recoveries: Recoveries; a failure during one begins none.
        from_tier: Recoveries that no copy in memory could serve.
        waits: Waits for a node when no standby was left.
    """

    total_s: float
    useful_s: float = 0.0
    stalled_s: float = 0.0
    repeated_s: float = 0.0
    down_s: float = 0.0
    failures: int = 0
    recoveries: int = 0
    from_tier: int = 0  # recoveries that no copy in memory could serve
    waits: int = 0  # waits for a node, because no standby was left

    @property
    def goodput(self) -> float:
        """Return the share of the time that is training and kept."""
        return self.useful_s / self.total_s


@dataclass
class _Run:
    scheme: Scheme
    tier: Scheme
    nodes: int
    standby: int
    faults: Faults
    outcome: RunOutcome
    saved_s: float = 0.0  # wall-clock time of training up to the last recovery, all safe in memory
    tiered_s: float = 0.0  # part of that, safe on storage
    lost: set[int] = field(default_factory=set)  # nodes whose memory was lost in this recovery
    ready_s: list[float] = field(default_factory=list)  # times at which nodes under repair come back
    borrowed: int = 0  # nodes beyond the paid ones, each returned when a repaired node comes back

    def process_failure(self, failure: NodeFailure, up_s: float) -> float:
        """Process a failure, and return the time at which the next stretch of training begins.

        The failure ends a stretch of training, or falls into a recovery if it is before `up_s`.
        """
        now, out = failure.at_s, self.outcome
        out.failures += 1
        if now >= up_s:
            out.recoveries += 1
            self.lost.clear()
            done = self.saved_s + (now - up_s)
            self.saved_s += self._compute_kept_s(up_s, now)
            self.tiered_s = max(self.tiered_s, self._compute_tiered_s(done))
            out.repeated_s += done - self.saved_s
        if failure.hardware:
            self.lost.add(failure.node)
            if self.saved_s > self.tiered_s and not self.scheme.can_survive(self.nodes, self.lost):
                out.from_tier += 1
                out.repeated_s += self.saved_s - self.tiered_s
                self.saved_s = self.tiered_s
        from_tier = self.scheme.in_memory and bool(self.lost) and self.saved_s == self.tiered_s > 0
        read_s = self.tier.read_s if from_tier else self.scheme.read_s
        return now + self.scheme.down_s + self._wait_for_node(failure, now) + read_s

    def _compute_kept_s(self, up_s: float, now: float) -> float:
        """Return the wall-clock time of training since `up_s` that can be gone back to."""
        usable = now - up_s - self.scheme.usable_s
        return max(0, floor(usable / self.scheme.every_s)) * self.scheme.every_s

    def _compute_tiered_s(self, done_s: float) -> float:
        return max(0.0, floor((done_s - self.tier.usable_s) / self.tier.every_s) * self.tier.every_s)

    def _wait_for_node(self, failure: NodeFailure, now: float) -> float:
        """Return the wait for another node in seconds."""
        if not failure.hardware:
            return 0.0
        while self.ready_s and self.ready_s[0] <= now:
            heapq.heappop(self.ready_s)
            if self.borrowed:
                self.borrowed -= 1
            else:
                self.standby += 1
        heapq.heappush(self.ready_s, now + self.faults.repair_s)
        if self.standby:
            self.standby -= 1
            return 0.0
        self.borrowed += 1
        self.outcome.waits += 1
        return self.faults.replace_s


def simulate(
    scheme: Scheme,
    tier: Scheme,
    failures: Iterable[NodeFailure],
    *,
    nodes: int,
    days: float,
    standby: int = 0,
    faults: Faults = Faults(),
) -> RunOutcome:
    """Simulate one training from its start for `days` days.

    `tier` is the scheme to go back to if no copy in memory is left.
    """
    if nodes < 1 or days <= 0 or standby < 0:
        raise ValueError("a training has a node and some days, and no fewer than 0 nodes stand by")
    out = RunOutcome(days * DAY_S)
    run = _Run(scheme, tier, nodes, standby, faults, out)
    up_s = 0.0
    trained = 0.0  # wall-clock time of training, including lost work
    for failure in failures:
        if failure.at_s >= out.total_s:
            break
        trained += max(0.0, failure.at_s - up_s)
        up_s = max(up_s, run.process_failure(failure, up_s))
    end = max(0.0, out.total_s - up_s)
    trained += end
    kept = run.saved_s + end
    share = scheme.stall_s / scheme.every_s
    out.stalled_s, out.useful_s = kept * share, kept * (1 - share)
    out.down_s = out.total_s - trained
    return out
