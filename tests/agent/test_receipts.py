"""Cumulative acknowledgements: few while bytes follow, all before anybody waits."""

from __future__ import annotations

import pytest

from gemini_hpc import clock
from gemini_hpc.agent.transfer import receipts
from gemini_hpc.agent.transfer.receipts import Receipts
from gemini_hpc.wire import peer

MIB = 1 << 20


class Link:
    """Return the acknowledgements sent; `more`: whether a message is there already."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.more = True
        self.waits: list[float | None] = []

    def send(self, message: peer.PushAck) -> None:
        self.sent.append(message.arrived)

    def wait(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        return self.more


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: at[0])
    return at


def test_bytes_are_acknowledged_together_while_more_follow(link: Link, now: list[float]) -> None:
    told = Receipts(link)  # type: ignore[arg-type]
    for _ in range(48):
        told.add(MIB)
        told.wait()
    assert link.sent == [16 * MIB, 32 * MIB, 48 * MIB]


def test_nobody_waits_with_bytes_that_are_not_acknowledged(link: Link, now: list[float]) -> None:
    told, link.more = Receipts(link), False  # type: ignore[arg-type]
    told.wait()
    assert link.sent == [] and link.waits == [None], "nothing to say"
    told.add(5)
    told.wait()
    assert link.sent == [5] and link.waits[-2:] == [0, None]
    told.wait()
    told.acknowledge()
    assert link.sent == [5], "nothing is said twice"


def test_a_byte_waits_no_longer_than_a_window_can_bear(link: Link, now: list[float]) -> None:
    told = Receipts(link)  # type: ignore[arg-type]
    told.add(1)
    now[0] += receipts._MOST_S / 2
    told.add(1)
    assert link.sent == []
    now[0] += receipts._MOST_S
    told.add(1)
    assert link.sent == [3]
    now[0] += 10
    told.add(1)
    assert link.sent == [3], "it has only just come"
