"""The failure rate of nodes, from a site's accounting or the event logs of its protected jobs. Pure rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gemini_hpc.clock import DAY_S
from gemini_hpc.slurm.accounting import History
from gemini_hpc.wire.inspect_schema import EventRecord

USUAL_PER_DAY, USUAL_HARDWARE = 0.015, 0.5
NONE_SEEN = 3.0  # no failure seen in a period: fewer than three in such a period, at 95 %
_LOST, _FAILED = "confirmed", "failed_first"  # names of events
_ENDS = frozenset(("detached", "released"))
_TOGETHER_S = 60.0  # ranks that fail this close to a node's loss (seconds) fail because of it


@dataclass(frozen=True)
class FailureRate:
    """A failure rate.

    Attributes:
        per_day: Failures of one node a day.
        hardware: Share that takes the node and its memory.
        source: Origin of the rate, for people.
    """

    per_day: float = USUAL_PER_DAY
    hardware: float = USUAL_HARDWARE
    source: str = "GEMINI, Figure 15b"

    def describe(self) -> str:
        """Return the rate as a sentence."""
        share = f"{100 * self.hardware:.0f} % with its memory"
        return f"failures: {self.per_day:.3g} of a node a day, {share} ({self.source})"


def derive_history_rate(history: History, where: str) -> FailureRate:
    """Return the rate from a site's past.

    Each run that Slurm ended as NODE_FAIL has lost a node with its memory. If jobs share a node, its days and its
    loss count once per job, so the rate is still that of the node.

    Raises:
        ValueError: There is nothing to count.
    """
    if not history.runs or history.node_days <= 0:
        raise ValueError(f"{where}: no run of a job in it, so nothing is known of failures")
    days = _format_days(history.node_days)
    if not history.lost:
        source = f"{where}: none lost in {days} node-days; {NONE_SEEN:g} taken, the bound at 95 %"
        return FailureRate(NONE_SEEN / history.node_days, 1.0, source)
    source = f"{where}: {history.lost} lost in {days} node-days"
    return FailureRate(history.lost / history.node_days, 1.0, source)


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Counts of jobs and failures.

    Attributes:
        jobs: Jobs with an agent on some node.
        node_days: Days of all their nodes together.
        lost: Nodes lost with their memory.
        failed: Times that a rank on a healthy node failed first.
    """

    jobs: int = 0
    node_days: float = 0.0
    lost: int = 0
    failed: int = 0

    def __add__(self, other: EventCounts) -> EventCounts:
        return EventCounts(
            self.jobs + other.jobs,
            self.node_days + other.node_days,
            self.lost + other.lost,
            self.failed + other.failed,
        )


def count_events(events: Iterable[EventRecord]) -> EventCounts:
    """Return the counts of one job.

    A node counts from its agent's first event of an incarnation to the last event, or to its loss. If both are
    missing (a log that has lost its older half), the node counts until the log ends.
    """
    ordered = sorted(events, key=lambda e: e.t)
    since: dict[str, float] = {}
    lost: list[float] = []
    failed: list[float] = []
    node_s, attached = 0.0, False
    for event in ordered:
        if event.name == "attached":
            attached = True
            node_s += event.t - since.get(event.host, event.t)
            since[event.host] = event.t
        elif event.name in _ENDS or event.name == _LOST:
            node_s += event.t - since.pop(event.host, event.t)
            lost += [event.t] if event.name == _LOST else []
        elif event.name == _FAILED:
            failed.append(event.t)
    node_s += sum(ordered[-1].t - t for t in since.values())
    alone = [t for t in failed if not any(abs(t - other) < _TOGETHER_S for other in lost)]
    return EventCounts(int(attached), node_s / DAY_S, len(lost), len(alone)) if attached else EventCounts()


def derive_event_rate(seen: EventCounts, where: str) -> FailureRate:
    """Return the rate from the event logs of protected jobs.

    The logs separate losses of nodes from programs that failed on healthy nodes.

    Raises:
        ValueError: There is nothing to count.
    """
    if not seen.jobs or seen.node_days <= 0:
        raise ValueError(f"{where}: no protected job in it, so nothing is known of failures")
    failures = seen.lost + seen.failed
    jobs = f"{seen.jobs} job{'s' * (seen.jobs > 1)}, {_format_days(seen.node_days)} node-days"
    if not failures:
        source = f"{where}: {jobs} without a failure; {NONE_SEEN:g} taken, the bound at 95 %"
        return FailureRate(NONE_SEEN / seen.node_days, 1.0, source)
    source = f"{where}: {seen.lost} lost, {seen.failed} failed on healthy nodes; {jobs}"
    return FailureRate(failures / seen.node_days, seen.lost / failures, source)


def _format_days(node_days: float) -> str:
    return f"{node_days:,.0f}" if node_days >= 10 else f"{node_days:.2g}"
