"""The division of a shard into chunks that are copied one at a time (GEMINI paper, section 5.2)."""

from __future__ import annotations


def cut_chunks(total_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, length) of each chunk, in order. Only the last chunk may be shorter.

    The list is empty if there is nothing to cut.

    Raises:
        ValueError: The total is negative, or a chunk is below one byte.
    """
    if total_bytes < 0:
        raise ValueError(f"cannot cut {total_bytes} bytes: a size is not negative")
    if chunk_bytes < 1:
        raise ValueError(f"cannot cut into chunks of {chunk_bytes} bytes: at least 1 is needed")
    return [(offset, min(chunk_bytes, total_bytes - offset)) for offset in range(0, total_bytes, chunk_bytes)]
