"""Random number generators of a training process: torch (CPU and CUDA), NumPy and Python."""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Return the states of all generators that this process uses, as plain values for `encode`.

    NumPy's is included only if NumPy has been imported, CUDA's only if CUDA has been initialised.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, array.array("Q", words).tobytes(), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [s.cpu() for s in torch.cuda.get_rng_state_all()]
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore the generators to a captured state.

    A generator of this process that is not in the state stays as it is.
    """
    version, words, gauss = state["python"]
    numbers = array.array("Q")
    numbers.frombytes(words)
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
