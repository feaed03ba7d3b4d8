"""Tensors as the state needs them: local parts, boxes, containers, bytes on the host, and names of element types.

`Tensor.numpy()` makes the tensor's storage unresizable for good, also when called on a view. The training's own
tensors are therefore read by their address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies in this process."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def select_box(tensor: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return a view of a box of the tensor."""
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def walk_leaves(value: Any, stop: tuple[type, ...] = ()) -> Iterator[Any]:
    """Yield what mappings, lists and tuples contain, at any depth.

    Args:
        value: The outermost container, or a leaf.
        stop: Containers of these types are leaves.
    """
    if isinstance(value, stop) or not isinstance(value, (Mapping, list, tuple)):
        yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        yield from walk_leaves(item, stop)


def is_folded(tensor: torch.Tensor) -> bool:
    """Return whether several elements share their memory (`expand`). Such a tensor cannot be written."""
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


# ---- bytes on the host ---------------------------------------------------------------------------------


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


# ---- element types -------------------------------------------------------------------------------------


def name_dtype(dtype: torch.dtype) -> str:
    """Return the type's name in a manifest: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> torch.dtype:
    """Return the type of a name, the inverse of `name_dtype`.

    Raises:
        ValueError: The name is unknown.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"manifest: unknown dtype {name[:40]!r}") from None
