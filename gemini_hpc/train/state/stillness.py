"""Detection of weights that change although no optimizer steps, as where a fused backward pass (LOMO) writes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gemini_hpc.train.state.sample import sample_elements

_LOOKS = 100  # comparisons made at most, because each waits for the device
_SAMPLED = 16


class Stillness:
    """A comparison of a few elements of some weights between two `step()` calls without an optimizer step."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []
        self._looks = 0

    def forget(self) -> None:
        """Begin anew, after an optimizer step."""
        self._seen = []

    def detect_change(self, weights: Iterable[torch.Tensor]) -> bool:
        """Return whether the weights differ from those of the call before (`forget` restarts the comparison).

        After 100 comparisons without a difference no more are made.
        """
        if self._looks == _LOOKS:
            return False
        trained = [weight for weight in weights if weight.requires_grad and weight.numel() and _is_plain(weight)]
        chosen = trained[:: max(1, -(-len(trained) // _SAMPLED))]
        before, self._seen = (
            self._seen,
            [sample_elements(weight, flat=weight.is_contiguous()).cpu().clone() for weight in chosen],
        )
        same = len(before) == len(chosen) and all(map(torch.equal, before, self._seen))
        self._looks += same
        return bool(before) and not same


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout == torch.strided
