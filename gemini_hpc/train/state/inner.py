"""Tensors made of other tensors (`__tensor_flatten__`): quantized optimizer states, MX and float8 weights.

Such a tensor is captured by its inner tensors, down to plain ones, under `KEY.INNER`, and restored by a copy into
them. Where the training has not made the tensor yet (optimizer state, before the first step), it is made from a
recipe in the small state. The recipe has its class, which the script must have imported, and the class's own
description.

DTensors are no such tensors. A DTensor whose local part is such a tensor is captured by that part, as this rank's
own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from gemini_hpc.train.state import encode
from gemini_hpc.train.state.tensors import get_local

Recipe = dict[str, Any]
_DEEP = 8


def is_composed(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is made of other tensors and can name them."""
    kind = type(get_local(tensor))
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def list_parts(tensor: torch.Tensor, above: str = "", deep: int = _DEEP) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the innermost tensors that a tensor is made of, each with its path in it.

    A part that cannot name its own parts is yielded as it is.
    """
    local_tensor = get_local(tensor)
    for name in local_tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(local_tensor, name)
        if is_composed(inner) and deep:
            yield from list_parts(inner, f"{above}{name}.", deep - 1)
        else:
            yield f"{above}{name}", inner


class CompositeTensor(NamedTuple):
    """A tensor that is made of others, with those others.

    Attributes:
        whole: The tensor, or the DTensor around it.
        tensor: The tensor.
        names: Names of the inner tensors.
        about: The class's description of the tensor.
        inner: The inner tensors, by `names`.
    """

    whole: torch.Tensor
    tensor: torch.Tensor
    names: tuple[str, ...]
    about: Any
    inner: list[torch.Tensor]

    def is_current(self) -> bool:
        """Return whether the tensor is made of the same tensors, in the same way."""
        names, about = self.tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found = [getattr(self.tensor, name) for name in names]
        same = tuple(names) == self.names and all(map(is_, found, self.inner)) and about == self.about
        return same and get_local(self.whole) is self.tensor


def list_levels(tensor: torch.Tensor) -> Iterator[CompositeTensor]:
    """Yield the tensor, and those of its inner tensors that are made of others again."""
    local_tensor = get_local(tensor)
    names, about = local_tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = [getattr(local_tensor, name) for name in names]
    yield CompositeTensor(tensor, local_tensor, tuple(names), about, found)
    for value in found:
        if is_composed(value):
            yield from list_levels(value)


def read_recipes(small: Mapping[str, Any]) -> dict[tuple[int, str, str], Recipe]:
    """Return the recipes in a small state, by (optimizer or -1, parameter, name or "").

    Raises:
        ValueError: The recipes are damaged.
    """
    packed = small.get("made")
    found = encode.decode(packed) if packed else {}
    return found if isinstance(found, dict) else {}


def build_recipe(tensor: torch.Tensor) -> Recipe:
    """Return the recipe that makes a tensor of its parts.

    The recipe consists of values that `encode` takes, as far as the class of the tensor uses only such values.
    """
    local_tensor = get_local(tensor)
    names, about = local_tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(local_tensor, name) for name in names}
    return {
        "class": f"{type(local_tensor).__module__}:{type(local_tensor).__qualname__}",
        "about": about,
        "inner": {name: build_recipe(value) if is_composed(value) else None for name, value in inner.items()},
        "size": tuple(local_tensor.shape),
        "stride": tuple(local_tensor.stride()),
        "sharded": isinstance(tensor, DTensor),
    }


def list_paths(made: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the paths of the parts that a recipe needs."""
    for name, below in made["inner"].items():
        if below is None:
            yield f"{above}{name}"
        else:
            yield from list_paths(below, f"{above}{name}.")


def build_tensor(
    made: Mapping[str, Any], read_part: Callable[[str], torch.Tensor], owner: torch.Tensor
) -> torch.Tensor:
    """Make a tensor of its parts by a recipe.

    Args:
        made: The recipe.
        read_part: Returns the part at a path.
        owner: The parameter whose state the tensor is.

    Raises:
        ValueError: The class is unknown here or cannot rebuild the tensor.
    """
    found = _build_tensor(made, read_part, "")
    if made["sharded"] and isinstance(owner, DTensor):
        mesh, placements = owner.device_mesh, owner.placements
        found = DTensor.from_local(found, mesh, placements, run_check=False, shape=owner.shape, stride=owner.stride())
    return found


def _build_tensor(made: Mapping[str, Any], read_part: Callable[[str], torch.Tensor], above: str) -> torch.Tensor:
    kind = _find_class(made["class"])
    inner = {
        name: read_part(f"{above}{name}") if below is None else _build_tensor(below, read_part, f"{above}{name}.")
        for name, below in made["inner"].items()
    }
    try:
        found = kind.__tensor_unflatten__(inner, made["about"], torch.Size(made["size"]), tuple(made["stride"]))
    except Exception as error:  # raised by a foreign class
        raise ValueError(
            f"cannot rebuild a {made['class']} from its parts: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"a {made['class']} rebuilt from its parts is not a tensor")
    return found


def _find_class(name: str) -> Any:
    """Return a class of tensors that this process has imported.

    Nothing is imported because saved state names it.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise ValueError(f"the saved state has a {name}, which this script has not imported")
    return found
