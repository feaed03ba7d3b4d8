"""The rule whether a job's recoveries make progress: a pure function of its event log."""

from __future__ import annotations

from collections.abc import Iterable

from gemini_hpc.wire.inspect_schema import EventRecord

_REACHED = frozenset(("agreed", "resumed", "saved", "detached", "released"))  # these events carry a sealed version
_ENDED = frozenset(("detached", "released"))  # these events carry the last version that an agent knows
# the controller's events for a failure; a preemption has none of them
_FAILED = frozenset(("confirmed", "sent_back"))


def count_without_progress(events: Iterable[EventRecord], since: int = 1) -> tuple[int, int]:
    """Count the job's latest lives in a row that failed without progress.

    Such a life began with a recovery, failed, and sealed no newer version than the lives before it. A life without
    a reported end of its progress ends the row.

    Args:
        events: The job's events.
        since: The first life that counts.

    Returns:
        The number of such lives, and the newest version.
    """
    reached: dict[int, int] = {}
    ended, failed = set(), set()
    for event in events:
        if event.name in _REACHED:
            reached[event.restart] = max(event.version, reached.get(event.restart, 0))
        if event.name in _ENDED:
            ended.add(event.restart)
        if event.name in _FAILED:
            failed.add(event.restart)
    count, last = 0, max(reached, default=0)
    for life in range(last, max(since, 1) - 1, -1):
        before = max((version for earlier, version in reached.items() if earlier < life), default=0)
        if not (life in ended and life in failed and reached[life] <= before):
            break
        count += 1
    return count, max(reached.values(), default=0)
