from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core.chunks import cut_chunks


@given(st.integers(0, 10_000), st.integers(1, 3_000))
def test_chunks_follow_each_other_and_cover_all(total: int, chunk: int) -> None:
    position = 0
    chunks = cut_chunks(total, chunk)
    for offset, length in chunks:
        assert offset == position
        assert 0 < length <= chunk
        position += length
    assert position == total
    assert all(length == chunk for _, length in chunks[:-1])


def test_impossible_sizes_are_refused() -> None:
    for total, chunk in ((-1, 4), (4, 0), (4, -1)):
        assert "cannot cut" in refusal(ValueError, cut_chunks, total, chunk), (total, chunk)
