"""The failure rate of nodes, and the source of this knowledge."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.forecast.event_history import EventCounts
from gemini_hpc.slurm.accounting import History

USUAL_PER_DAY, USUAL_HARDWARE = 0.015, 0.5
NONE_SEEN = 3.0  # no failure seen in a period: fewer than three in such a period, at 95 %


@dataclass(frozen=True)
class FailureRate:
    """A failure rate.

    Attributes:
        per_day: Failures of one node a day.
        hardware: Share of these failures that take the node and its memory.
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
