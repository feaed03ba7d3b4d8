"""Copies that the device sends by itself, as the interval controller sees them; `train.nccl` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gemini_hpc.train.schedule.chunk_schedule import Route


class DeviceCopies(Protocol):
    """What rank-local copies over the devices' own links need to hear, and what they say. See `train.nccl.driver`."""

    ended: str

    @property
    def problem(self) -> str:
        """Why this rank enqueues nothing any more; '' if all is well."""

    def gate(self) -> None:
        """Before the first optimizer after step()."""

    def follow(self, route: Route | None, s: int, *, active: bool) -> None:
        """From the next saved version on: under `route` within s iterations; None: all of it before the optimizer."""

    def words(self) -> list[int]:
        """What this rank adds to a round of words."""

    def hear(self, words: Sequence[int]) -> None:
        """What came out of a round."""

    def left(self) -> bool:
        """True once, when all ranks have left these copies."""

    def fail(self, reason: str) -> None:
        """This rank leaves them. From any thread."""
