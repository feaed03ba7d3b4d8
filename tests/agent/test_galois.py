"""A multiple of bytes is added alike by ISA-L and without it."""

from __future__ import annotations

import random

import pytest

from gemini_hpc.agent.replicas import galois
from gemini_hpc.core import gf256

SIZES = (0, 1, 15, 31, 32, 33, 63, 64, 65, 127, 4096, 70_001)


@pytest.fixture(params=["isa-l", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(galois, "load_library", lambda: None)
    else:
        assert galois.load_library() is not None, "libisal2 is not installed: `make deps-site`"
    return str(request.param)


@pytest.mark.parametrize("by", [1, 2, 29, 255])
def test_every_byte_is_multiplied_and_nothing_beside(way: str, by: int) -> None:
    dice = random.Random(by)
    for size in SIZES:
        data, before = dice.randbytes(size), dice.randbytes(size + 3)
        into = bytearray(before)
        with memoryview(into)[1 : 1 + size] as view:
            galois.add(view, memoryview(data), by)
        wanted = bytes(b ^ gf256.multiply(by, a) for a, b in zip(data, before[1:], strict=False))
        assert into == before[:1] + wanted + before[1 + size :]


def test_unequal_lengths_are_refused(way: str) -> None:
    for by in (1, 2):
        with pytest.raises(ValueError):
            galois.add(memoryview(bytearray(5)), memoryview(bytes(4)), by)


def test_a_library_that_is_not_there_or_not_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libnothing-of-that-name.so.9", "libc.so.6"):
        monkeypatch.setattr(galois, "LIBRARY", name)
        galois.load_library.cache_clear()
        assert galois.load_library() is None
    galois.load_library.cache_clear()
