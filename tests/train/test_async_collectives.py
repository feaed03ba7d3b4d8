"""Words between ranks of which one is ahead: rounds of a stand-in for gloo, that end when they are told to."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.train.schedule import async_collectives as council_module
from gemini_hpc.train.schedule.async_collectives import AsyncCollectives, CollectivesBroken
from gemini_hpc.train.schedule.trace import OperationRecord


def sitting(ends_at: float, caught_up_at: float) -> AsyncCollectives:
    """A round that is over when the other rank has come, and a device that catches up."""
    work = SimpleNamespace(
        is_completed=lambda: time.monotonic() >= ends_at,
        wait=lambda: None,
        get_future=lambda: SimpleNamespace(done=lambda: False),
    )
    backend = SimpleNamespace(allreduce=lambda tensors, options: work)
    group: Any = SimpleNamespace(_get_backend=lambda device: backend, size=lambda: 2)
    made = AsyncCollectives(
        cast(Any, group), lambda asked: OperationRecord(0, 0, 0.0), lambda: time.monotonic() >= caught_up_at
    )
    made.start_max_round([7])
    return made


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(council_module, "PATIENCE_S", 0.2)


def test_a_host_ahead_of_its_device_waits_for_ranks_that_are_not() -> None:
    now = time.monotonic()
    assert sitting(now + 1.0, now + 0.9).read_maxima() == [7]


def test_but_not_when_its_device_is_there() -> None:
    now = time.monotonic()
    with pytest.raises(CollectivesBroken, match="not all ranks have answered"):
        sitting(now + 60.0, now).read_maxima()
