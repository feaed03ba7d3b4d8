"""torch's element types and their names in a manifest."""

from __future__ import annotations

import torch

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


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
