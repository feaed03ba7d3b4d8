"""Checks of the Checkpointer's arguments, and their division by kind of state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from gemini_hpc.client import joining
from gemini_hpc.core.numbers import check_argument, check_count, check_timeout
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state.collectives import TorchRanks
from gemini_hpc.train.state.optimizers import list_with_inner
from gemini_hpc.train.state.ownership import Ownership
from gemini_hpc.train.state.tree import Stateful

# What to pass in place of an object that cannot save its state.
_INSTEAD = {
    "loader": "use gemini_hpc.StatefulLoader, or leave loader out (the data then begins anew after a resume)",
}


def _as_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, Sequence):
        if not value:
            raise ValueError(f"{name} is an empty list")
        return list(value)
    return [value]


def sort_out(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any, extra: Mapping[str, Any] | None
) -> tuple[list[torch.optim.Optimizer], dict[str, Stateful], dict[str, nn.Module]]:
    """Sort the state arguments into optimizers, stateful objects and further modules.

    The optimizers include those inside other optimizers. Stateful objects have `state_dict` and `load_state_dict`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A list of optimizers or schedulers is empty.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
    optimizers = _as_list(optimizer, "optimizer")
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(item).__name__}, wanted a torch.optim.Optimizer")
    stateful: dict[str, Stateful] = {}
    modules: dict[str, nn.Module] = {}
    given: list[tuple[str, Any]] = [("scaler", scaler), ("loader", loader)]
    if scheduler is not None:
        given += [(f"scheduler.{i}", s) for i, s in enumerate(_as_list(scheduler, "scheduler"))]
    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
        raise TypeError(
            f"extra is a {type(extra).__name__}, wanted a dict of objects by name, such as {{'ema': ema}}"
        )
    for key, value in (extra or {}).items():
        if isinstance(value, nn.Module):
            modules[key] = value
        else:
            given.append((f"extra.{key}", value))
    for key, value in given:
        if value is None:
            continue
        if not isinstance(value, Stateful):
            what = f"{key} is a {type(value).__name__}, which has no state_dict() and load_state_dict()"
            raise TypeError(f"{what}: {_INSTEAD.get(key, 'give it both, or leave it out')}")
        stateful[key] = value
    return list_with_inner(optimizers), stateful, modules


def check(
    name: str,
    start: Any,
    max_repeated: int,
    seal_timeout_s: float,
    hold_s: float,
    audit: int,
    ownership: Ownership,
    traffic: Traffic,
) -> None:
    """Check the arguments that are numbers, names and choices.

    Raises:
        TypeError: `traffic` is not a `Traffic`, the name is no text, `start` is no path, or a number is none.
        ValueError: An argument is out of range.
    """
    if not isinstance(traffic, Traffic):
        raise TypeError(f"traffic is a {type(traffic).__name__}, wanted a gemini_hpc.Traffic")
    if max_repeated not in (1, 2):
        raise ValueError(f"max_repeated is {max_repeated}: wanted 1 or 2")
    if ownership not in get_args(Ownership):
        raise ValueError(f"ownership is {ownership!r}: wanted 'split' or 'full'")
    check_count("audit", audit, 0)
    check_timeout("seal_timeout_s", seal_timeout_s)
    check_argument("hold_s", hold_s, "a number of seconds, 0 or more", lambda wait_s: wait_s >= 0)
    joining.check_name(name)
    if start and not isinstance(start, str | os.PathLike):
        raise TypeError(f"start is a {type(start).__name__}, wanted the path of a checkpoint")


def build_ranks(group: Any) -> TorchRanks:
    """Return the ranks of a `process_group=` argument.

    Raises:
        TypeError: `group` is no process group.
        ValueError: This rank is not in the group, or torch.distributed does not know the group.
    """
    if group is None:
        return TorchRanks()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is one that this rank is not in: make the Checkpointer only on the ranks of the group"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group is a {type(group).__name__}, wanted a torch.distributed.ProcessGroup")
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError("process_group is unknown to torch.distributed: make it with torch.distributed.new_group")
    return TorchRanks(group)
