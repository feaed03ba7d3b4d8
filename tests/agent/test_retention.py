"""When what is held after a job's end is freed: the decision, in every state."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gemini_hpc.agent.retention import MemoryFacts, decide

KEPT = MemoryFacts(ended_s=60.0, kept_s=600.0, unsaved_s=30.0)
SHORT, FAR_BELOW = "free memory has fallen below the floor", "free memory has fallen far below the floor"


@pytest.mark.parametrize(
    "state, action, reason",
    [
        ({}, "stay", ""),
        ({"ended_s": 600.1}, "save", "the retention time of 600 s is over"),
        ({"ended_s": 600.1, "waits": True}, "save", "has waited, for 600 s"),
        ({"ended_s": 600.1, "saving": True}, "stay", ""),
        ({"succeeded": True}, "release", "the training succeeded"),
        ({"succeeded": True, "saving": True}, "stay", ""),
        ({"holds": False}, "release", "it holds nothing"),
        ({"holds": False, "ended_s": 29.0, "unsaved_s": 0.0}, "stay", ""),
        ({"holds": False, "saving": True}, "stay", ""),
        ({"short": True}, "save", SHORT),
        ({"short": True, "saving": True}, "release", FAR_BELOW),
        ({"unsaved": True}, "salvage", ""),
        ({"unsaved": True, "ended_s": 29.0}, "stay", ""),
        ({"unsaved": True, "unsaved_s": 0.0}, "stay", ""),
        ({"unsaved": True, "short": True}, "save", SHORT),
        ({"unsaved": True, "ended_s": 600.1}, "save", "is over"),
    ],
)
def test_what_is_done(state: dict[str, Any], action: str, reason: str) -> None:
    found, why = decide(replace(KEPT, **state))
    assert found == action and reason in why and bool(reason) == bool(why)


def test_in_no_state_is_anything_lost_that_need_not_be() -> None:
    for ended_s, flags in product((0.0, 60.0, 700.0), product((False, True), repeat=6)):
        names = ("waits", "succeeded", "holds", "short", "saving", "unsaved")
        held = replace(KEPT, ended_s=ended_s, **dict(zip(names, flags, strict=True)))
        action, reason = decide(held)
        if held.saving:  # it goes on, unless the node needs the memory now
            assert action in ("stay", "salvage") or held.short, held
        if action == "release" and not held.saving:
            assert held.succeeded or not held.holds, held
        if action == "stay" and not held.saving:
            assert not held.short and not held.succeeded and ended_s <= held.kept_s, held
        assert bool(reason) == (action in ("release", "save")), held
