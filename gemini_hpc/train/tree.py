"""The training state as a tree: stable names for parameters and optimizer tensors, and the small state beside them.

Semi-private parts of torch that this needs (`_local_tensor`, wrappers' child names) are used here only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gemini_hpc.core.directory import Row
from gemini_hpc.train import encode, rng
from gemini_hpc.train.buckets import ArrivalOrder
from gemini_hpc.train.dtypes import dtype_name
from gemini_hpc.train.groups import Members
from gemini_hpc.train.ownership import Entry

# wrappers whose only child carries no name of its own in the user's model
_TRANSPARENT = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
_PRINT_SAMPLES = 4096


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state goes out and comes back as plain values."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state back."""


class Param(NamedTuple):
    """A parameter (or buffer) under its name; `replicated`: it belongs to a DDP module."""

    fqn: str
    tensor: torch.Tensor
    replicated: bool


class Leaf(NamedTuple):
    """A tensor of the training state, found now. `tensor` may be a DTensor; optimizer -1: a parameter."""

    key: str
    tensor: torch.Tensor
    owner: Param
    optimizer: int
    name: str


class UnsupportedStateError(TypeError):
    """The training has state that cannot be captured; the message names it and what to do."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this process."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def _named(module: nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
    def walk(m: nn.Module, prefix: str, replicated: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
        name = type(m).__name__
        if name == "FullyShardedDataParallel":
            raise UnsupportedStateError(
                f"{prefix or 'the model'} is a FullyShardedDataParallel (FSDP1), whose flat parameters have no "
                "stable names: shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        ddp = isinstance(m, DistributedDataParallel)
        ignored: set[str] = set(m.parameters_to_ignore) if isinstance(m, DistributedDataParallel) else set()
        direct: Mapping[str, torch.Tensor | None] = m._parameters if kind == "parameters" else m._buffers
        if kind == "transient":
            direct = {key: m._buffers.get(key) for key in m._non_persistent_buffers_set}
        for key, tensor in direct.items():
            if tensor is not None:
                yield prefix + key, tensor, replicated
        for key, child in m._modules.items():
            if child is None:
                continue
            inner = prefix if _TRANSPARENT.get(name) == key else f"{prefix}{key}."
            for fqn, tensor, under in walk(child, inner, replicated or ddp):
                yield fqn, tensor, under and not (ddp and fqn.removeprefix(inner) in ignored)

    yield from walk(module, "", False)


def find_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    """DDP modules in the model; or the one around it, where the bare module was given."""
    inside = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if inside:
        return inside
    return [o for o in gc.get_objects() if type(o) is DistributedDataParallel and o.module is model][:1]


class _OptimizerState:
    """The tensors of an optimizer, as they were found last."""

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, owners: Mapping[int, Param]) -> None:
        self.leaves: list[Leaf] = []
        self._optimizer = optimizer
        self._odd: list[tuple[tuple[int, str, str], dict[str, Any], str]] = []
        self._known: list[tuple[Any, dict[str, Any] | None, tuple[str, ...], list[Any]]] = []
        for parameter, values in optimizer.state.items():
            owner = owners.get(id(parameter))
            if owner is None:  # of no parameter of ours, and of any kind
                self._known.append((parameter, None, (), []))
                continue
            kept = [value if isinstance(value, torch.Tensor) else None for value in values.values()]
            self._known.append((parameter, values, tuple(values), kept))
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    self.leaves.append(Leaf(f"optimizer.{number}.{owner.fqn}.{name}", value, owner, number, name))
                else:
                    self._odd.append(((number, owner.fqn, name), values, name))

    def holds(self) -> bool:
        """Whether it has the same tensors under the same names."""
        state = self._optimizer.state
        if len(state) != len(self._known):
            return False
        for (parameter, values), (known, known_values, names, kept) in zip(state.items(), self._known, strict=True):
            if parameter is not known:
                return False
            if known_values is None:
                continue
            if values is not known_values or tuple(values) != names:
                return False
            if not all(map(is_, values.values(), kept)) and not all(map(_alike, values.values(), kept)):
                return False
        return True

    def odd(self) -> dict[tuple[int, str, str], Any]:
        """What is no tensor, as it is now."""
        return {key: values[name] for key, values, name in self._odd}


def _alike(value: Any, kept: torch.Tensor | None) -> bool:
    return value is kept or (kept is None and not isinstance(value, torch.Tensor))


class StateTree:
    """Names and finds everything that a training has to get back.

    Parameters are found once, at construction (an FSDP2 model is sharded then); optimizer tensors whenever asked.
    Raises UnsupportedStateError or TypeError for arguments that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Stateful],
        extra_modules: Mapping[str, nn.Module],
    ) -> None:
        self.optimizers = list(optimizers)
        self.stateful = dict(stateful)
        self.aliases: dict[str, str] = {}
        self.params: list[Param] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.transient: set[str] = set()  # of these, what `Module.state_dict` leaves out
        self._by_id: dict[int, Param] = {}
        self._names: dict[int, str] = {}
        self.outside: list[str] = []
        self._states: list[_OptimizerState] = []
        self._leaves: list[Leaf] = []
        self._members = [Members(optimizer) for optimizer in self.optimizers]
        ddps = find_ddp(model)
        root: nn.Module = model
        if ddps and ddps[0] not in set(model.modules()):
            root = ddps[0]
        self.ddps = [ArrivalOrder(ddp) for ddp in ddps]
        for prefix, module in [("model", root), *((f"extra.{n}", m) for n, m in extra_modules.items())]:
            for fqn, tensor, replicated in _named(module, "parameters"):
                self._add(Param(f"{prefix}.{fqn}", tensor, replicated))
            for fqn, tensor, _ in _named(module, "buffers"):
                self.buffers[f"{prefix}.{fqn}"] = tensor
            self.transient |= {f"{prefix}.{fqn}" for fqn, _, _ in _named(module, "transient")}
        for i, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for j, p in enumerate(group["params"]):
                    if id(p) not in self._by_id:
                        self._add(Param(f"optimizer.{i}.param.{g}.{j}", p, False))
                        self.outside.append(f"optimizer.{i}.param.{g}.{j}")

    def _add(self, param: Param) -> None:
        known = self._by_id.get(id(param.tensor))
        if known is not None:
            self.aliases[param.fqn] = known.fqn
            return
        here = local(param.tensor)
        if not _plain(here) or here.is_meta:
            raise UnsupportedStateError(
                f"{param.fqn} is a {type(here).__qualname__} ({here.layout}, {here.device}): only dense tensors and "
                "DTensors of them can be captured"
            )
        self._by_id[id(param.tensor)] = param
        self._names[id(param.tensor)] = param.fqn
        self.params.append(param)

    # ---- tensors ---------------------------------------------------------------------------------------

    def leaves(self) -> tuple[list[Leaf], dict[tuple[int, str, str], Any]]:
        """All parameters and optimizer tensors as they are now; beside them, the optimizer state that is no tensor,
        by (optimizer, parameter, name). The list is the same as at the last call where its tensors are."""
        states = self._states
        if not (self._leaves and len(states) == len(self.optimizers) and all(state.holds() for state in states)):
            states = [_OptimizerState(o, i, self._by_id) for i, o in enumerate(self.optimizers)]
            self._states = states
            self._leaves = [Leaf(p.fqn, p.tensor, p, -1, "") for p in self.params]
            for state in states:
                self._leaves += state.leaves
        return self._leaves, {key: value for state in states for key, value in state.odd().items()}

    def describe(self, leaf: Leaf, world: int) -> tuple[Row, Entry]:
        """How a leaf appears in the manifest and in the deal. Raises UnsupportedStateError."""
        tensor = leaf.tensor
        here = local(tensor)
        if not _plain(here):
            raise UnsupportedStateError(
                f"{leaf.key} is a {type(here).__qualname__} ({here.layout}): only dense tensors and DTensors of them "
                "can be captured"
            )
        shape, offset, size = tuple(tensor.shape), (0,) * tensor.ndim, tuple(here.shape)
        shared, fingerprint, like_owner = world == 1, 0, False
        owner = leaf.owner.tensor
        if isinstance(tensor, DTensor):
            if any(p.is_partial() for p in tensor.placements):
                raise UnsupportedStateError(f"{leaf.key} is a DTensor with partial sums: it has no definite value")
            shared, (size, offset) = True, box_of(tensor)
            like_owner = (
                isinstance(owner, DTensor) and owner.shape == tensor.shape and owner.placements == tensor.placements
            )
            if leaf.optimizer >= 0 and not like_owner:
                raise UnsupportedStateError(
                    f"{leaf.key} is a DTensor {tuple(tensor.shape)} {tensor.placements} unlike its parameter: state "
                    "of this optimizer cannot be made anew on resume"
                )
        elif world > 1 and (leaf.owner.replicated or (isinstance(owner, DTensor) and tensor.numel() == 1)):
            shared, fingerprint = True, _fingerprint(here)
        row = Row(
            key=leaf.key,
            dtype=dtype_name(tensor.dtype),
            shape=shape,
            shared=shared,
            device=here.device.type,
            optimizer=leaf.optimizer,
            owner=leaf.owner.fqn if leaf.optimizer >= 0 else "",
            name=leaf.name,
            like_owner=like_owner,
        )
        return row, Entry(leaf.key, shape, tuple(offset), size, here.element_size(), fingerprint)

    # ---- small state -----------------------------------------------------------------------------------

    def small(self, odd: Mapping[tuple[int, str, str], Any]) -> dict[str, Any]:
        """Everything that is captured at once: generators, buffers, groups, schedulers and the like."""
        return {
            "rng": rng.capture(),
            "buffers": {name: local(tensor) for name, tensor in self.buffers.items()},
            "groups": [
                [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in o.param_groups]
                for o in self.optimizers
            ],
            # For other programs: export.
            "members": [members.pack(self._names) for members in self._members],
            "transient": sorted(self.transient),
            "odd": dict(odd),
            "stateful": {name: item.state_dict() for name, item in self.stateful.items()},
            "buckets": [recorder.order for recorder in self.ddps],
        }

    def encode_small(self, odd: Mapping[tuple[int, str, str], Any], late: Sequence[Leaf], world: int) -> bytes:
        """The small state as bytes; `late`: tensors that have no place in the tensor area."""
        extra = [(msgspec.structs.astuple(self.describe(leaf, world)[0]), local(leaf.tensor)) for leaf in late]
        return encode.encode({**self.small(odd), "late": extra})

    def restore_small(self, small: Mapping[str, Any]) -> None:
        """Put everything but the generators back. Raises ValueError where it does not fit this training."""
        if len(small["groups"]) != len(self.optimizers):
            raise ValueError(f"the saved run had {len(small['groups'])} optimizers, this one {len(self.optimizers)}")
        for i, (optimizer, groups) in enumerate(zip(self.optimizers, small["groups"], strict=True)):
            if len(groups) != len(optimizer.param_groups):
                raise ValueError(
                    f"optimizer {i} had {len(groups)} parameter groups, has {len(optimizer.param_groups)} now"
                )
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for key, value in saved.items():
                    if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
        missing = set(self.stateful) ^ set(small["stateful"])
        if missing:
            raise ValueError(f"the saved run and this one differ in: {', '.join(sorted(missing))}")
        for name, item in self.stateful.items():
            item.load_state_dict(small["stateful"][name])
        for name, buffer in self.buffers.items():
            saved = small["buffers"].get(name)
            if saved is None or saved.shape != local(buffer).shape:
                raise ValueError(f"buffer {name} {tuple(buffer.shape)} is not in the saved state as such")
            local(buffer).copy_(saved)


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(size, offset) of the local part of a DTensor in the global tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(size) != tuple(tensor._local_tensor.shape):
        raise UnsupportedStateError(
            f"a DTensor {tuple(tensor.shape)} {tensor.placements} has a local part of "
            f"{tuple(tensor._local_tensor.shape)} where {tuple(size)} was expected"
        )
    return tuple(size), tuple(offset) if offset else (0,) * tensor.ndim


def _fingerprint(tensor: torch.Tensor) -> int:
    """A 63-bit digest of up to 4096 elements, spread over the tensor."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if flat.numel() > _PRINT_SAMPLES:
            flat = flat[:: -(-flat.numel() // _PRINT_SAMPLES)]
        flat = flat.contiguous().cpu()
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return (xxhash.xxh3_64_intdigest(data) >> 1) | 1
