"""Element types: what the agents and the files know of them is what torch says."""

from __future__ import annotations

import torch

from gemini_hpc.format.dtypes import ITEM_BYTES
from gemini_hpc.train.state.tensors import find_dtype, name_dtype


def test_every_dense_dtype_of_torch_is_known_with_its_size() -> None:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dense = {name_dtype(dtype): dtype.itemsize for dtype in found if not name_dtype(dtype).startswith(("q", "quint"))}
    assert dense.items() <= ITEM_BYTES.items(), dense.items() - ITEM_BYTES.items()
    assert all(name_dtype(find_dtype(name)) == name for name in dense)
