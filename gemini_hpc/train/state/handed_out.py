"""Entries of a module's or an optimizer's `state_dict()` that the capture does not have.

Parameters, buffers, extra state and an optimizer's `state` are captured where they lie. A class may return more in a
`state_dict` of its own. Such entries cannot be put back alone: `load_state_dict` takes all or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gemini_hpc.train.state.modules import UNNAMED
from gemini_hpc.train.state.optimizers import list_with_inner
from gemini_hpc.train.state.tensors import get_local, walk_leaves

_USUAL = ("state", "param_groups")


def find_addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of these tensors' memory."""
    return set(filter(None, map(_find_address, tensors)))


def _find_address(tensor: torch.Tensor) -> int:
    try:
        return get_local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a class that is made of other tensors
        return 0


def _strip_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in UNNAMED)


def find_in_module(root: nn.Module, prefix: str, names: Collection[str], captured: Collection[int]) -> list[str]:
    """Return the names of entries that only the module's own `state_dict()` has.

    Args:
        root: The module.
        prefix: Prefix of the names in `root`.
        names: Captured names. An entry below such a name belongs to it.
        captured: Addresses of captured memory.
    """
    if not any(map(_has_own_state_dict, root.modules())):
        return []
    known = {_strip_wrappers(name) for name in names}
    found = []
    for key, value in root.state_dict().items():
        name = _strip_wrappers(prefix + key)
        parts = name.split(".")
        if any(".".join(parts[:count]) in known for count in range(1, len(parts) + 1)):
            continue
        if not (isinstance(value, torch.Tensor) and _find_address(value) in captured):
            found.append(name)
    return found


def _has_own_state_dict(module: nn.Module) -> bool:
    kind: Any = type(module)
    return (
        kind.state_dict is not nn.Module.state_dict
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.get_extra_state is not nn.Module.get_extra_state
        or bool(module._state_dict_hooks)
    )


def find_in_optimizer(optimizer: torch.optim.Optimizer, captured: Collection[int]) -> list[str]:
    """Return the keys of entries that only the optimizer's own `state_dict()` has.

    An optimizer without state is not queried: `state_dict` of torch.distributed.checkpoint would make it step.

    Args:
        optimizer: The optimizer.
        captured: Addresses of captured memory.
    """
    kind: Any = type(optimizer)
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if kind.state_dict is torch.optim.Optimizer.state_dict and not hooks:
        return []
    if not any(one.state for one in list_with_inner([optimizer])):
        return []
    handed = optimizer.state_dict()
    unusual = {key: value for key, value in handed.items() if str(key).partition(".")[0] not in _USUAL}
    return [str(key) for key, value in unusual.items() if not _is_captured(value, captured)]


def _is_captured(value: Any, captured: Collection[int]) -> bool:
    """Return whether a value has only captured tensors in it, or another optimizer's state."""
    if isinstance(value, Mapping) and all(key in value for key in _USUAL):
        return True  # an optimizer inside this one is checked by itself
    leaves = (leaf for leaf in walk_leaves(value) if leaf is not None)
    return all(isinstance(leaf, torch.Tensor) and _find_address(leaf) in captured for leaf in leaves)
