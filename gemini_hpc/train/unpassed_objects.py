"""Objects with state of a training that live in the process and were not passed to the Checkpointer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from gemini_hpc.train.state.optimizers import shares_state

_SCHEDULER, _SCALER = torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
_KINDS = (torch.optim.Optimizer, _SCHEDULER, _SCALER)
_DEEP, _MANY = 4, 1000  # depth of the search, and size of the largest container to search
_NO_HOLDERS = (nn.Module, torch.Tensor, torch.optim.Optimizer, str, bytes, type)


class UnpassedObjects:
    """The objects with state that were not passed to one Checkpointer.

    Args:
        given: The objects passed to the Checkpointer.
        optimizers: The optimizers of its training.
    """

    _instances: ClassVar[weakref.WeakSet[UnpassedObjects]] = weakref.WeakSet()

    def __init__(self, given: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._given, self._optimizers = list(given), optimizers
        self._instances.add(self)

    def is_passed(self, optimizer: Any) -> bool:
        """Return whether the optimizer was passed, or shares the state of one that was."""
        return any(o is optimizer for o in self._given) or shares_state(optimizer, self._optimizers)

    def is_passed_anywhere(self, optimizer: Any) -> bool:
        """Return whether the optimizer belongs to any training in this process."""
        return any(each.is_passed(optimizer) for each in self._instances)

    def list_classes(self) -> list[str]:
        """Return the classes of all objects that were not passed, for the report."""
        return sorted(f"{type(o).__module__}.{type(o).__qualname__}" for o in self._find_objects(_KINDS, self._given))

    def list_sentences(self) -> list[str]:
        """Return a sentence on this training's schedulers and one on gradient scalers that were not passed.

        An object held by one that was passed belongs to that object's state and is not reported.
        """
        if not self._find_schedulers_and_scalers():
            return []
        gc.collect()  # drop unused objects that only wait for the collector
        found = self._find_schedulers_and_scalers()
        inside = {id(o) for o in _walk_held(found)}
        schedulers = [o for o in found if isinstance(o, _SCHEDULER)]
        outer = [o for o in schedulers if id(o) not in inside] or schedulers
        sentences = []
        if schedulers:
            more = f" (and {len(outer) - 1} more)" if len(outer) > 1 else ""
            sentences.append(
                f"a {type(outer[0]).__name__}{more} of this training's optimizer was not passed: it is not captured "
                "and begins anew after a resume. Pass it: Checkpointer(model, optimizer, scheduler)"
            )
        if len(schedulers) < len(found):
            sentences.append(
                "a GradScaler was not passed: its scale is not captured and begins anew after a resume. Pass it: "
                "Checkpointer(model, optimizer, scaler=scaler)"
            )
        return sentences

    def _find_schedulers_and_scalers(self) -> list[Any]:
        givers = [o for each in self._instances for o in each._given]
        known = {id(o) for o in _walk_held(givers)}
        found = self._find_objects((_SCHEDULER, _SCALER), givers)
        return [o for o in found if id(o) not in known and not (isinstance(o, _SCALER) and not o.is_enabled())]

    def _find_objects(self, kinds: tuple[type, ...], given: Iterable[Any]) -> list[Any]:
        ids = {id(o) for o in given}
        objects = (o for o in gc.get_objects() if issubclass(type(o), kinds) and id(o) not in ids)
        return [
            o
            for o in objects
            if not isinstance(o, _SCHEDULER) or (hasattr(o, "optimizer") and self.is_passed(o.optimizer))
        ]


def _walk_held(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of the objects' attributes, including those in containers."""
    seen: set[int] = set()
    layer = [item for o in objects for item in _list_items(o)]
    for _ in range(_DEEP):
        fresh = {id(o): o for o in layer if id(o) not in seen}
        seen |= fresh.keys()
        yield from fresh.values()
        layer = [item for o in fresh.values() for item in _list_items(o)]


def _list_items(value: Any) -> Iterable[Any]:
    if isinstance(value, _NO_HOLDERS):
        return ()
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        within = value.values() if isinstance(value, Mapping) else value
        return list(within) if len(value) <= _MANY else ()
    return list(getattr(value, "__dict__", {}).values())
