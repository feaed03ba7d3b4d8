"""How often a stranger can make us write."""

from __future__ import annotations

import pytest

from gemini_hpc import clock
from gemini_hpc.wire.rate_limit import RateLimit


def test_burst_then_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    one = RateLimit(per_s=2.0, burst=3.0)
    assert [one.take_tokens() for _ in range(5)] == [True, True, True, False, False]
    assert (one.take_missed(), one.take_missed()) == (2, 0)
    now += 0.4
    assert not one.take_tokens()
    now += 0.2
    assert one.take_tokens() and not one.take_tokens()
    now += 1000
    assert [one.take_tokens() for _ in range(5)] == [True, True, True, False, False]
