"""What the engine tells its parts when it begins to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.format.slot_header import SlotLayout
from gemini_hpc.train.engine import RunningEngine
from gemini_hpc.train.state.layout import Plan

LAYOUT = SlotLayout.plan(4096, 1 << 20, 1 << 18)
WHOLE = LAYOUT.small_offset + LAYOUT.small_capacity // 2


@pytest.mark.parametrize(("blocks", "share"), [(0, 1), (1, 1 / 3), (2, 2 / 3)])
def test_the_first_plan_counts_what_goes_to_one_other_rank_of_a_stripe(blocks: int, share: float) -> None:
    running = SimpleNamespace(
        plan=Plan(cast(Any, None), b"", LAYOUT, frozenset(), 0, {}),
        _engine=SimpleNamespace(pushed=True),
        _session=SimpleNamespace(redundancy=Redundancy(4, 4, blocks), outgoing=[1, 2, 3]),
        _parity=None,  # as while the first plan is made
    )
    assert RunningEngine._compute_copy_bytes(cast(Any, running)) == int(WHOLE * share)
