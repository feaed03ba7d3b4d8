"""The training state as a tree: stable names for parameters and optimizer tensors, and the small state beside them.

A DTensor's semi-private `_local_tensor` is used in this room only; wrappers' child names are used in `modules` only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from gemini_hpc.client import mistake
from gemini_hpc.format.shard_manifest import LIFTED, PARAMETER, TensorRow
from gemini_hpc.train.state import encode, extra_state, handed_out, inner, rng, sharded
from gemini_hpc.train.state.beside import Hidden, Sparse, find_beside
from gemini_hpc.train.state.buckets import ArrivalOrder
from gemini_hpc.train.state.comm_hooks import CommHooks
from gemini_hpc.train.state.groups import Members, ParameterGroup, unpack
from gemini_hpc.train.state.inner import is_composed
from gemini_hpc.train.state.lifted import Lift, is_early
from gemini_hpc.train.state.loader import read_loader_units
from gemini_hpc.train.state.modules import Modules, UnsupportedStateError, are_same, is_gathered
from gemini_hpc.train.state.ownership import TensorEntry
from gemini_hpc.train.state.tensors import get_local, is_folded, name_dtype, pass_bytes

_PRINT_SAMPLES = 4096


class StateDictError(Exception):
    """An object of the training failed to give its state this time; the message names the object."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state goes out and comes back as plain values."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state."""


class Param(NamedTuple):
    """A parameter (or buffer) under its name. `replicated`: it belongs to a DDP module."""

    fqn: str
    tensor: torch.Tensor
    replicated: bool


class Leaf(NamedTuple):
    """A tensor of the training state, as found now.

    Attributes:
        key: Name of the tensor.
        tensor: The tensor; may be a DTensor.
        owner: The parameter to which it belongs.
        optimizer: Index of the optimizer, or a special value, as in a manifest's row.
        name: Name in the optimizer's state.
        eager: The tensor must not be read behind the training's back.
        still: The tensor belongs to a parameter that is not trained.
    """

    key: str
    tensor: torch.Tensor
    owner: Param
    optimizer: int
    name: str
    eager: bool = False
    still: bool = False

    @property
    def may_stay(self) -> bool:
        """Return whether `requires_grad` shows that the tensor is not trained.

        The flag counts for a parameter, and for tensors marked `still`. It does not count for the tensors that
        another parameter is made of.
        """
        return self.still or (self.optimizer == PARAMETER and self.tensor is self.owner.tensor)


class Packed(NamedTuple):
    """The small state as bytes.

    Attributes:
        data: The bytes.
        lifted: Tensors lifted out of it, by name.
        unplanned: Tensors that could be lifted out of it, by name.
        gaps: Its gaps, if any.
    """

    data: bytes | bytearray
    lifted: dict[str, torch.Tensor]
    unplanned: dict[str, torch.Tensor]
    gaps: encode.Gaps | None = None


def lifts_nothing(name: str, tensor: torch.Tensor) -> bool:
    """Return False: for small states that keep their tensors."""
    return False


def defers_nothing(tensor: torch.Tensor) -> bool:
    """Return False: for small states that are complete at once."""
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is all of its state.

    A class of its own may qualify, unless it is made of other tensors.
    """
    made_of_others = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not made_of_others and tensor.layout == torch.strided and not tensor.is_quantized


def _build_unsupported_error(name: str, local_tensor: torch.Tensor) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{name} is a {type(local_tensor).__qualname__} ({local_tensor.layout}, {local_tensor.device}): "
        "only dense tensors and DTensors of them can be captured"
    )


