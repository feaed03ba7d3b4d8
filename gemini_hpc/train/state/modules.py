"""The parameters and buffers of a model's modules, under stable names, and detection of replaced ones.

Semi-private parts of torch that this needs (a module's dicts, names of wrappers' children) are used here only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gemini_hpc.train.state import extra_state

# wrappers whose only child has no name of its own in the user's model
_TRANSPARENT = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
UNNAMED = frozenset(_TRANSPARENT.values())


class UnsupportedStateError(TypeError):
    """The training has state that cannot be captured; the message names it and the remedy."""


class TensorPlace(NamedTuple):
    """The place where a module keeps a tensor.

    After an assignment the place has another tensor.

    Attributes:
        fqn: Name of the tensor.
        holder: The module's dict that has the tensor.
        key: Key in the dict.
        replicated: The module belongs to a DDP module.
        module: The module.
    """

    fqn: str
    holder: Mapping[str, Any]
    key: str
    replicated: bool
    module: nn.Module

    @property
    def tensor(self) -> torch.Tensor | None:
        """Return the tensor in this place now."""
        try:  # a script module's dict has no get()
            found: torch.Tensor | None = self.holder[self.key]
        except KeyError:
            return None
        return found


def _walk_modules(m: nn.Module, prefix: str, replicated: bool) -> Iterator[tuple[nn.Module, str, bool]]:
    """Yield each module with the prefix of its names, and whether DDP keeps it equal."""
    if type(m).__name__ == "FullyShardedDataParallel":
        raise UnsupportedStateError(
            f"{prefix or 'the model'} is a FullyShardedDataParallel (FSDP1), whose flat parameters have no "
            "stable names: shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    yield m, prefix, replicated
    # fully_shard() derives a new class from a wrapper's
    unnamed = {_TRANSPARENT.get(kind.__name__) for kind in type(m).__mro__}
    for key, child in m._modules.items():
        if child is not None:
            inner = prefix if key in unnamed else f"{prefix}{key}."
            yield from _walk_modules(child, inner, replicated or isinstance(m, DistributedDataParallel))


def _find_ignored(root: nn.Module, prefix: str) -> set[str]:
    """Return the names that DDP is set to ignore."""
    return {
        f"{where}{name}"
        for m, where, _ in _walk_modules(root, prefix, False)
        if isinstance(m, DistributedDataParallel)
        for name in m.parameters_to_ignore
    }


class Modules:
    """The parameters, buffers and extra state of a training's modules, as found last."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        """Find everything in the modules.

        Args:
            roots: Modules by the prefix of their names.

        Raises:
            UnsupportedStateError: A module cannot be captured.
        """
        self.roots = dict(roots)
        self.reshard()
        self.parameters: list[TensorPlace] = []
        self.buffers: list[TensorPlace] = []
        self.transient: set[str] = set()  # names of buffers that `Module.state_dict` leaves out
        self.with_extra: dict[str, nn.Module] = {}  # modules with extra state, by its names
        self._modules: dict[str, nn.Module] = {}
        self._dicts: list[Mapping[str, Any]] = []
        self._fixed: list[Mapping[str, Any]] = []
        self._sizes: list[int] = []
        self._values: list[Any] = []
        self.find()

    def reshard(self) -> None:
        """Free the parameters that FSDP2 has gathered for a forward pass and would reuse in the next.

        Loaded values go into the sharded parameters.
        """
        for root in self.roots.values():
            for m in root.modules():
                if isinstance(m, FSDPModule):
                    m.reshard()

    def find(self) -> None:
        """Find everything anew.

        Raises:
            UnsupportedStateError: A module cannot be captured.
        """
        self.parameters, self.buffers, self.transient, self._modules = [], [], set(), {}
        self.with_extra = {}
        fixed: list[Mapping[str, Any]] = []
        dicts: list[Mapping[str, Any]] = []
        for prefix, root in self.roots.items():
            ignored = _find_ignored(root, prefix)
            for m, where, replicated in _walk_modules(root, prefix, False):
                self._modules.setdefault(where, m)
                if extra_state.is_given_by(m):
                    self.with_extra[where + extra_state.KEY] = m
                parameters, buffers = m._parameters, m._buffers
                for key in parameters.keys():  # noqa: SIM118 (a script module's dict cannot be iterated)
                    fqn = where + key
                    self.parameters.append(TensorPlace(fqn, parameters, key, replicated and fqn not in ignored, m))
                for key in buffers.keys():  # noqa: SIM118
                    self.buffers.append(TensorPlace(where + key, buffers, key, replicated, m))
                self.transient |= {where + key for key in m._non_persistent_buffers_set if key in buffers}
                fixed += [parameters, m._modules]
                dicts.append(buffers)
        self._fixed, self._dicts = fixed, fixed + dicts
        self._sizes = list(map(len, self._dicts))
        self._values = [value for held in fixed for value in held.values()]

    def is_current(self) -> bool:
        """Return whether the modules have the same parameters, and buffers under the same names.

        A buffer is read from its place each time, so it may be replaced at any time.
        """
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(is_, chain.from_iterable(held.values() for held in self._fixed), self._values))
            and all(slot.key in slot.holder for slot in self.buffers)
        )

    def put_buffer(self, fqn: str, value: torch.Tensor | None, *, persistent: bool) -> bool:
        """Set the buffer of that name. Return False if no module can take it."""
        where, dot, key = fqn.rpartition(".")
        module = self._modules.get(where + dot)
        if module is None or (hasattr(module, key) and key not in module._buffers):
            return False
        if key in module._buffers:
            module._buffers[key] = value
        else:
            module.register_buffer(key, value, persistent=persistent)
        return True


def are_same(found: Sequence[torch.Tensor | None], known: Sequence[torch.Tensor]) -> bool:
    """Return whether these are the same tensor objects."""
    return len(found) == len(known) and all(map(is_, found, known))


def is_gathered(tensor: torch.Tensor, known: torch.Tensor | None) -> bool:
    """Return whether FSDP2 has put the tensor in place of a sharded parameter for a forward pass."""
    if tensor is known or not isinstance(known, DTensor) or tensor.shape != known.shape:
        return False
    if not isinstance(tensor, DTensor):
        return True
    return tensor.placements != known.placements or tensor.device_mesh != known.device_mesh
