"""Starting from the results of another run.

The source is a version of the persistent tier (of any number of ranks), a checkpoint of torch.distributed.checkpoint,
or a file of torch.save.

A tier version restores everything, and version numbers continue from its own. The other two sources give parameters,
buffers, and the tensors of one optimizer. Their tensors are found by the names in the model, under any prefix
(`model.`, `state.app.module.`). Learning rates and the like stay those of this script, and versions begin at 1.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gemini_hpc.format.shard_manifest import TensorRow
from gemini_hpc.train.state import restore
from gemini_hpc.train.state.tensors import get_local, name_dtype, select_box
from gemini_hpc.train.state.tree import StateTree, compute_local_box

_DCP = ".metadata"
_DEEP = 4
_NONE: dict[str, Any] = {"odd": {}}


@dataclass(frozen=True)
class Started:
    """The result of a load.

    Attributes:
        version: Number of the version, 0 if the source has none.
        description: Description in words.
        states: States of the generators, if they are this rank's.
        counts: See `restore.read_saved_units`.
    """

    version: int
    description: str
    states: Any = None
    counts: Mapping[str, int] = field(default_factory=dict)


def load(tree: StateTree, path: str, name: str, rank: int, world: int) -> Started:
    """Fill the training from `path`.

    Args:
        tree: The state to fill.
        path: The source.
        name: Name of the training, needed if a job's directory has several.
        rank: This rank's number.
        world: Number of ranks.

    Raises:
        ValueError: The source does not fit this training, or is damaged.
        OSError: The source cannot be read.
        ImportError: h5py is missing.
    """
    tree.reshard()
    if os.path.isfile(path):
        return _from_file(tree, path)
    if os.path.isfile(f"{path}/{_DCP}"):
        return _from_dcp(tree, path)
    return _from_tier(tree, path, name, rank, world)


def _from_tier(tree: StateTree, path: str, name: str, rank: int, world: int) -> Started:
    from gemini_hpc.tier.find import find
    from gemini_hpc.train.state.full_state import open_shards

    damaged: list[str] = []
    where, manifest = find(path, name, passed_over=damaged.append)
    with open_shards(where, manifest) as shards:
        same = manifest.world == world
        own = shards[rank if same else rank % len(shards)]
        small = restore.load(tree, own, shards, rank, same)
    what = "; skipped: ".join([f"version {manifest.stamp[1]} of job {manifest.job}", *damaged])
    return Started(
        manifest.stamp[1], what, small["rng"] if same else None, restore.read_saved_units(small, manifest.world)
    )


# ---- by name: other programs' checkpoints --------------------------------------------------------------


def _collect_model_tensors(tree: StateTree) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers by the model's own names, as far as the model saves them.

    Raises:
        ValueError: A tensor's memory is not all of its content (quantized tensors).
    """
    if apart := tree.with_hidden:
        raise ValueError(
            f"{apart[0]} is quantized: other programs' checkpoints of it are not read here; load it before, without "
            "`start`"
        )
    found = {p.fqn.removeprefix("model."): p.tensor for p in tree.params if p.fqn.startswith("model.")}
    found |= {
        n.removeprefix("model."): t
        for n, t in tree.buffers.items()
        if n.startswith("model.") and n not in tree.transient
    }
    return found


USUAL = ("", "model.", "module.", "state_dict.", "model_state_dict.")


def _find_prefix(names: Iterable[str], keys: Iterable[str]) -> str | None:
    """Return the prefix before all of `names` among `keys`, or None if there is none.

    With several models in the file, return the empty prefix or one of the usual words.

    Raises:
        ValueError: Any of several unusual prefixes could be right. Ranks would choose differently.
    """
    wanted, known = list(names), set(keys)
    first = max(wanted, key=len, default="")
    candidates = {key[: -len(first)] for key in known if key.endswith(first)} if first else set()
    fitting = [p for p in candidates if (not p or p.endswith(".")) and all(p + n in known for n in wanted)]
    found = [prefix for prefix in USUAL if prefix in fitting] or sorted(fitting)
    if len(found) > 1 and found[0] not in USUAL:
        raise ValueError(
            f"the file has several models with the names of this one, below {', '.join(found)}: keep only one"
        )
    return found[0] if found else None


