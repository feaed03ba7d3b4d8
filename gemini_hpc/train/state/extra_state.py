"""Capture of the state that a module gives by `get_extra_state()`: the scales of FP8 layers, for instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from gemini_hpc.train.state import sharded

KEY = "_extra_state"  # follows the module's name, as in torch's state_dict()


def is_given_by(module: nn.Module) -> bool:
    """Return whether the module gives such state and takes it back."""
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        and kind.set_extra_state is not nn.Module.set_extra_state
    )


def capture(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the state of these modules, by the same names."""
    return {name: sharded.replace_dtensors(module.get_extra_state()) for name, module in modules.items()}


def restore(modules: Mapping[str, nn.Module], saved: Mapping[str, Any], likes: Sequence[DTensor]) -> None:
    """Give saved state back to the modules.

    Args:
        modules: The modules with extra state, by name.
        saved: The saved state, by the same names.
        likes: DTensors of the training.

    Raises:
        ValueError: Other modules had extra state in the saved run.
    """
    if differ := sorted(modules.keys() ^ saved.keys()):
        raise ValueError(f"the saved run and this one differ in what get_extra_state() hands out: {differ[0]}")
    for name, module in modules.items():
        value = saved[name]
        if sharded.has_parts(value):
            value = sharded.Wholes(likes).rebuild(value, module.get_extra_state(), name)
        module.set_extra_state(value)
