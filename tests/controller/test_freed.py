"""What a job's owner is told of copies that its agents have freed while it waited."""

from __future__ import annotations

import pytest

from gemini_hpc.query.past import describe_freed_copies
from gemini_hpc.wire.inspect_schema import EventRecord

WHY = "the retention time of 4 s is over; sealed default 7"


def event(host: str, name: str = "released", version: int = 7, restart: int = 1, detail: str = WHY) -> EventRecord:
    return EventRecord(t=100.0, name=name, host=host, restart=restart, version=version, detail=detail)


def test_a_loss_is_one_sentence_for_all_its_nodes() -> None:
    said = describe_freed_copies([event(f"n{i}") for i in range(1, 4)], restart=1)
    assert said.startswith("lost: the copies of version 7 on n1, n2, n3 were freed at ")
    assert said.endswith(": the retention time of 4 s is over"), said


def test_of_many_nodes_some_are_named() -> None:
    said = describe_freed_copies([event(f"n{i:03}") for i in range(500)], restart=1)
    assert "n000" in said and " more were freed" in said and len(said) < 400, said


@pytest.mark.parametrize(
    "other",
    [
        event("n1", version=0),  # nothing was sealed
        event("n1", restart=0),
        event("n1", name="detached"),
    ],
)
def test_no_loss_is_not_told(other: EventRecord) -> None:
    assert describe_freed_copies([other], restart=1) == describe_freed_copies([], restart=1) == ""
