"""Optimizers that work inside other optimizers and have the state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def list_with_inner(given: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the given optimizers, each followed by those inside it that have state of their own.

    Examples are the `optim` of ZeroRedundancyOptimizer and the base of a wrapper such as SAM. Accelerate's wrapper
    shares the state of its inner optimizer.
    """
    found: list[torch.optim.Optimizer] = []

    def add_optimizer(optimizer: torch.optim.Optimizer) -> None:
        found.append(optimizer)
        for inner in _find_inner(optimizer):
            if not shares_state(inner, found):
                add_optimizer(inner)

    for optimizer in given:
        if not any(optimizer is known for known in found):
            add_optimizer(optimizer)
    return found


def shares_state(optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer]) -> bool:
    """Return whether the optimizer is one of the others, or has the state of one."""
    return any(optimizer is other or optimizer.state is other.state for other in others)


def _find_inner(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    for value in vars(optimizer).values():
        several: Iterable[Any] = [value]
        if isinstance(value, Mapping):
            several = value.values()
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            several = value
        yield from (item for item in several if isinstance(item, torch.optim.Optimizer))
