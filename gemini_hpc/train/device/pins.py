"""Replica memory that a device copies to on its own: pinned in place, for as long as it is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from gemini_hpc.train.device import cuda
from gemini_hpc.train.device.memory import Slot


class Pin(Protocol):
    """Of one mapping."""

    def release(self) -> None:
        """Before the mapping ends; the device is done with it."""


class Pins:
    """Of mapped slots, each pinned once; they stay mapped until they are released here. For one thread at a time."""

    def __init__(self, pin: Callable[[torch.Tensor], Pin], refused: Callable[[str], None]) -> None:
        """pin: raises RuntimeError; refused: told once, with the reason. After that nothing more is pinned."""
        self._pin, self._refused = pin, refused
        self._pinned: dict[int, tuple[Slot, Pin]] = {}
        self.problem = ""

    def add(self, slots: Iterable[Slot]) -> bool:
        """Pin those that are not. They must be populated. Whether all are."""
        for slot in slots:
            at = slot.bytes.data_ptr()
            if at in self._pinned:
                continue
            if self.problem:
                return False
            try:
                self._pinned[at] = slot, self._pin(slot.bytes)
            except RuntimeError as error:
                self.problem = str(error)
                self._refused(self.problem)
                return False
        return True

    def keep(self, slots: Iterable[Slot]) -> None:
        """Release all others: the device is done with them."""
        kept = {slot.bytes.data_ptr() for slot in slots}
        for at in [at for at in self._pinned if at not in kept]:
            _, pin = self._pinned.pop(at)
            pin.release()

    def close(self) -> None:
        """Release all."""
        self.keep(())


def _of_training(device: torch.device | None) -> Callable[[torch.Tensor], Pin] | None:
    return (lambda memory: cuda.Pinned(memory, device.index)) if device is not None else None


# How slots are pinned for copies from this device; None where the training has nothing on any. Tests bring others.
of_training: Callable[[torch.device | None], Callable[[torch.Tensor], Pin] | None] = _of_training
