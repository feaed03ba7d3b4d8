"""Collectives of ours over a gloo whose threads get the processor late."""

from __future__ import annotations

import pytest

from tests.train.launch import Run

pytestmark = pytest.mark.slow


def test_gloo_holds_no_tensor_once_a_collective_returns() -> None:
    """Count held tensors: a process that ends while gloo holds one aborts, and its exit status is lost."""
    [result] = Run(None, 1, {"program": "tests.train.late_gloo"}).wait()
    assert result["held"] == {"gather_bytes": 0, "round": 0}
