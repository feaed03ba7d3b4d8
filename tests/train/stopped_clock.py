"""A clock for controllers under test: it goes only where the test says so."""

from __future__ import annotations

import pytest

from gemini_hpc import clock


class Time:
    """The seconds that `clock.monotonic` returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
