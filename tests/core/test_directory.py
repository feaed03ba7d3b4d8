"""Manifests: a hostile one is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.format.shard_manifest import Piece, ShardManifest, TensorRow, pack, place_boxes, unpack

ROW = TensorRow("model.w", "float32", (4, 3), True, "cpu")
GOOD = ShardManifest(0, 1, (ROW,), (Piece(0, (2, 0), (2, 3), 64),))


def test_round_trip() -> None:
    assert unpack(pack(GOOD), 128) == GOOD
    assert GOOD.count_tensor_bytes() == 64 + 24


def test_pieces_outside_are_refused() -> None:
    for piece, row in (
        (Piece(1, (0, 0), (1, 1), 0), ROW),
        (Piece(-1, (0, 0), (1, 1), 0), ROW),
        (Piece(0, (0,), (1,), 0), ROW),
        (Piece(0, (3, 0), (2, 3), 0), ROW),
        (Piece(0, (-1, 0), (2, 3), 0), ROW),
        (Piece(0, (0, 0), (4, 3), 128), ROW),
        (Piece(0, (0, 0), (1, 3), 8), ROW),
        (Piece(0, (0, 0), (1, 3), -64), ROW),
        (Piece(0, (0, 0), (1, 3), 0), msgspec.structs.replace(ROW, dtype="object")),
    ):
        assert "manifest" in refusal(ValueError, unpack, pack(ShardManifest(0, 1, (row,), (piece,))), 128), piece


@given(st.binary(max_size=100))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="manifest"):
        unpack(data, 1 << 20)


def test_places_are_aligned_and_apart() -> None:
    rows = (
        ROW,
        TensorRow("model.b", "bfloat16", (5,), True, "cpu"),
        TensorRow("model.s", "float32", (), True, "cpu"),
    )
    pieces = place_boxes(rows, [(0, (0, 0), (4, 3)), (1, (0,), (5,)), (0, (0, 0), (0, 3)), (2, (), ())])
    assert [p.start for p in pieces] == [0, 64, 128]
