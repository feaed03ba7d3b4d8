"""Waiting for what becomes true by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_REST, _MOST_S = 4.0, 0.4  # a look at Slurm is a process or three: looks in a row kept the machine half busy
_EXACT_S = 0.02


def pause_s(took_s: float, every_s: float = 0.05) -> float:
    """Until the next look, after one that took so long. An `every_s` below 0.02 is kept: what is awaited is short."""
    return every_s if every_s < _EXACT_S else max(every_s, min(_MOST_S, _REST * took_s))


def until(true: Callable[[], Any], timeout_s: float = 60.0, every_s: float = 0.05, *, what: str = "") -> Any:
    """The first value of `true()` that is; AssertionError, which names `what`, where there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if value := true():
            return value
        now = time.monotonic()
        assert now < deadline, f"waited {timeout_s:g} s in vain" + (f": {what}" if what else "")
        time.sleep(pause_s(now - began, every_s))
