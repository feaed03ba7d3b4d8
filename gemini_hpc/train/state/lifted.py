"""Large tensors within the small state: a buffer, an average of weights that is no module, an optimizer's history.

Each such tensor is lifted out of the small state and captured as a parameter is. It has a place of its own in the
slot and need not be copied inside `step()`. The small state keeps a reference at its place. A tensor that appears
after the first `step()` stays in the small state until the ranks plan anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gemini_hpc.format.dtypes import get_item_bytes
from gemini_hpc.train.state.encode import MAX_DEPTH, DTensorPart, Lifted
from gemini_hpc.train.state.sample import sample_elements
from gemini_hpc.train.state.source import TensorSource
from gemini_hpc.train.state.tensors import find_dtype, is_folded, name_dtype, walk_leaves

LEAST_BYTES = 64 << 10
BUFFERS = "buffers"
_EARLY = ("extra_state", "comm_hooks")  # changed by forward and backward passes, as buffers are
_LIFTED_FROM = (BUFFERS, "stateful", "odd", "loose", *_EARLY)


def is_early(name: str) -> bool:
    """Return whether the tensor of this name, no buffer, changes before the optimizer steps."""
    return name.partition(".")[0] in _EARLY


def format_name(path: Sequence[Any]) -> str:
    """Return the name of the tensor at a path. A buffer has its own name."""
    return ".".join(map(str, path[1:] if path[0] == BUFFERS else path))


class Lift:
    """A walk through a small state that lifts large tensors out of it."""

    def __init__(self, wants: Callable[[str, torch.Tensor], bool]) -> None:
        """Create a walk.

        Args:
            wants: Returns whether the tensor (name, tensor) has a place in the slot.
        """
        self._wants = wants
        self.found: dict[str, torch.Tensor] = {}
        self.left: dict[str, torch.Tensor] = {}  # as large, but without a place

    def lift_tensors(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Return the small state without the lifted tensors."""
        return {name: self._walk(value, (name,)) if name in _LIFTED_FROM else value for name, value in small.items()}

    def _walk(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:  # the encoder reports it
            return value
        if isinstance(value, torch.Tensor):
            return self._lift_tensor(value, path) if value.numel() * value.element_size() >= LEAST_BYTES else value
        if kind is DTensorPart:
            tensor = self._walk(value.tensor, path)
            return value if tensor is value.tensor else DTensorPart(tensor, value.shape, value.placements)
        if kind in (dict, OrderedDict):
            pairs = [(key, self._walk(item, (*path, *_as_path(key)))) for key, item in value.items()]
            if all(a is b for (_, a), b in zip(pairs, value.values(), strict=True)):
                return value
            return kind(pairs)
        if kind in (list, tuple):
            items = [self._walk(item, (*path, i)) for i, item in enumerate(value)]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
        return value

    def _lift_tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        name = format_name(path)
        if not _is_liftable(value) or name in self.found or name in self.left:
            return value
        if not self._wants(name, value):
            self.left[name] = value
            return value
        self.found[name] = value.detach()
        return Lifted(name, name_dtype(value.dtype), tuple(value.shape), value.is_cuda)


def _as_path(key: Any) -> tuple[Any, ...]:
    return key if type(key) is tuple else (key,)


def _is_liftable(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    if is_folded(tensor):
        return False  # small, however large it looks
    try:
        return get_item_bytes(name_dtype(tensor.dtype)) == tensor.element_size()
    except ValueError:
        return False


def put_back(saved: Any, loaded: Mapping[str, torch.Tensor]) -> Any:
    """Return a decoded small state with the lifted tensors put back."""
    if isinstance(saved, Lifted):
        return loaded[saved.key]
    if type(saved) is DTensorPart:
        return DTensorPart(put_back(saved.tensor, loaded), saved.shape, saved.placements)
    if type(saved) in (dict, OrderedDict):
        for key, value in saved.items():
            saved[key] = put_back(value, loaded)
        return saved
    if type(saved) in (list, tuple):
        return type(saved)(put_back(value, loaded) for value in saved)
    return saved


def list_lifted(saved: Any) -> Iterable[Lifted]:
    """Yield the references to lifted tensors in a decoded small state."""
    return (leaf for leaf in walk_leaves(saved, (Lifted,)) if isinstance(leaf, Lifted))


def allocate_tensor(lifted: Lifted) -> torch.Tensor:
    """Return memory for a lifted tensor, on a device if it was on a device and there is one.

    Raises:
        ValueError: The element type is unknown.
    """
    device = "cuda" if lifted.cuda and torch.cuda.is_available() else "cpu"
    return torch.empty(lifted.shape, dtype=find_dtype(lifted.dtype), device=device)


# ---- version by version --------------------------------------------------------------------------------


class LiftedTensor(NamedTuple):
    """A tensor that is copied behind the training's back, as it was at step()."""

    source: TensorSource
    base: torch.Tensor
    ptr: int
    changes: int
    samples: list[torch.Tensor]

    def has_moved(self) -> bool:
        """Return whether the tensor was written since step() or has other memory."""
        return self.base._version != self.changes or self.base.data_ptr() != self.ptr

    def is_torn(self, targets: Sequence[torch.Tensor]) -> bool:
        """Return whether the copies in `targets` differ from the samples taken at step()."""
        first, flats = self.source.first_piece, self.source.flats
        return any(
            not torch.equal(sample_elements(targets[first + i], flat=flat), sample)
            for i, (flat, sample) in enumerate(zip(flats, self.samples, strict=True))
        )


class LiftedSources:
    """The lifted tensors of a plan, and the sources of those of which this rank keeps pieces.

    Buffers change in the forward pass and are copied at step(). The others mostly change right before step().
    """

    def __init__(
        self, planned: Mapping[str, torch.Tensor], sources: Sequence[TensorSource], shared: frozenset[str]
    ) -> None:
        """Create the sources.

        Args:
            planned: All lifted tensors, by name.
            sources: The sources of which this rank keeps pieces.
            shared: Names of the tensors to which other ranks' small states refer.
        """
        self._planned = {name: (tensor.shape, tensor.dtype) for name, tensor in planned.items()}
        self.sources, self._shared = sources, shared

    def has_place(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of this name, shape and type has a place."""
        return self._planned.get(name) == (tensor.shape, tensor.dtype)

    def find_missing(self, found: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of planned tensors that are gone or have another shape."""
        return self._planned.keys() - found.keys()

    def bind(self, found: Mapping[str, torch.Tensor]) -> list[str]:
        """Bind the sources to the tensors of this step().

        A tensor that is gone keeps its old copy, to which nothing refers.

        Returns:
            The names of missing tensors to which another rank may refer. A version without them cannot be right.
        """
        gone = []
        for source in self.sources:
            tensor = found.get(source.key)
            if tensor is None:
                if source.key in self._shared:
                    gone.append(source.key)
                elif source.base is None:
                    source.bind(torch.zeros(source.shape, dtype=source.dtype, device="cpu"))
                    source.whole = source.base
            elif not source.is_at(tensor):
                source.bind(tensor)
                source.whole = tensor
        return gone

    def prepare_version(self, version: int) -> tuple[list[list[torch.Tensor]], list[LiftedTensor]]:
        """Return the tensors to copy, by source, and the records to check after the copy."""
        seen = []
        for source in self.sources:
            assert source.base is not None
            if source.eager:
                source.copy_to_staging(version, compare=True)
            else:
                source.since = version
                base = source.base
                samples = [line.clone() for line in source.fews]
                seen.append(LiftedTensor(source, base, source.ptr, base._version, samples))
        return [source.staging if source.eager else source.views for source in self.sources], seen
