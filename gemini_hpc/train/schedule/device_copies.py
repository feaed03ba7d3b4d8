"""Interface of copies that the device sends by itself, for the interval controller; `train.nccl` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gemini_hpc.train.schedule.chunk_schedule import Route


class DeviceCopies(Protocol):
    """The interface of one rank's copies over the devices' own links. See `train.nccl.driver`."""

    ended: str

    @property
    def problem(self) -> str:
        """Return the reason why this rank enqueues nothing any more; '' if there is none."""

    def prepare_for_gate(self) -> None:
        """Prepare for the first optimizer step after step()."""

    def set_route(self, route: Route | None, s: int, *, active: bool) -> None:
        """Follow `route` within s iterations from the next saved version on; None: send all before the optimizer."""

    def list_words(self) -> list[int]:
        """Return the numbers that this rank adds to a round."""

    def on_round(self, words: Sequence[int]) -> None:
        """Process the result of a round."""

    def has_just_left(self) -> bool:
        """Return True once, when all ranks have abandoned these copies."""

    def fail(self, reason: str) -> None:
        """Abandon these copies on this rank. Thread-safe."""
