"""The state of DDP's communication hooks: PowerSGD's memory of gradients, the progress of post-local SGD.

A hook's state is mostly an object without a `state_dict`. Its attributes are then captured and put back one by one.
Process groups, streams and functions are left out, because each launch makes them itself. Much of the state has the
shape of DDP's buckets, so it is put back only where the buckets are the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_hpc.train.state import encode
from gemini_hpc.train.state.buckets import rebuilds_buckets

_MADE_ANEW = (dist.ProcessGroup, torch.Stream, torch.Event, nn.Module, type, ModuleType)
_OF_TORCH = (
    "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks"  # flags that apply to one backward pass only
)


def _keeps_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether a resumed run has the buckets of the saved one in its first backward pass."""
    never_rebuilt = ddp.find_unused_parameters and not ddp.static_graph
    return rebuilds_buckets(ddp) or (never_rebuilt and getattr(ddp, "mixed_precision", None) is None)


def _list_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return the states of a module's hooks, in order; None for a hook without one."""
    found = []
    for hook, state in ddp._comm_hooks:
        held = getattr(hook, "__self__", None) if state is None else state
        of_torch = type(held).__module__ == _OF_TORCH
        found.append(None if of_torch or callable(held) or isinstance(held, _MADE_ANEW) else held)
    return found


def _read_values(held: Any) -> dict[Any, Any]:
    """Return an object's attributes, or a mapping's items."""
    if isinstance(held, Mapping):
        return dict(held)
    slots = [name for kind in type(held).__mro__ for name in _list_slots(getattr(kind, "__slots__", ()))]
    found = {name: getattr(held, name) for name in slots if hasattr(held, name)}
    return {**found, **getattr(held, "__dict__", {})}


def _list_slots(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _extract_state(value: Any) -> Any:
    """Return a generator's state, and anything else as it is."""
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=True)
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else value


def _put_value(held: Any, name: Any, value: Any) -> None:
    """Put a captured value back where it was, a generator's state into the generator."""
    now = _read_values(held).get(name)
    if isinstance(now, np.random.RandomState):
        now.set_state(value)
    elif isinstance(now, np.random.Generator):
        now.bit_generator.state = value
    elif isinstance(now, random.Random):
        now.setstate(value)
    elif isinstance(now, torch.Generator) and isinstance(value, encode.GeneratorState):
        value.restore(now)
    elif isinstance(held, MutableMapping):
        held[name] = value
    else:
        setattr(held, name, value)


def _has_state_dict(held: Any) -> bool:
    return hasattr(held, "state_dict") and hasattr(held, "load_state_dict")


def _put_values(held: Any, values: Any) -> None:
    if _has_state_dict(held):
        held.load_state_dict(values)
        return
    for key, value in values.items():
        _put_value(held, key, value)


def _name_class(held: Any) -> str:
    return f"{type(held).__module__}.{type(held).__qualname__}"


class CommHooks:
    """The communication hooks of all DDP modules of a training. Hooks may be registered at any time."""

    def __init__(self, ddps: Sequence[DistributedDataParallel]) -> None:
        self._ddps = list(ddps)
        self._kept: dict[tuple[str, Any], bool] = {}  # by hook and attribute: can it be captured

    def _find_hooks(self) -> dict[str, tuple[DistributedDataParallel, Any]]:
        return {
            f"{number}.{position}": (ddp, held)
            for number, ddp in enumerate(self._ddps)
            for position, held in enumerate(_list_states(ddp))
            if held is not None
        }

    def capture(self) -> dict[str, Any]:
        """Return the state of each hook that has one."""
        found = {}
        for name, (ddp, held) in self._find_hooks().items():
            if _keeps_buckets(ddp):
                found[name] = {
                    "class": _name_class(held),
                    "buckets": _read_bucket_settings(ddp),
                    "values": self._capture_state(name, held),
                }
        return found

    def _capture_state(self, name: str, held: Any) -> Any:
        if _has_state_dict(held):
            return held.state_dict()
        return {
            key: _extract_state(value)
            for key, value in _read_values(held).items()
            if self._can_capture(name, key, value)
        }

    def _can_capture(self, name: str, key: Any, value: Any) -> bool:
        if callable(value) or isinstance(value, _MADE_ANEW):
            return False
        if (name, key) not in self._kept:
            try:
                encode.encode(_extract_state(value))
                self._kept[name, key] = True
            except encode.UnknownTypeError:
                self._kept[name, key] = False
        return self._kept[name, key]

    def find_uncaptured(self) -> dict[str, str]:
        """Return the hook states that are not captured, each with the reason."""
        self.capture()
        found = {}
        for name, (ddp, held) in self._find_hooks().items():
            what = f"the state of a communication hook ({type(held).__name__})"
            odd = [key for (hook, key), kept in self._kept.items() if hook == name and not kept]
            if not _keeps_buckets(ddp):
                found[what] = "DDP with static_graph or mixed precision builds its buckets anew after a resume"
            elif odd:
                found[what] = f"its {odd[0]} is a {type(_read_values(held)[odd[0]]).__qualname__}"
        return found

    def restore(self, saved: Mapping[str, Any], *, same_world: bool) -> list[str]:
        """Put captured state back. Return a sentence for each state that begins anew, with the reason."""
        left, hooks = [], self._find_hooks()
        for name, state in saved.items():
            ddp, held = hooks.get(name, (None, None))
            if ddp is None or _name_class(held) != state["class"]:
                why = "no such hook is registered"
            elif not same_world:
                why = "it belongs to another number of ranks"
            elif not _keeps_buckets(ddp) or _read_bucket_settings(ddp) != state["buckets"]:
                why = "the buckets of DDP are not those of the saved run"
            else:
                _put_values(held, state["values"])
                continue
            left.append(f"the state of a communication hook ({state['class'].rpartition('.')[2]}) begins anew: {why}")
        return left


def _read_bucket_settings(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """Return the settings by which DDP deals parameters into buckets."""
    return ddp.bucket_bytes_cap, *getattr(ddp, "bucket_bytes_cap_list", ())
