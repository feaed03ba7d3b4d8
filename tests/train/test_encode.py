"""The typed encoder: what comes out is what went in; hostile bytes end in ValueError."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import math
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.train.state import encode


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


def _of_a_function() -> type[enum.Enum]:
    class Hidden(enum.Enum):
        RED = 1

    return Hidden


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, torch.Tensor):
        flat = (a.contiguous().reshape(-1), b.contiguous().reshape(-1))
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (not a.numel() or torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8)))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, collections.deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):  # a NaN in a set equals nothing
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return bool(a == b)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**300), max_value=2**300),
    st.floats(),
    st.text(),
    st.binary(),
    st.datetimes(),
    st.dates(),
    st.timedeltas(),
    st.sampled_from(
        [Colour.RED, Colour.BLUE, torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")]
    ),
)
hashable = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(collections.OrderedDict),
        st.sets(hashable, max_size=4),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 3)),
    ),
    max_leaves=20,
)


@given(values)
def test_round_trip(value: Any) -> None:
    assert same(encode.decode(encode.encode(value)), value)


def test_bytes_in_a_file_of_memory() -> None:
    back = encode.decode(encode.encode({"file": io.BytesIO(b"scales")}))["file"]
    assert type(back) is io.BytesIO and back.read() == b"scales"


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0],  # a NaN with a payload
        -0.0,
        math.inf,
        complex(-0.0, math.nan).real,
        "\ud800",
        2**5000,
        -(2**63),
        bytearray(b"x"),
        range(3, 9, 2),
        collections.Counter({3: 2, 8: 1}),
        np.float32(0.1),
        np.int8(-3),
        np.datetime64("2026-01-01"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(["a", "bc"]),
        np.empty((0, 3)),
        np.array(5.0),
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1.0, -0.0, math.nan], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.empty(0, 4),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    ],
    ids=str,
)
def test_exact(value: Any) -> None:
    assert same(encode.decode(encode.encode(value)), value)


def test_parameters_and_generators() -> None:
    assert torch.equal(encode.decode(encode.encode(torch.nn.Parameter(torch.ones(2)))), torch.ones(2))
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = encode.decode(encode.encode(generator))
    wanted = torch.rand(4, generator=generator)
    other = torch.Generator()
    state.restore(other)
    assert torch.equal(torch.rand(4, generator=other), wanted)


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"a": [1, Odd()]}, r"state\['a'\]\[1\]", "Odd"),
        ({"f": math.sin}, r"state\['f'\]", "builtin_function"),
        ([_of_a_function()["RED"]], r"state\[0\]", "top of a module"),
        ({"m": torch.nn.Linear(1, 1)}, r"state\['m'\]", "Linear"),
        ({"s": torch.ones(2).to_sparse()}, r"state\['s'\]", "sparse"),
        ({"o": np.array([object()])}, r"state\['o'\]", "object"),
        (collections.defaultdict(int), "state", "defaultdict"),
    ],
)
def test_unknown_types_are_named(value: Any, where: str, what: str) -> None:
    with pytest.raises(encode.UnknownTypeError, match=where) as caught:
        encode.encode(value)
    assert what in str(caught.value)


def test_a_cycle_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(encode.UnknownTypeError, match="nested deeper"):
        encode.encode(value)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    try:
        value = encode.decode(data)
    except ValueError:
        return
    encode.encode(value)  # what is accepted is a value like any other


@given(values, st.data())
def test_damaged_bytes_are_refused_or_harmless(value: Any, data: st.DataObject) -> None:
    raw = bytearray(encode.encode({"v": value, "t": torch.ones(3), "a": np.ones(2)}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for hostile in (bytes(raw), bytes(raw[:cut])):
        with suppress(ValueError):
            encode.decode(hostile)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"l" + struct.pack("<I", 2**32 - 1),
        b"b" + struct.pack("<Q", 2**63),
        b"i" + struct.pack("<Q", 2**64 - 1) + b"x",
        b"d" + struct.pack("<I", 1) + b"l" + struct.pack("<I", 0) + b"N",  # a list as a key
        b"cX" + struct.pack("<I", 13) + b"torch.float32" + struct.pack("<IQQ", 1, 2**62, 4) + b"abcd",
        b"cX" + struct.pack("<I", 13) + b"torch.float32" + struct.pack("<IQQQ", 2, 0, 2**63, 0),
        b"A" + struct.pack("<I", 2) + b"|O" + struct.pack("<IQQ", 1, 1, 8) + b"abcdefgh",
        b"E" + encode.encode(("os.system", "x")),
        b"r" + struct.pack("<I", 3) + encode.encode(1) + encode.encode(2) + encode.encode(0),
        (b"l" + struct.pack("<I", 1)) * 5000 + b"N",
        b"NN",
    ],
)
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(ValueError):
        encode.decode(data)
