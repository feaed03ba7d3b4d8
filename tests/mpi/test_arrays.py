"""Arrays of MPI programs: into a slot's area and back, whole and in parts."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import pack_header
from gemini_hpc.mpi.arrays import Arrays, Part, Saved

pytestmark = pytest.mark.slow


def saved(arrays: Arrays) -> Saved:
    """As the agent gives it back."""
    layout = arrays.layout
    memory = bytearray(layout.total)
    memory[:4096] = pack_header(layout, 0, Stamp(1, 1), arrays.manifest.rank, arrays.manifest.world)
    memory[layout.manifest_offset : layout.manifest_offset + layout.manifest_bytes] = arrays.packed
    arrays.store(memoryview(memory)[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])
    return Saved.read(memoryview(memory)[: layout.small_offset], layout.total)


def kinds() -> dict[str, Any]:
    dice = np.random.default_rng(3)
    return {
        "real": dice.random((4, 3)),
        "complex": dice.random(5) + 1j * dice.random(5),
        "flags": np.array([True, False, True]),
        "scalar": np.array(7),
        "nothing": np.empty((0, 4), dtype=np.float32),
        "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
        "record": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
        "extended": np.arange(3, dtype=np.longdouble),
        "strided": np.arange(20.0)[::3],
        "columns": np.asfortranarray(dice.random((3, 4))),
        "stdlib": array.array("d", [1.0, 2.0]),
        "bytes": bytearray(b"abc"),
    }


def test_all_kinds_come_back() -> None:
    before, after = kinds(), kinds()
    shard = saved(Arrays(before, 0, 1))
    for value in after.values():
        flat = np.asarray(memoryview(value)) if not isinstance(value, np.ndarray) else value
        flat[...] = np.zeros((), dtype=flat.dtype)
    Arrays(after, 0, 1).load([shard], True)
    for name, value in before.items():
        assert np.array_equal(np.asarray(after[name]), np.asarray(value)), name


@given(st.data())
def test_parts_of_any_number_of_ranks_go_into_those_of_any_other(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    whole = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)

    def boxes(world: int) -> list[tuple[int, int]]:
        cuts = sorted(data.draw(st.lists(st.integers(0, shape[axis]), min_size=world - 1, max_size=world - 1)))
        return list(zip([0, *cuts], [*cuts, shape[axis]], strict=True))

    def parts(world: int, source: Any) -> list[Part]:
        found = []
        for begin, end in boxes(world):
            index = tuple(slice(begin, end) if d == axis else slice(None) for d in range(len(shape)))
            found.append(Part(source[index].copy(), [begin if d == axis else 0 for d in range(len(shape))], shape))
        return found

    before = parts(data.draw(st.integers(1, 5)), whole)
    shards = [saved(Arrays({"x": part}, rank, len(before))) for rank, part in enumerate(before)]
    after = parts(data.draw(st.integers(1, 5)), np.zeros(shape))
    for rank, part in enumerate(after):
        Arrays({"x": part}, rank, len(after)).load(shards, len(after) == len(before))
        index = tuple(slice(o, o + n) for o, n in zip(part.offset, part.array.shape, strict=True))
        assert np.array_equal(part.array, whole[index])


def test_nothing_changes_where_one_array_does_not_fit() -> None:
    shard = saved(Arrays({"a": np.ones(3), "b": np.ones(3)}, 0, 1))
    a = np.zeros(3)
    with pytest.raises(ValueError, match=r"b is \(4,\) float64, was saved as \(3,\) float64"):
        Arrays({"a": a, "b": np.zeros(4)}, 0, 1).load([shard], True)
    with pytest.raises(ValueError, match="c is not in the saved state"):
        Arrays({"a": a, "c": np.zeros(4)}, 0, 1).load([shard], True)
    assert not a.any()


def test_a_part_that_nobody_saved_is_missed() -> None:
    shard = saved(Arrays({"x": Part(np.ones(3), [0], [6])}, 0, 1))
    with pytest.raises(ValueError, match="x is not in the saved state"):
        Arrays({"x": Part(np.ones(4), [0], [6])}, 0, 1).load([shard], True)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (3.0, TypeError, "has no buffer"),
        (b"constant", ValueError, "is read-only"),
        (np.array(["x"], dtype=object), TypeError, "Python objects"),
        (Part(np.zeros(3), [4], [6]), ValueError, "is no box"),
        (Part(np.zeros(3, dtype=">f8"), [0], [6]), TypeError, "cannot be put together"),
    ],
)
def test_what_cannot_be_captured(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Arrays({"x": value}, 0, 1)


def test_an_array_bound_anew_is_like_the_one_before() -> None:
    arrays = Arrays({"x": np.zeros(3)}, 0, 1)
    arrays.rebind("x", np.ones(3))
    assert np.array_equal(saved(arrays).view_piece(arrays.manifest.pieces[0], np.dtype("f8")), np.ones(3))
    with pytest.raises(ValueError, match=r"x was \(3,\) float64, the new one is \(4,\) float64"):
        arrays.rebind("x", np.ones(4))
    with pytest.raises(KeyError):
        arrays.rebind("y", np.ones(3))
