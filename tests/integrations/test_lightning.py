"""PyTorch Lightning on two ranks: killed in mid-epoch, `fit()` goes on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest

from .recovery import Recovery

STEPS = 24  # an epoch has 17 batches, which are 9 steps; validation after each fourth batch
PL: dict[str, Any] = {"stack": "lightning", "steps": STEPS}


def test_the_ranks_are_killed(recovery: Recovery) -> None:
    """No hook of a callback is called twice or left out, validation included."""
    recovery.comes_back(13, **PL)


def test_a_node_is_lost(recovery: Recovery) -> None:
    """With its agent and its memory: what it had comes from the other one."""
    recovery.comes_back(13, lose=["n2"], **PL)


@pytest.mark.long
@pytest.mark.parametrize("step", [8, 9, 10, 12, 14, 18])
def test_around_a_validation_and_the_end_of_an_epoch(recovery: Recovery, step: int) -> None:
    recovery.comes_back(step, **PL)
