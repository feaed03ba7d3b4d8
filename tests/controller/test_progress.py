"""Whether recoveries lead anywhere, told by the log of a job."""

from __future__ import annotations

from gemini_hpc.controller.progress import count_without_progress
from gemini_hpc.wire.inspect_schema import EventRecord


def life(restart: int, begun: int, reached: int | None, how: str = "confirmed") -> list[EventRecord]:
    """The log of one: it resumed from a version, failed, and had sealed another one; None: nobody has told that."""
    events = [EventRecord(10.0 * restart, "agreed", "n1", restart, begun)]
    if how:
        events.append(EventRecord(10.0 * restart + 1, how, "n2", restart))
    if reached is not None:
        events.append(EventRecord(10.0 * restart + 2, "detached", "n1", restart, reached))
        events.append(EventRecord(10.0 * restart + 2, "detached", "n3", restart, max(0, reached - 1)))
    return events


def lives(*told: list[EventRecord]) -> list[EventRecord]:
    return [event for events in told for event in events]


def test_lives_that_led_nowhere() -> None:
    cases: list[tuple[list[EventRecord], int, tuple[int, int]]] = [
        ([], 1, (0, 0)),
        (life(0, 0, 9), 1, (0, 9)),  # the first life is no recovery
        (lives(life(0, 0, 9), life(1, 9, 9)), 1, (1, 9)),
        (lives(life(0, 0, 0), life(1, 0, 0), life(2, 0, 0)), 1, (2, 0)),  # never sealed anything
        (lives(life(0, 0, 9), life(1, 8, 9), life(2, 8, 8)), 1, (2, 9)),
        (lives(life(0, 0, 9), life(1, 9, 9), life(2, 9, 10)), 1, (0, 10)),  # progress
        (lives(life(0, 0, 9), life(1, 9, 10), life(2, 10, 10), life(3, 10, 10, "sent_back")), 1, (2, 10)),
        (lives(life(0, 0, 9), life(1, 9, 9), life(2, 9, 9)), 2, (1, 9)),  # held before its second life
        (lives(life(0, 0, 9), life(1, 9, 9), life(2, 9, 9, "")), 1, (0, 9)),  # preempted
        (lives(life(0, 0, 9), life(1, 9, 9), life(2, 9, None)), 1, (0, 9)),  # nobody has told how far it came
        (lives(life(0, 0, 9), life(1, 9, 9), life(3, 9, 9)), 1, (1, 9)),  # one left no trace
    ]
    for case in cases:
        events, since, expected = case
        assert count_without_progress(events, since) == expected, case
        assert count_without_progress(reversed(events), since) == expected, case
