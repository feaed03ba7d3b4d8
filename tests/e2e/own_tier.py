"""train_gpt.py with a tier, which the program names itself: `python own_tier.py TIER ARGUMENTS ...`."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

import gemini_hpc

if __name__ == "__main__":
    tier = sys.argv.pop(1)
    gemini_hpc.Checkpointer = functools.partial(gemini_hpc.Checkpointer, tier=tier)  # type: ignore[misc]
    runpy.run_path(str(Path(__file__).with_name("train_gpt.py")), run_name="__main__")
