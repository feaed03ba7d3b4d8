"""A wrong number in a program's call is named, with its value and the values that fit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from gemini_hpc.core.numbers import check_count, check_overhead, check_timeout


@pytest.mark.parametrize("value", [-1, -(10**400), 1.5, math.nan, "3", None, [3]])
def test_a_wrong_count(value: object) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        check_count("every", value, 0)
    assert str(raised.value) == f"every is {repr(value)[:80]}: wanted a whole number, 0 or more"


@pytest.mark.parametrize("check", [check_overhead, lambda value: check_timeout("seal_timeout_s", value)])
@pytest.mark.parametrize("value", [0, -0.5, math.nan, -math.inf, "0.5", 0.5j, object()])
def test_a_wrong_number(check: Callable[[object], None], value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^(overhead|seal_timeout_s) is .{1,80}: wanted a "):
        check(value)


def test_numbers_that_fit() -> None:
    check_count("every", 0, 0)
    check_count("chunk_bytes", 1 << 40, 4096)
    check_overhead(0.01)
    for timeout_s in (1, 0.3, math.inf):
        check_timeout("seal_timeout_s", timeout_s)
