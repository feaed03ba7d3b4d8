"""Waiting for what becomes true by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: Callable[[], Any], timeout_s: float = 30.0, every_s: float = 0.05) -> Any:
    """The first true value of `what`; AssertionError where there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := what():
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(every_s)
