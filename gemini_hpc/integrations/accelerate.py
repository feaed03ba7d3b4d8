"""Hugging Face's accelerate: a `Checkpointer` for what `accelerator.prepare` returns."""

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


def checkpointer(
    accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any = None, loader: Any = None, **options: Any
) -> Checkpointer:
    """A `Checkpointer` of the prepared objects, with the accelerator's gradient scaler.

    optimizer, scheduler: one or a list. loader: a `StatefulLoader`, not prepared; move its batches to
    `accelerator.device` yourself. options: further keyword arguments of `Checkpointer`, which has the errors.
    Call `step()` where `accelerator.sync_gradients` is true.
    """
    return Checkpointer(model, unwrapped(optimizer), unwrapped(scheduler), accelerator.scaler, loader, **options)


def unwrapped(item: Any) -> Any:
    """The optimizer or scheduler inside accelerate's wrapper; of a list, those inside."""
    if isinstance(item, Sequence):
        return [unwrapped(part) for part in item]
    if isinstance(item, AcceleratedOptimizer):
        return item.optimizer
    return item.scheduler if isinstance(item, AcceleratedScheduler) else item
