"""The one Slurm client: nothing else in this package asks Slurm or changes anything in it."""

from gemini_hpc.slurm.client import Slurm, find_tool
from gemini_hpc.slurm.errors import SlurmError, SlurmUnreachable, UnknownJob

__all__ = ["Slurm", "SlurmError", "SlurmUnreachable", "UnknownJob", "find_tool"]
