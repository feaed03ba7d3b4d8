"""Hugging Face's accelerate: a `Checkpointer` for the objects that `accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gemini_hpc.train.checkpointer import Checkpointer

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as error:
    raise ImportError("gemini_hpc.integrations.accelerate needs accelerate: pip install accelerate") from error


def build_checkpointer(
    accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any = None, loader: Any = None, **options: Any
) -> Checkpointer:
    """Return a `Checkpointer` of the prepared objects, with the accelerator's gradient scaler.

    Call `step()` when `accelerator.sync_gradients` is true. `Checkpointer` documents the errors.

    Args:
        accelerator: The Accelerator object.
        model: Prepared model.
        optimizer: One optimizer or a list.
        scheduler: One scheduler or a list.
        loader: A `StatefulLoader` that is not prepared; move its batches to `accelerator.device` yourself.
        **options: Further keyword arguments of `Checkpointer`.
    """
    return Checkpointer(
        model, unwrap_prepared(optimizer), unwrap_prepared(scheduler), accelerator.scaler, loader, **options
    )


def unwrap_prepared(item: Any) -> Any:
    """Return the optimizer or scheduler inside accelerate's wrapper; for a list, a list of those inside."""
    if isinstance(item, Sequence):
        return [unwrap_prepared(part) for part in item]
    if isinstance(item, AcceleratedOptimizer):
        return item.optimizer
    return item.scheduler if isinstance(item, AcceleratedScheduler) else item
