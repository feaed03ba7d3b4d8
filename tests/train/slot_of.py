"""Slots filled with tensors, as a capture fills them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpudigest import Placed
from gemini_hpc.format.slot_header import TENSOR_ALIGN_BYTES


def slot_of(start: int, tensors: Sequence[torch.Tensor]) -> tuple[list[Placed], torch.Tensor]:
    """Return the tensors' places from `start` on, and the slot's bytes. Before them there is something else."""
    placed, at = [], start
    for tensor in tensors:
        placed.append(Placed(at, tensor))
        at += -(-tensor.nbytes // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
    slot = torch.zeros(at, dtype=torch.uint8)
    slot[:start] = 7
    for place, tensor in placed:
        if tensor.numel():
            slot[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return placed, slot
