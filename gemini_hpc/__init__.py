"""Checkpoint replicas in peers' memory for training jobs on Slurm (gemini-hpc).

``import gemini_hpc`` is cheap: torch is imported only when `Checkpointer` (or another name of the training
front) is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gemini_hpc.client.ranks import set_ranks
    from gemini_hpc.train.checkpointer import Checkpointer
    from gemini_hpc.train.peek import peek
    from gemini_hpc.train.schedule.traffic import Traffic
    from gemini_hpc.train.state.loader import StatefulLoader
    from gemini_hpc.wire.stored import Tier

__all__ = ["Checkpointer", "StatefulLoader", "Tier", "Traffic", "__version__", "peek", "set_ranks"]

_LAZY = {
    "Checkpointer": "gemini_hpc.train.checkpointer",
    "StatefulLoader": "gemini_hpc.train.state.loader",
    "Tier": "gemini_hpc.wire.stored",
    "Traffic": "gemini_hpc.train.schedule.traffic",
    "peek": "gemini_hpc.train.peek",
    "set_ranks": "gemini_hpc.client.ranks",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gemini_hpc' has no attribute {name!r}")
