"""Waiting for what becomes true by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(true: Callable[[], Any], timeout_s: float = 60.0, every_s: float = 0.05, *, what: str = "") -> Any:
    """The first value of `true()` that is; AssertionError, which names `what`, where there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain" + (f": {what}" if what else "")
        time.sleep(every_s)
    return value
