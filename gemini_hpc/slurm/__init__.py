"""The only Slurm client: all of this package's reads and changes of Slurm go through it."""

from gemini_hpc.slurm.client import Slurm, find_tool
from gemini_hpc.slurm.errors import SlurmError, SlurmRefused, SlurmUnreachable, UnknownJob

__all__ = ["Slurm", "SlurmError", "SlurmRefused", "SlurmUnreachable", "UnknownJob", "find_tool"]
