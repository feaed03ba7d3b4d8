"""The past failures of nodes and programs, from the event logs of protected jobs. Pure: events in, counts out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gemini_hpc.wire.inspect_schema import EventRecord

_LOST, _FAILED = "confirmed", "failed_first"
_ENDS = frozenset(("detached", "released"))
_TOGETHER_S = 60.0  # ranks that fail this close to a node's loss (seconds) fail because of it
_DAY_S = 86400.0  # 24 hours


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
    return EventCounts(int(attached), node_s / _DAY_S, len(lost), len(alone)) if attached else EventCounts()