def find_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP modules in the model, or the one around it if the bare module was given."""
    inside = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if inside:
        return inside
    return [o for o in gc.get_objects() if type(o) is DistributedDataParallel and o.module is model][:1]


class _OptimizerState:
    """The tensors of an optimizer, as found last."""

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, owners: Mapping[int, Param]) -> None:
        self.leaves: list[Leaf] = []
        self._optimizer = optimizer
        self._odd: list[tuple[tuple[int, str, str], dict[str, Any], str]] = []
        self._loose: list[Any] = []  # names of state that belongs to no parameter
        self._known: list[tuple[Any, dict[str, Any] | None, tuple[str, ...], list[Any]]] = []
        self.made: dict[tuple[int, str, str], inner.Recipe] = {}  # of tensors made of others
        self._parts = _Parts()
        for parameter, values in optimizer.state.items():
            owner = owners.get(id(parameter))
            if owner is None:  # belongs to no parameter of ours; the key may be of any kind
                self._known.append((parameter, None, (), []))
                if not isinstance(parameter, torch.Tensor):
                    self._loose.append(parameter)
                continue
            kept = [value if isinstance(value, torch.Tensor) else None for value in values.values()]
            self._known.append((parameter, values, tuple(values), kept))
            for name, value in values.items():
                key = f"optimizer.{number}.{owner.fqn}.{name}"
                if isinstance(value, torch.Tensor) and is_composed(value):
                    self.made[number, owner.fqn, name] = inner.build_recipe(value)
                    for path, part in self._parts.record_parts(value):
                        self.leaves.append(Leaf(f"{key}.{path}", part, owner, number, f"{name}.{path}"))
                elif isinstance(value, torch.Tensor):
                    self.leaves.append(Leaf(key, value, owner, number, name))
                else:
                    self._odd.append(((number, owner.fqn, name), values, name))

    def is_current(self) -> bool:
        """Return whether the optimizer has the same tensors under the same names."""
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
            if not all(map(is_, values.values(), kept)) and not all(map(_is_same_value, values.values(), kept)):
                return False
        return self._parts.are_same()

    def read_loose(self) -> dict[Any, Any]:
        """Return the present state that belongs to no parameter."""
        return {key: self._optimizer.state[key] for key in self._loose}

    def read_odd(self) -> dict[tuple[int, str, str], Any]:
        """Return the present state that is no tensor."""
        return {key: values[name] for key, values, name in self._odd}


class _Parts:
    """Tensors made of others, with those others, as found."""

    def __init__(self) -> None:
        self._found: list[inner.CompositeTensor] = []

    def record_parts(self, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the parts of a tensor, by their paths in it, and remember them."""
        self._found += inner.list_levels(tensor)
        return list(inner.list_parts(tensor))

    def are_same(self) -> bool:
        """Return whether each tensor is made of the same parts, in the same way."""
        return all(map(inner.CompositeTensor.is_current, self._found))


def _is_same_value(value: Any, kept: torch.Tensor | None) -> bool:
    return value is kept or (kept is None and not isinstance(value, torch.Tensor))


