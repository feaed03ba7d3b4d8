"""Sparse parameters that are not trained: captured by the dense tensors they are made of, under `KEY.values`.

A trained sparse parameter gets other indices with each step, in other numbers than planned. Such a parameter is not
captured.
"""

from __future__ import annotations

import torch

from gemini_hpc.train.state.inner import Recipe

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class Sparse:
    """A sparse parameter that is not trained, as found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.tensors = _list_parts(tensor)  # by path below the parameter
        self._recipe = _build_recipe(tensor)

    def is_current(self) -> bool:
        """Return whether the parameter is made of the same memory and is not trained."""
        if self._tensor.requires_grad or _build_recipe(self._tensor) != self._recipe:
            return False
        now = _list_parts(self._tensor)
        return all(_locate(now[name]) == _locate(found) for name, found in self.tensors.items())

    def build_recipe(self) -> Recipe:
        """Return the values that have to be the same at the resume."""
        return self._recipe


def _list_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    detached = tensor.detach()
    if detached.layout == torch.sparse_coo:  # the public methods require a coalesced tensor, a new object
        return {"indices": detached._indices(), "values": detached._values()}
    return {name: getattr(detached, name)() for name in (*_COMPRESSED[detached.layout], "values")}


def _locate(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _build_recipe(tensor: torch.Tensor) -> Recipe:
    about = {"shape": tuple(tensor.shape), "coalesced": tensor.layout != torch.sparse_coo or tensor.is_coalesced()}
    inner = dict.fromkeys(("values",))
    return {"class": str(tensor.layout), "about": about, "inner": inner, "sharded": False}


def find_sparse(tensor: torch.Tensor) -> Sparse | None:
    """Return the parts of a sparse parameter that is not trained; None for any other tensor."""
    known = tensor.layout == torch.sparse_coo or tensor.layout in _COMPRESSED
    return Sparse(tensor) if known and not tensor.requires_grad and not tensor.is_meta else None
