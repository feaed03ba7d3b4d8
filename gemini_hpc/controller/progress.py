"""Whether a job's recoveries lead anywhere: a pure rule over its event log."""

from __future__ import annotations

from collections.abc import Iterable

from gemini_hpc.wire.inspect_schema import EventRecord

_REACHED = frozenset(("agreed", "resumed", "saved", "detached", "released"))  # with a version that had been sealed
_ENDED = frozenset(("detached", "released"))  # with the last one that an agent knows of
_FAILED = frozenset(("confirmed", "sent_back"))  # what the controller says of a failure, and of no preemption


def barren(events: Iterable[EventRecord], since: int = 1) -> tuple[int, int]:
    """How many lives of a job in a row, up to the last one, began with a recovery, failed, and sealed nothing newer
    than those before; and the newest version. since: the first life that counts. A life of which nobody has told how
    far it came ends the row."""
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
