"""What tests leave behind, on this machine (`machine`) and in a development cluster (`cluster`).

Both tell what is there as a `Found`: things by an identity of their own, so that what is new since an earlier look is
a difference of two. Nothing here changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from waiting import pause_s

Found = dict[Any, str]


def new(before: Found, after: Found) -> list[str]:
    """What is there after that was not before, in words."""
    return sorted(text for what, text in after.items() if what not in before)


def assert_nothing_new(before: Found, look: Callable[[], Found], within_s: float) -> None:
    """What ends by itself may take that long; AssertionError naming all that is still there then."""
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        if not (left := new(before, look())):
            return
        now = time.monotonic()
        assert now < deadline, f"left behind after {within_s:g} s:\n  " + "\n  ".join(left)
        time.sleep(pause_s(now - began, 0.1))
