"""Frontend for MPI programs without torch: `Checkpointer` over mpi4py and NumPy."""

from __future__ import annotations

from gemini_hpc.mpi.arrays import Part
from gemini_hpc.mpi.checkpointer import Checkpointer

__all__ = ["Checkpointer", "Part"]
