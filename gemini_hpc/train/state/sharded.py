"""DTensors in the state of an object that is no module, an EMA of sharded parameters for instance.

Each rank keeps its part. At the resume the part goes into a DTensor like the one that the object has now. Otherwise a
parameter of the same shape and placements serves as the model. So such state can only be loaded on as many ranks as
it was saved from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gemini_hpc.train.state.encode import DTensorPart
from gemini_hpc.train.state.tensors import walk_leaves


def replace_dtensors(state: Any) -> Any:
    """Return the state with parts in place of its DTensors, in mappings, lists and tuples.

    A state without DTensors is returned itself. DTensors elsewhere stay, and the encoder refuses them.
    """
    if isinstance(state, DTensor):
        return DTensorPart(state._local_tensor, tuple(state.shape), str(state.placements))
    if isinstance(state, Mapping):
        found = {key: replace_dtensors(value) for key, value in state.items()}
        return state if all(found[key] is value for key, value in state.items()) else found
    if type(state) in (list, tuple):
        items = [replace_dtensors(value) for value in state]
        return state if all(a is b for a, b in zip(items, state, strict=True)) else type(state)(items)
    return state


def has_parts(saved: Any) -> bool:
    """Return whether a decoded state has parts of DTensors."""
    return any(isinstance(leaf, DTensorPart) for leaf in walk_leaves(saved, (DTensorPart,)))


class Wholes:
    """A builder of DTensors from their parts."""

    def __init__(self, likes: Iterable[DTensor]) -> None:
        """Index the training's DTensors.

        Args:
            likes: DTensors of the training, whose mesh may serve for the restored ones.
        """
        self._likes: dict[tuple[tuple[int, ...], str], DTensor] = {}
        for like in likes:
            self._likes.setdefault((tuple(like.shape), str(like.placements)), like)

    def rebuild(self, saved: Any, now: Any, where: str) -> Any:
        """Return the saved state with DTensors in place of their parts.

        Args:
            saved: The saved state.
            now: The object's present state.
            where: Name of the state in error messages.

        Raises:
            ValueError: No DTensor here matches a part, or the matching one has a local part of another shape.
        """
        if isinstance(saved, DTensorPart):
            return self._rebuild_dtensor(saved, now, where)
        if isinstance(saved, Mapping):
            known = now if isinstance(now, Mapping) else {}
            return {key: self.rebuild(value, known.get(key), f"{where}[{key!r}]") for key, value in saved.items()}
        if type(saved) in (list, tuple):
            counterparts = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
            return type(saved)(
                self.rebuild(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(saved, counterparts, strict=True))
            )
        return saved

    def _rebuild_dtensor(self, saved: DTensorPart, now: Any, where: str) -> DTensor:
        like = now if isinstance(now, DTensor) else self._likes.get((saved.shape, saved.placements))
        if like is None:
            raise ValueError(f"{where} was a DTensor {saved.shape} {saved.placements}; nothing here matches it")
        if like._local_tensor.shape != saved.tensor.shape:
            saved_shape, own_shape = tuple(saved.tensor.shape), tuple(like._local_tensor.shape)
            raise ValueError(
                f"{where} had a part of {saved_shape} on this rank, has {own_shape} now: it can only be "
                "loaded on as many ranks as it was saved from"
            )
        assert isinstance(saved.tensor, torch.Tensor), "what was lifted out of it has been put back"
        made: DTensor = DTensor.from_local(
            saved.tensor.to(like._local_tensor.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return made
