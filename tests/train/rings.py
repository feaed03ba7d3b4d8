"""Links of trainings whose ranks keep the copies of the ranks before them."""

from __future__ import annotations

from collections.abc import Sequence

from gemini_hpc.train.nccl.exchange import Links


def build_ring(world: int, m: int, sizes: Sequence[int]) -> Links:
    """Return links where each rank's holders are the m - 1 ranks after it."""
    return Links(tuple(tuple((r + q + 1) % world for q in range(m - 1)) for r in range(world)), tuple(sizes))
