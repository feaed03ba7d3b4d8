"""Cutting a shard into the chunks that are copied one at a time (GEMINI paper, section 5.2)."""

from __future__ import annotations


def cut(total_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each chunk, in order; only the last may be shorter. Nothing to cut: no chunk.

    Raises ValueError for a negative total or a chunk below one byte.
    """
    if total_bytes < 0:
        raise ValueError(f"cannot cut {total_bytes} bytes: a size is not negative")
    if chunk_bytes < 1:
        raise ValueError(f"cannot cut into chunks of {chunk_bytes} bytes: at least 1 is needed")
    return [(offset, min(chunk_bytes, total_bytes - offset)) for offset in range(0, total_bytes, chunk_bytes)]