def _compare_shapes(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str:
    return "" if tuple(tensor.shape) == shape else f"{name} is {tuple(tensor.shape)} here and {shape} there"


def _make_state(tree: StateTree, found: Mapping[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Create the optimizer state tensors that were found, by (parameter, name), with any content."""
    params = {p.fqn: p.tensor for p in tree.params}
    rows = []
    for (owner, name), (shape, dtype) in found.items():
        parameter = params[f"model.{owner}"]
        like = shape == tuple(parameter.shape) and bool(shape)
        device = get_local(parameter).device.type if like else "cpu"
        key = f"optimizer.0.model.{owner}.{name}"
        rows.append(TensorRow(key, name_dtype(dtype), shape, True, device, 0, f"model.{owner}", name, like))
    restore.make_optimizer_state(tree, rows, _NONE)


def _find_targets(tree: StateTree, found: Mapping[tuple[str, str], str]) -> dict[str, torch.Tensor]:
    """Return the optimizer's present tensors by the keys under which the source has them."""
    leaves, _ = tree.find_leaves()
    tensors = {
        (leaf.owner.fqn.removeprefix("model."), leaf.name): leaf.tensor for leaf in leaves if leaf.optimizer == 0
    }
    return {key: tensors[name] for name, key in found.items() if name in tensors}


def _from_dcp(tree: StateTree, path: str) -> Started:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(path)
    known = {
        k: v for k, v in reader.read_metadata().state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)
    }
    model = _collect_model_tensors(tree)
    prefix = _find_prefix(model, known)
    if prefix is None:
        raise ValueError(f"{path}: has no tensors with the names of this model, such as {next(iter(model), '')}")
    targets = {prefix + name: tensor for name, tensor in model.items()}
    moments: dict[tuple[str, str], str] = {}
    for key in known:
        found = re.match(r"(?:.*\.)?state\.(.+)\.([^.]+)\Z", key)
        if found is not None and found[1] in model and len(tree.optimizers) == 1:
            moments[found[1], found[2]] = key
    sizes = {name: (tuple(known[key].size), known[key].properties.dtype) for name, key in moments.items()}
    _check_problems(path, [_compare_shapes(key, tensor, tuple(known[key].size)) for key, tensor in targets.items()])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if moments:
            _make_state(tree, sizes)
            targets |= _find_targets(tree, moments)
        wanted = {key: tensor.detach() for key, tensor in targets.items() if get_local(tensor).numel()}
        try:
            state_dict_loader.load(wanted, storage_reader=reader, no_dist=True)
        # CheckpointException is no Exception: handlers of Exception would miss it
        except CheckpointException as error:
            causes = [str(cause).splitlines()[0][:200] for cause, _ in error.failures.values() if str(cause)]
            raise ValueError(f"{path}: cannot be loaded: {(causes or ['damaged'])[0]}") from None
    return Started(
        0, f"{_describe_counts(model, moments)}, from torch.distributed.checkpoint{_describe_unread(tree)}"
    )


def _from_file(tree: StateTree, path: str) -> Started:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(
            f"{path}: cannot be loaded as a file of torch.save: {str(error).splitlines()[0][:200]}"
        ) from None
    model = _collect_model_tensors(tree)
    saved = next((found for found in _walk_dicts(content, _DEEP) if _find_prefix(model, found) is not None), None)
    if saved is None:
        raise ValueError(f"{path}: has no tensors with the names of this model, such as {next(iter(model), '')}")
    prefix = _find_prefix(model, saved) or ""
    _check_problems(
        path,
        [_compare_shapes(prefix + name, tensor, tuple(saved[prefix + name].shape)) for name, tensor in model.items()],
    )
    moments = _collect_moments(tree, content) if len(tree.optimizers) == 1 else {}
    with torch.no_grad():
        for name, tensor in model.items():
            _fill_part(tensor, saved[prefix + name])
        if moments:
            _make_state(tree, {name: (tuple(t.shape), t.dtype) for name, t in moments.items()})
            targets = _find_targets(tree, {name: ".".join(name) for name in moments})
            for named, tensor in moments.items():
                _fill_part(targets[".".join(named)], tensor)
    return Started(0, f"{_describe_counts(model, moments)}, from torch.save{_describe_unread(tree)}")


def _describe_counts(model: Sized, moments: Sized) -> str:
    return f"{len(model)} tensors and {len(moments)} of the optimizer"


def _describe_unread(tree: StateTree) -> str:
    """Return a phrase that names this training's other state, which begins anew."""
    extra = tree.with_extra
    more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
    return f"; not read: {extra[0]}{more}" if extra else ""


def _check_problems(path: str, problems: Iterable[str]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError(f"{path}: does not fit this training: {'; '.join(found[:3])}")


def _walk_dicts(value: Any, deep: int) -> Iterable[Mapping[str, Any]]:
    """Yield a dict of names and the dicts inside it, the outer ones first."""
    if not isinstance(value, Mapping) or not deep:
        return
    if all(isinstance(key, str) for key in value):
        yield {key: item for key, item in value.items() if isinstance(item, torch.Tensor)}
    for item in value.values():
        yield from _walk_dicts(item, deep - 1)


def _collect_moments(tree: StateTree, content: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of an optimizer's state_dict by (parameter, name).

    Parameters go by name, or by number as in its groups. A numbered state_dict with another number of parameters is
    ignored.
    """
    model = {id(p.tensor): p.fqn.removeprefix("model.") for p in tree.params}
    order = [model.get(id(p), "") for group in tree.optimizers[0].param_groups for p in group["params"]]
    found: dict[tuple[str, str], torch.Tensor] = {}
    for state, groups in _walk_optimizers(content, _DEEP):
        listed = [n for group in groups if isinstance(group, Mapping) for n in group.get("params", ())]
        numbers = [n for n in listed if isinstance(n, int)]  # names need no order
        names = dict(zip(numbers, order, strict=True)) if len(numbers) == len(order) else {}
        for key, values in state.items():
            name = names.get(key, key)
            if isinstance(values, Mapping) and name in model.values():
                found |= {(name, n): t for n, t in values.items() if isinstance(t, torch.Tensor)}
        break
    return found


def _walk_optimizers(value: Any, deep: int) -> Iterable[tuple[Mapping[Any, Any], list[Any]]]:
    """Yield each pair of dict and list that looks like an optimizer's state_dict.

    A list with one element counts as that element, as Lightning stores it.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping) or not deep:
        return
    state, groups = value.get("state"), value.get("param_groups")
    if isinstance(state, Mapping) and isinstance(groups, list):
        yield state, groups
        return
    for item in value.values():
        yield from _walk_optimizers(item, deep - 1)


def _fill_part(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    if isinstance(tensor, DTensor):
        size, offset = compute_local_box(tensor)
        saved = select_box(saved, offset, size)
    local_tensor = get_local(tensor)
    if local_tensor.numel():
        local_tensor.detach().copy_(saved)