class StateTree:
    """The names and places of everything that a training has to get back.

    All tensors are found anew whenever one was replaced. At construction an FSDP2 model has to be sharded.

    Raises:
        UnsupportedStateError: The training has state that cannot be captured.
        TypeError: An argument cannot work.
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
        self.outside: list[str] = []  # parameters that only an optimizer has
        self.replacements = 0  # how often something was replaced
        self._by_id: dict[int, Param] = {}
        self._names: dict[int, str] = {}
        self._stepped: list[torch.Tensor] = []  # parameters in the optimizers' groups
        self._states: list[_OptimizerState] = []
        self._leaves: list[Leaf] = []
        self._parts = _Parts()  # of parameters
        self._places: dict[str, tuple[nn.Module | None, str]] = {}  # of parameters with tensors outside their memory
        self._beside: dict[str, Hidden | Sparse] = {}
        self._made: bytes | None = None  # recipes as encoded for the small state
        self._flags: list[bool] = []  # which parameters are trained now
        self._members: list[Members] = []
        ddps = find_ddp(model)
        root: nn.Module = model
        if ddps and ddps[0] not in set(model.modules()):
            root = ddps[0]
        self.ddps = [ArrivalOrder(ddp) for ddp in ddps]
        self.comm_hooks = CommHooks(ddps)
        self.unrestored: list[str] = []  # sentences about the last restore: state that begins anew
        self._modules = Modules({"model.": root, **{f"extra.{n}.": m for n, m in extra_modules.items()}})
        self._find_parameters()
        self._built = {name: get_local(tensor).shape for name, tensor in self.buffers.items()}
        self._trained = {param.fqn: param.tensor.requires_grad for param in self.params}  # at construction
        self._changed: dict[str, bool] = {}

    def _find_parameters(self) -> None:
        known = {p.fqn: p.tensor for p in self.params}
        known |= {alias: known[name] for alias, name in self.aliases.items()}
        params: dict[int, Param] = {}
        aliases: dict[str, str] = {}
        outside: list[str] = []
        places: dict[str, tuple[nn.Module | None, str]] = {}

        def add(fqn: str, tensor: torch.Tensor, replicated: bool, module: nn.Module | None = None) -> bool:
            before = known.get(fqn)
            if before is not None and is_gathered(tensor, before):
                tensor = before
            if (first := params.get(id(tensor))) is not None:
                aliases[fqn] = first.fqn
                return False
            local_tensor = get_local(tensor)
            if is_lazy(local_tensor):
                raise UnsupportedStateError(f"{fqn} has no size before the first forward pass: run one before this")
            plain = (
                [part for _, part in inner.list_parts(local_tensor)] if is_composed(local_tensor) else [local_tensor]
            )
            place = module, fqn.rpartition(".")[2]
            if (beside := find_beside(fqn, tensor, *place)) is not None:
                plain = [*([] if isinstance(beside, Sparse) else plain), *beside.tensors.values()]
                places[fqn] = place
            if not all(_is_plain(part) and not part.is_meta for part in plain):
                raise _build_unsupported_error(fqn, local_tensor)
            params[id(tensor)] = Param(fqn, tensor, replicated)
            return True

        for slot in self._modules.buffers:
            if (tensor := slot.tensor) is not None and is_lazy(tensor):
                raise UnsupportedStateError(
                    f"{slot.fqn} has no size before the first forward pass: run one before this"
                )
        for slot in self._modules.parameters:
            if (tensor := slot.tensor) is not None:
                add(slot.fqn, tensor, slot.replicated, slot.module)
        for i, optimizer in enumerate(self.optimizers):
            for g, group in enumerate(optimizer.param_groups):
                for j, p in enumerate(group["params"]):
                    fqn = f"optimizer.{i}.param.{g}.{j}"
                    if id(p) not in params and add(fqn, p, False):
                        outside.append(fqn)
        self._by_id, self.aliases, self.outside = params, aliases, outside
        self.params, self._places = list(params.values()), places
        self._names = {number: param.fqn for number, param in params.items()}
        self._stepped = _list_grouped(self.optimizers)
        self._members = [Members(optimizer) for optimizer in self.optimizers]
        self._states, self._leaves, self._flags = [], [], []

    def reshard(self) -> None:
        """Free what FSDP2 has gathered for an earlier forward pass. Call before values are loaded.

        The next forward pass would use the gathered values otherwise.
        """
        self._modules.reshard()

    def list_stepped(self, number: int) -> set[str]:
        """Return the names of the parameters in an optimizer's groups."""
        groups = self.optimizers[number].param_groups
        return {self._names[id(p)] for group in groups for p in group["params"] if id(p) in self._names}

    def refresh(self) -> None:
        """Find everything anew where a module, a parameter or a group of an optimizer was replaced.

        Raises:
            UnsupportedStateError: There is state that cannot be captured.
        """
        if self._modules.is_current() and are_same(_list_grouped(self.optimizers), self._stepped):
            return
        self._modules.find()
        self._find_parameters()
        self.replacements += 1

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the present buffers by name."""
        return {slot.fqn: tensor for slot in self._modules.buffers if (tensor := slot.tensor) is not None}

    @property
    def transient(self) -> set[str]:
        """Return the names of buffers that `Module.state_dict` leaves out."""
        return self._modules.transient & self.buffers.keys()

    @property
    def with_extra(self) -> list[str]:
        """Return the names of modules' extra state."""
        return list(self._modules.with_extra)

    # ---- tensors ---------------------------------------------------------------------------------------

    def find_leaves(self) -> tuple[list[Leaf], dict[tuple[int, str, str], Any]]:
        """Return all present parameters and optimizer tensors, and the optimizer state that is no tensor.

        The list is the same object as at the last call if its tensors are the same.

        Returns:
            The tensors, and the other state by (optimizer, parameter, name).

        Raises:
            UnsupportedStateError: There is state that cannot be captured.
        """
        self.refresh()
        states = self._states
        held = self._leaves and len(states) == len(self.optimizers) and self._parts.are_same()
        held = held and all(beside.is_current() for beside in self._beside.values())
        if not (held and all(state.is_current() for state in states)):
            states = [_OptimizerState(o, i, self._by_id) for i, o in enumerate(self.optimizers)]
            self._states = states
            self._parts, self._made = _Parts(), None
            self._beside = self._find_beside()
            self._leaves = [leaf for p in self.params for leaf in self._list_parameter_leaves(p)]
            for state in states:
                self._leaves += state.leaves
        return self._leaves, {key: value for state in states for key, value in state.read_odd().items()}

    def _find_beside(self) -> dict[str, Hidden | Sparse]:
        tensors = {p.fqn: p.tensor for p in self.params if p.fqn in self._places}
        found = {fqn: find_beside(fqn, tensor, *self._places[fqn]) for fqn, tensor in tensors.items()}
        return {fqn: beside for fqn, beside in found.items() if beside is not None}

    def _list_parameter_leaves(self, p: Param) -> list[Leaf]:
        beside = self._beside.get(p.fqn)
        if isinstance(beside, Sparse):
            own = []
        elif is_composed(p.tensor):
            own = [
                Leaf(f"{p.fqn}.{path}", part, p, PARAMETER, "") for path, part in self._parts.record_parts(p.tensor)
            ]
        elif not _is_plain(get_local(p.tensor)):  # sparse, and trained by now
            raise _build_unsupported_error(p.fqn, get_local(p.tensor))
        else:
            own = [Leaf(p.fqn, p.tensor, p, PARAMETER, "")]
        if beside is not None:
            still = not p.tensor.requires_grad
            parts = beside.tensors.items()
            own += [Leaf(f"{p.fqn}.{path}", part, p, PARAMETER, "", still=still) for path, part in parts]
        return own

    @property
    def with_hidden(self) -> list[str]:
        """Return the names of parameters that have state outside their memory."""
        self.find_leaves()
        found = self._beside.items()
        return [fqn for fqn, beside in found if isinstance(beside, Hidden) and beside.tensors]

    def _build_recipes(self) -> dict[str, inner.Recipe]:
        """Return the recipes of parameters, by name."""
        found = {p.fqn: inner.build_recipe(p.tensor) for p in self.params if is_composed(p.tensor)}
        kept = ((fqn, beside.build_recipe()) for fqn, beside in self._beside.items())
        return found | {fqn: recipe for fqn, recipe in kept if recipe is not None}

    def build_entry_searches(self) -> dict[str, Callable[[], list[str]]]:
        """Return, by module and optimizer, a function that finds uncaptured entries of its `state_dict()`.

        The functions return the names of these entries.

        Raises:
            UnsupportedStateError: There is state that cannot be captured.
        """
        leaves, _ = self.find_leaves()
        captured = handed_out.find_addresses([*(leaf.tensor for leaf in leaves), *self.buffers.values()])
        names = {slot.fqn for slot in (*self._modules.parameters, *self._modules.buffers)}
        names |= self._modules.with_extra.keys()
        looks: dict[str, Callable[[], list[str]]] = {
            prefix.removesuffix("."): partial(handed_out.find_in_module, root, prefix, names, captured)
            for prefix, root in self._modules.roots.items()
        }
        for number, optimizer in enumerate(self.optimizers):
            what = f"optimizer {number} ({type(optimizer).__name__})"
            looks[what] = partial(handed_out.find_in_optimizer, optimizer, captured)
        return looks

    def encode_recipes(self) -> bytes:
        """Return the encoded recipes of tensors made of others, by (optimizer or -1, parameter, name or "").

        The bytes are cached: there may be many recipes, and they stay the same.
        """
        if self._made is None:
            found = {(-1, fqn, ""): recipe for fqn, recipe in self._build_recipes().items()}
            for state in self._states:
                found |= state.made
            self._made = encode.encode(found) if found else b""
        return self._made

    def describe(self, leaf: Leaf, world: int, *, closely: bool = False) -> tuple[TensorRow, TensorEntry]:
        """Return the manifest's row and the ownership entry of a leaf.

        Args:
            leaf: The leaf.
            world: Number of ranks.
            closely: The fingerprint covers the whole tensor.

        Raises:
            UnsupportedStateError: The leaf cannot be captured.
        """
        tensor = leaf.tensor
        local_tensor = get_local(tensor)
        if not _is_plain(local_tensor):
            raise _build_unsupported_error(leaf.key, local_tensor)
        shape, offset, size = tuple(tensor.shape), (0,) * tensor.ndim, tuple(local_tensor.shape)
        shared, fingerprint, like_owner = world == 1, 0, False
        owner = leaf.owner.tensor
        if isinstance(tensor, DTensor):
            if any(p.is_partial() for p in tensor.placements):
                raise UnsupportedStateError(f"{leaf.key} is a DTensor with partial sums: it has no definite value")
            shared, (size, offset) = True, compute_local_box(tensor)
            # with HSDP several ranks have the same box
            fingerprint = _fingerprint(local_tensor, closely) if world > 1 else 0
            like_owner = (
                isinstance(owner, DTensor) and owner.shape == tensor.shape and owner.placements == tensor.placements
            )
            if leaf.optimizer >= 0 and not like_owner:
                raise UnsupportedStateError(
                    f"{leaf.key} is a DTensor {tuple(tensor.shape)} {tensor.placements} unlike its parameter: state "
                    "of this optimizer cannot be recreated on resume"
                )
        elif world > 1 and (leaf.owner.replicated or (isinstance(owner, DTensor) and tensor.numel() == 1)):
            shared, fingerprint = True, _fingerprint(local_tensor, closely)
        row = TensorRow(
            key=leaf.key,
            dtype=name_dtype(tensor.dtype),
            shape=shape,
            shared=shared,
            device=local_tensor.device.type,
            optimizer=leaf.optimizer,
            owner=leaf.owner.fqn if leaf.optimizer >= 0 else "",
            name=leaf.name,
            like_owner=like_owner,
        )
        lifted = leaf.optimizer == LIFTED
        return row, TensorEntry(
            leaf.key, shape, tuple(offset), size, local_tensor.element_size(), fingerprint, lifted
        )

    # ---- small state -----------------------------------------------------------------------------------

    def capture_small(self, odd: Mapping[tuple[int, str, str], Any]) -> dict[str, Any]:
        """Return all state that is captured at once: generators, buffers, groups, schedulers and the like.

        Raises:
            StateDictError: An object has failed to give its state.
        """
        buffers = {name: get_local(tensor) for name, tensor in self.buffers.items()}
        return {
            "rng": rng.capture(),
            "buffers": buffers,
            "extra_state": extra_state.capture(self._modules.with_extra),
            "comm_hooks": self.comm_hooks.capture(),
            "emptied": [name for name in self._built if name not in buffers],
            "trained": self._find_retrained(),
            "loose": [state.read_loose() for state in self._states],
            "reshaped": [
                name for name, shape in self._built.items() if name in buffers and buffers[name].shape != shape
            ],
            "groups": [
                [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in o.param_groups]
                for o in self.optimizers
            ],
            # For export to other programs.
            "members": [members.pack(self._names) for members in self._members],
            "transient": sorted(self._modules.transient & buffers.keys()),
            "odd": dict(odd),
            "made": self.encode_recipes(),
            "stateful": {
                name: sharded.replace_dtensors(_read_state(name, item)) for name, item in self.stateful.items()
            },
            "counted": read_loader_units(self.stateful.get("loader")),
            "buckets": [recorder.order for recorder in self.ddps],
        }

    def _find_retrained(self) -> dict[str, bool]:
        """Return the parameters that were frozen or unfrozen in mid-training, with their present flag."""
        now = [param.tensor.requires_grad for param in self.params]
        if now != self._flags:
            self._flags = now
            pairs = zip(self.params, now, strict=True)
            self._changed = {p.fqn: flag for p, flag in pairs if flag is not self._trained.get(p.fqn, True)}
        return self._changed

    def pack_small(
        self,
        odd: Mapping[tuple[int, str, str], Any],
        late: Sequence[Leaf],
        world: int,
        lifts: Callable[[str, torch.Tensor], bool] = lifts_nothing,
        defers: Callable[[torch.Tensor], bool] = defers_nothing,
    ) -> Packed:
        """Encode the small state.

        Args:
            odd: Optimizer state that is no tensor, by (optimizer, parameter, name).
            late: Tensors without a place in the tensor area.
            world: Number of ranks.
            lifts: Returns whether a large tensor of the small state (name, tensor) has a place in the tensor area.
            defers: Returns whether a tensor's bytes are put in later.

        Raises:
            StateDictError: An object has failed to give its state.
            UnknownTypeError: A value cannot be encoded.
            UnsupportedStateError: A late tensor cannot be captured.
        """
        extra = [(msgspec.structs.astuple(self.describe(leaf, world)[0]), get_local(leaf.tensor)) for leaf in late]
        lift = Lift(lifts)
        small = lift.lift_tensors(self.capture_small(odd))
        data, gaps = encode.encode_around({**small, "late": extra}, defers)
        return Packed(data, lift.found, lift.left, gaps)

    def build_lifted_leaves(self, lifted: Mapping[str, torch.Tensor]) -> list[Leaf]:
        """Return the tensors lifted out of the small state, as leaves for a plan.

        Tensors that forward and backward passes do not change may be the same on all DDP ranks. Memory shared with
        others (numpy, another process) is written without a version counter, so such a tensor is eager.
        """
        buffers = self.buffers

        def build_leaf(name: str, tensor: torch.Tensor) -> Leaf:
            own = name in buffers or is_early(name)
            eager = own or not tensor.untyped_storage().resizable()
            return Leaf(name, tensor, Param(name, tensor, bool(self.ddps) and not own), LIFTED, "", eager)

        return [build_leaf(name, tensor) for name, tensor in lifted.items()]

    def restore_small(self, small: Mapping[str, Any], *, same_world: bool = True) -> None:
        """Put everything but the generators back.

        Args:
            small: The small state.
            same_world: The saved run had as many ranks.

        Raises:
            ValueError: The small state does not fit this training.
        """
        if len(small["groups"]) != len(self.optimizers):
            raise ValueError(f"the saved run had {len(small['groups'])} optimizers, this one {len(self.optimizers)}")
        by_name = {param.fqn: param.tensor for param in self.params}
        for name, trained in small.get("trained", {}).items():
            if name in by_name:
                by_name[name].requires_grad_(trained)
        for i, groups in enumerate(small["groups"]):
            self._restore_groups(i, groups, small, same_world=same_world)
        for optimizer, loose in zip(self.optimizers, small.get("loose", ()), strict=False):
            optimizer.state.update(loose)
        recipes = self._build_recipes()
        for (number, owner, _), made in inner.read_recipes(small).items():
            if number < 0 and owner in by_name and recipes.get(owner) != made:
                raise ValueError(f"{owner} was a {made['class']} of another kind than it is here")
        missing = set(self.stateful) ^ set(small["stateful"])
        if missing:
            first = sorted(missing)[0]
            present_verb, past_verb = (
                ("passes", "did not pass") if first in self.stateful else ("does not pass", "passed")
            )
            raise ValueError(
                f"this run {present_verb} {first}, the run that saved this version {past_verb} it: "
                "pass the same arguments, or begin with another name="
            )
        likes = [param.tensor for param in self.params if isinstance(param.tensor, DTensor)]
        for name, item in self.stateful.items():
            saved = small["stateful"][name]
            if sharded.has_parts(saved):
                saved = sharded.Wholes(likes).rebuild(saved, item.state_dict(), name)
            item.load_state_dict(saved)
        self._restore_buffers(small)
        if "extra_state" in small:
            extra_state.restore(self._modules.with_extra, small["extra_state"], likes)
        self.unrestored = self.comm_hooks.restore(small.get("comm_hooks", {}), same_world=same_world)

    def _restore_groups(
        self, number: int, groups: Sequence[Mapping[str, Any]], small: Mapping[str, Any], *, same_world: bool
    ) -> None:
        """Restore an optimizer's groups, and add those that the saved run added in mid-training."""
        optimizer = self.optimizers[number]
        have = len(optimizer.param_groups)
        if len(groups) > have and "members" in small:
            by_name = {param.fqn: param.tensor for param in self.params}
            for saved, member in zip(groups[have:], unpack(small["members"][number])[have:], strict=True):
                unknown = [name for name in member.params if name not in by_name]
                if unknown or not member.params:
                    raise ValueError(
                        f"optimizer {number}: the saved run added a parameter group, of "
                        f"{unknown[0] if unknown else 'parameters without a name'}, which this training does not have"
                    )
                added: list[Any] = [by_name[name] for name in member.params]
                if member.param_names and "param_names" in optimizer.param_groups[0]:
                    added = list(zip(member.param_names, added, strict=True))
                optimizer.add_param_group({**saved, "params": added})
        if len(groups) != len(optimizer.param_groups):
            raise ValueError(f"optimizer {number} had {len(groups)} parameter groups, has {have} now")
        if "members" in small and same_world:
            self._append_members(optimizer, unpack(small["members"][number]))
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _append_members(self, optimizer: torch.optim.Optimizer, saved: Sequence[ParameterGroup]) -> None:
        """Append parameters that the saved run put into a group in mid-training and that are in no group here."""
        by_name = {param.fqn: param.tensor for param in self.params}
        have = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for group, member in zip(optimizer.param_groups, saved, strict=True):
            named = member.param_names or [""] * len(member.params)
            for name, given in zip(member.params, named, strict=False):
                if name in by_name and id(by_name[name]) not in have:
                    group["params"].append(by_name[name])
                    if "param_names" in group:
                        group["param_names"].append(given)

    def _restore_buffers(self, small: Mapping[str, Any]) -> None:
        """Restore the buffers. Make, empty or enlarge those that the saved run changed so in mid-training."""
        reshaped, transient, buffers = set(small.get("reshaped", ())), set(small.get("transient", ())), self.buffers
        emptied = set(small.get("emptied", ()))
        for name, buffer in buffers.items():
            saved = small["buffers"].get(name)
            if saved is None and name in emptied:
                self._modules.put_buffer(name, None, persistent=False)
            elif saved is None or (saved.shape != get_local(buffer).shape and name not in reshaped):
                raise ValueError(f"buffer {name} {tuple(buffer.shape)} is not in the saved state as such")
        for name, saved in small["buffers"].items():
            now = buffers.get(name)
            alike = now is not None and (get_local(now).shape, now.dtype) == (saved.shape, saved.dtype)
            if now is not None and alike and not is_folded(get_local(now)):
                get_local(now).copy_(saved)
                continue
            value = saved if now is None else saved.to(now.device)
            if not self._modules.put_buffer(name, value, persistent=name not in transient):
                raise ValueError(
                    f"buffer {name} appeared in mid-training, in a module that this training does not have: build it "
                    "before resume()"
                )


def _read_state(name: str, item: Stateful) -> Any:
    """Return an object's state.

    Raises:
        StateDictError: The object has raised any exception.
    """
    try:
        return item.state_dict()
    except Exception as error:
        raise StateDictError(f"state_dict() of {name} has raised {mistake.describe_error(error)}") from error


def _list_grouped(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def compute_local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (size, offset) of the local part of a DTensor in the global tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(size) != tuple(tensor._local_tensor.shape):
        raise UnsupportedStateError(
            f"a DTensor {tuple(tensor.shape)} {tensor.placements} has a local part of "
            f"{tuple(tensor._local_tensor.shape)} where {tuple(size)} was expected"
        )
    return tuple(size), tuple(offset) if offset else (0,) * tensor.ndim


def _fingerprint(tensor: torch.Tensor, closely: bool) -> int:
    """Return a 63-bit digest of up to 4096 elements spread over the tensor; with `closely`, of all elements."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if flat.numel() > _PRINT_SAMPLES and not closely:
            flat = flat[:: -(-flat.numel() // _PRINT_SAMPLES)]
        hasher = xxhash.xxh3_64()
        pass_bytes(flat, hasher.update)
    return (hasher.intdigest() >> 1) | 1
