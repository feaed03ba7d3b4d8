"""Notices optimizers whose hook does not fire: replayed from a CUDA graph, they change parameters unseen.

Neither the hook nor a tensor's `_version` says that a replay has changed it. So at a step() with no hook since the
last one, a sample of the parameters is compared with the one before: the first such version is copied at once, on
suspicion; from the second on it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

_TENSORS = 8
_NUMBERS = 64


class Finding(Enum):
    """What a step() without a hook means."""

    HOOKED = "an optimizer's hook has fired"
    SUSPECT = "no hook has fired, nothing to compare with yet"
    STILL = "no hook has fired, and nothing has changed"
    REPLAYED = "no hook has fired, but parameters have changed"


class Unhooked:
    """Of one training; `parameters()` gives its tensors as they are now."""

    def __init__(self) -> None:
        self._before: list[torch.Tensor] | None = None
        self.replayed = False

    def step(self, hooked: bool, parameters: Sequence[torch.Tensor]) -> Finding:
        """At each step(). For SUSPECT and REPLAYED the version must be copied before step() returns: the next change
        comes without a word. Reads a few hundred numbers from the device, only where no hook has fired."""
        if hooked:
            self._before = None
            return Finding.HOOKED
        now = _sample(parameters)
        before, self._before = self._before, now
        if before is None:
            return Finding.REPLAYED if self.replayed else Finding.SUSPECT
        if _same(before, now):
            return Finding.STILL
        self.replayed = True
        return Finding.REPLAYED


def _sample(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A few numbers of a few tensors, as bytes; spread over all of them."""
    stride = max(1, len(parameters) // _TENSORS)
    taken = []
    for tensor in parameters[::stride]:
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            taken.append(flat[:: max(1, flat.numel() // _NUMBERS)].clone().cpu().view(torch.uint8))
    return taken


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
