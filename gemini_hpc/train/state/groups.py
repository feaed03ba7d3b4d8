"""The parameters of each group of an optimizer, by name: without them no other program can load the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import msgspec
import torch


class ParameterGroup(msgspec.Struct, frozen=True, array_like=True):
    """A parameter group.

    Attributes:
        params: Names of the parameters in the model.
        param_names: Names that the optimizer was given, if any.
    """

    params: list[str]
    param_names: list[str] = []


_decoder = msgspec.msgpack.Decoder(list[ParameterGroup])


class Members:
    """The packed groups of an optimizer.

    The groups go with every version and hardly ever change. They are packed anew only where a group has other
    parameters than at the last call.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[list[Any]] = []
        self._packed = b""

    def pack(self, names: Mapping[int, str]) -> bytes:
        """Return the packed groups.

        Args:
            names: Names of parameters, by `id`. Other parameters are left out.
        """
        groups = self._optimizer.param_groups
        if not self._packed or not _are_same([group["params"] for group in groups], self._known):
            self._known = [list(group["params"]) for group in groups]
            found = [
                ParameterGroup([names[id(p)] for p in g["params"] if id(p) in names], [*g.get("param_names", ())])
                for g in groups
            ]
            self._packed = msgspec.msgpack.encode(found)
        return self._packed


def _are_same(groups: Sequence[Sequence[Any]], known: Sequence[Sequence[Any]]) -> bool:
    return len(groups) == len(known) and all(
        len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(groups, known, strict=True)
    )


def unpack(data: bytes) -> list[ParameterGroup]:
    """Unpack the result of `Members.pack`.

    Raises:
        ValueError: The data is damaged.
    """
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"groups of parameters: {error}") from None
