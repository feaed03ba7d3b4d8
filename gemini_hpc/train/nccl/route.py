"""What the ranks that copy over NCCL follow together."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.core import spans
from gemini_hpc.train.nccl import collective_schedule
from gemini_hpc.train.nccl.collective_schedule import Program, Terms
from gemini_hpc.train.schedule.chunk_schedule import Route


@dataclass(frozen=True)
class Joint(Route):
    """Of all ranks: `terms` and what follows from them are the same on each; the profile is this rank's."""

    terms: Terms

    @property
    def usable(self) -> tuple[spans.Window, ...]:
        """All of them: nobody has to notice that one has begun."""
        return self.windows

    def program(self, s: int) -> Program:
        """What all ranks enqueue."""
        return collective_schedule.program(self.terms, s)
