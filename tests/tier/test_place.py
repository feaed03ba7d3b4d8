"""The rate at which a node writes."""

from __future__ import annotations

import pytest

from gemini_hpc.tier import publish
from gemini_hpc.tier.publish import WritePace

RATE = 10 << 20
PART = 2 << 20


class Clock:
    """Time that passes only where somebody sleeps, or lets it."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_s += seconds
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(publish, "clock", made)
    return made


def rate(clock: Clock, pace: WritePace, parts: int, each_s: float = 0.0) -> float:
    """Bytes per second of so many parts, each of which takes that long by itself."""
    began_s = clock.now_s
    for _ in range(parts):
        clock.now_s += each_s
        pace(PART)
    return parts * PART / (clock.now_s - began_s)


def test_the_rate_is_kept_however_long_the_writes_take(clock: Clock) -> None:
    for each_s in (0.0, 0.01, 0.199):
        assert rate(clock, WritePace(RATE), 200, each_s) == pytest.approx(RATE, rel=0.01), each_s


def test_an_uneven_disk_is_made_good(clock: Clock) -> None:
    """Up to a quarter of a second: the parts after a late one wait the less."""
    pace, began_s = WritePace(RATE), clock.now_s
    for number in range(200):
        clock.now_s += 0.24 if number % 10 == 5 else 0.0
        pace(PART)
    assert 200 * PART / (clock.now_s - began_s) == pytest.approx(RATE, rel=0.01)


def test_a_disk_that_is_slower_is_not_held_up(clock: Clock) -> None:
    rate(clock, pace := WritePace(RATE), 10)
    before_s = clock.slept_s
    rate(clock, pace, 50, 0.3)
    assert clock.slept_s == before_s


def test_there_is_no_burst_after_a_pause(clock: Clock) -> None:
    """What was not written in a minute does not come at once then."""
    rate(clock, pace := WritePace(RATE), 10)
    clock.now_s += 60
    began_s, most = clock.now_s, 0.0
    for number in range(1, 51):
        most = max(most, number * PART - RATE * (clock.now_s - began_s))
        pace(PART)
    assert most <= RATE * 0.25 + PART, "at most a quarter of a second ahead"


def test_without_a_rate_nobody_waits(clock: Clock) -> None:
    pace = WritePace(0.0)
    for _ in range(100):
        pace(1 << 40)
    assert clock.slept_s == 0
