"""Route that the ranks that copy over NCCL follow together."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.core import spans
from gemini_hpc.train.nccl import collective_schedule
from gemini_hpc.train.nccl.collective_schedule import Program, Terms
from gemini_hpc.train.schedule.chunk_schedule import Route


@dataclass(frozen=True)
class Joint(Route):
    """A route with a program that all ranks share.

    `terms` and everything that follows from them are the same on all ranks. The profile is this rank's.
    """

    terms: Terms

    @property
    def usable(self) -> tuple[spans.Window, ...]:
        """Return all windows in full, because no sender has to notice that a window has begun."""
        return self.windows

    def build_program(self, s: int) -> Program:
        """Return the program that all ranks enqueue, for versions that may take s iterations."""
        return collective_schedule.build_program(self.terms, s)
