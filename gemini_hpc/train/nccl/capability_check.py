"""Checks for trainings and machines on which copies over NCCL would hang or fail, run before anything is enqueued."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gemini_hpc.train.nccl.library import Library, NcclUnavailable

_PAIRED = ("send", "recv_", "recv_any_source_")


def check_environment(environ: Mapping[str, str] | None = None) -> str:
    """Return the reason why this process's environment forbids NCCL copies; '' if there is none."""
    given = os.environ if environ is None else environ
    if given.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue: a copy that waits for another rank would "
            "hold up the training's kernels"
        )
    if given.get("CUDA_LAUNCH_BLOCKING", "").strip() not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING is set: nothing can be enqueued without waiting for it"
    return ""


def load_library(paths: list[str] | None = None) -> tuple[Library | None, str]:
    """Return NCCL, or the reason why it is unavailable."""
    try:
        return Library(paths), ""
    except (NcclUnavailable, OSError) as error:
        return None, str(error)


def check_operations(names: Sequence[str], *, captured: bool = False) -> str:
    """Return the reason why a training that launches these operations is unsuitable; '' if there is none.

    A send that precedes our operation on one rank may be a receive that follows our operation on another.

    Args:
        names: Names of the operations in torch's dispatcher.
        captured: Whether a CUDA graph has collectives.
    """
    if captured:
        return "collectives are replayed from a CUDA graph: nothing can be enqueued between them"
    paired = sorted({name for name in names if name in _PAIRED})
    if paired:
        return f"the training itself sends point to point ({', '.join(paired)}): replica copies would come in between"
    return ""
