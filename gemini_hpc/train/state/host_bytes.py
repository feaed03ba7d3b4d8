"""The bytes of tensors in host memory, read without a trace.

`Tensor.numpy()` makes the tensor's storage unresizable for good, also when called on a view. The training's own
tensors are therefore read by their address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a row on the host: the tensor's own memory where it has that form."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


def copy_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of the tensor's elements."""
    line = _to_host(tensor)
    return ctypes.string_at(line.data_ptr(), line.nbytes) if line.nbytes else b""


def pass_bytes(tensor: torch.Tensor, to: Callable[[memoryview], object]) -> None:
    """Call `to` with the tensor's elements. `to` must not keep them."""
    line = _to_host(tensor)
    if line.nbytes:
        to(memoryview((ctypes.c_ubyte * line.nbytes).from_address(line.data_ptr())).cast("B").toreadonly())
