"""State of a parameter beside its own memory, or in its place.

The `quant_state` of bitsandbytes' 4-bit weights is such state. Its scales and codes are captured beside the packed
values, under `KEY.quant_state.absmax`. Plain values (block size, type) go with the small state and have to be the
same at the resume. The state is found by its shape, not by its class. It is an attribute of the parameter, or of its
module where FSDP2 has put a parameter of its own into the place.

A sparse parameter that is not trained is captured by the dense tensors it is made of, under `KEY.values`. A trained
one gets other indices with each step, in other numbers than planned. Such a parameter is not captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from gemini_hpc.train.state import encode
from gemini_hpc.train.state.inner import Recipe
from gemini_hpc.train.state.modules import UnsupportedStateError

_NAME = "quant_state"
_DEEP = 4
_MODULES = "weight"  # a module's quant_state belongs to its parameter of this name
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class Hidden:
    """The `quant_state` of a parameter as it was found; there may be none yet."""

    def __init__(self, fqn: str, holders: tuple[Mapping[str, Any], ...]) -> None:
        """Find the state and its tensors.

        Args:
            fqn: Name of the parameter.
            holders: Attributes of the parameter and of its module.

        Raises:
            UnsupportedStateError: The state has a value that cannot be captured.
        """
        self._holders = holders
        self._state = _find_state(holders)
        self._seen: list[tuple[Mapping[str, Any], list[Any]]] = []
        self.tensors: dict[str, torch.Tensor] = {}  # by their paths below the parameter
        self._about: dict[str, Any] = {}
        if self._state is None:
            return
        try:
            self._walk(self._state, _NAME, _DEEP)
            encode.encode(self._about)
        except encode.UnknownTypeError as error:
            raise UnsupportedStateError(f"what {fqn} has in its {_NAME} cannot be captured: {error}") from None

    def _walk(self, state: Any, above: str, deep: int) -> None:
        values = getattr(state, "__dict__", None)
        if values is None or not deep:
            raise encode.UnknownTypeError(f"{above} is a {_name_class(state)}")
        self._seen.append((values, list(values.values())))
        for name, value in values.items():
            path = f"{above}.{name}"
            if isinstance(value, torch.Tensor):
                self.tensors[path] = value
            elif type(value) is type(state):
                self._walk(value, path, deep - 1)
            else:
                self._about[path] = value

    def is_current(self) -> bool:
        """Return whether the state is the same object, with the same tensors and values."""
        return _find_state(self._holders) is self._state and all(
            len(values) == len(seen) and all(map(is_, values.values(), seen)) for values, seen in self._seen
        )

    def build_recipe(self) -> Recipe | None:
        """Return the values that have to be the same at the resume; None without a state."""
        if self._state is None:
            return None
        inner = dict.fromkeys(self.tensors)
        return {"class": _name_class(self._state), "about": self._about, "inner": inner, "sharded": False}


def _name_class(state: Any) -> str:
    return f"{type(state).__module__}:{type(state).__qualname__}"


def _find_state(holders: tuple[Mapping[str, Any], ...]) -> Any:
    return next((found for holder in holders if (found := holder.get(_NAME)) is not None), None)


def _find_holders(parameter: torch.Tensor, module: nn.Module | None, key: str) -> Iterator[Mapping[str, Any]]:
    own = vars(parameter)
    if _NAME in own and type(parameter) is not nn.Parameter:
        yield own
    if module is not None and key == _MODULES and _NAME in vars(module):
        found = vars(module)[_NAME]
        if found is None or isinstance(getattr(found, "absmax", None), torch.Tensor):
            yield vars(module)


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


def find_beside(fqn: str, parameter: torch.Tensor, module: nn.Module | None, key: str) -> Hidden | Sparse | None:
    """Return the state of a parameter beside its own memory, or in its place; None where there can be none.

    Args:
        fqn: Name of the parameter.
        parameter: The parameter.
        module: The module that has the parameter.
        key: Name of the parameter in the module.

    Raises:
        UnsupportedStateError: The state has a value that cannot be captured.
    """
    layout = parameter.layout
    if (layout == torch.sparse_coo or layout in _COMPRESSED) and not (parameter.requires_grad or parameter.is_meta):
        return Sparse(parameter)
    holders = tuple(_find_holders(parameter, module, key))
    return Hidden(fqn, holders) if holders else None
