"""Pinned replica memory: a device copies directly into it while it is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from gemini_hpc.train.device import cuda
from gemini_hpc.train.device.memory import TensorSlot


class Pin(Protocol):
    """A pinned mapping."""

    def release(self) -> None:
        """Unpin the mapping. Call before the mapping ends, when the device has finished its copies."""


class Pins:
    """The pinned slots of a training, each pinned once.

    Slots stay mapped until they are released here. Only one thread at a time may use this object.
    """

    def __init__(self, pin: Callable[[torch.Tensor], Pin], on_refusal: Callable[[str], None]) -> None:
        """Create an empty set of pins.

        Args:
            pin: Pins a mapping. Raises RuntimeError.
            on_refusal: Called once, with the reason, when `pin` fails. Nothing more is pinned after that.
        """
        self._pin, self._on_refusal = pin, on_refusal
        self._pinned: dict[int, tuple[TensorSlot, Pin]] = {}
        self.problem = ""

    def add(self, slots: Iterable[TensorSlot]) -> bool:
        """Pin the slots that are not pinned yet. Return whether all are pinned now.

        The slots must be populated.
        """
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
                self._on_refusal(self.problem)
                return False
        return True

    def release_others(self, slots: Iterable[TensorSlot]) -> None:
        """Release all slots but these. The device must have finished its copies to the released slots."""
        kept = {slot.bytes.data_ptr() for slot in slots}
        for at in [at for at in self._pinned if at not in kept]:
            _, pin = self._pinned.pop(at)
            pin.release()

    def close(self) -> None:
        """Release all slots."""
        self.release_others(())


def _choose_pin(device: torch.device | None) -> Callable[[torch.Tensor], Pin] | None:
    return (lambda memory: cuda.Pinned(memory, device.index)) if device is not None else None


# Makes the function that pins slots for copies from this device; None for state on no device. Tests replace it.
choose_pin: Callable[[torch.device | None], Callable[[torch.Tensor], Pin] | None] = _choose_pin
