"""Lightning Fabric: a `Checkpointer` for the objects that `fabric.setup` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gemini_hpc.train.checkpointer import Checkpointer

try:
    from lightning.fabric import is_wrapped
except ImportError as error:
    raise ImportError("gemini_hpc.integrations.fabric needs lightning: pip install lightning") from error


def build_checkpointer(
    fabric: Any, model: nn.Module, optimizer: Any, scheduler: Any = None, loader: Any = None, **options: Any
) -> Checkpointer:
    """Return a `Checkpointer` of the objects that Fabric has set up, with the gradient scaler of its precision.

    Names are those of your own model, without Fabric's wrapper. `Checkpointer` documents the errors.

    Args:
        fabric: The Fabric object.
        model: Model that Fabric has set up.
        optimizer: One optimizer or a list.
        scheduler: One scheduler or a list.
        loader: A `StatefulLoader` that is not set up; move its batches with `fabric.to_device`.
        **options: Further keyword arguments of `Checkpointer`.
    """
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    inner: Any = model.module if is_wrapped(model) else model
    return Checkpointer(inner, _unwrap_optimizer(optimizer), scheduler, scaler, loader, **options)


def _unwrap_optimizer(optimizer: Any) -> Any:
    if isinstance(optimizer, Sequence):
        return [_unwrap_optimizer(item) for item in optimizer]
    return optimizer.optimizer if is_wrapped(optimizer) else optimizer
