"""The lines of a user's log about the last stop: changed nodes, repeated steps, duration."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gemini_hpc.agent.peers import round_plan
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.progress import RankPages
from gemini_hpc.client import joining
from gemini_hpc.client.own_progress import OwnProgress
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.progress_page import Progress

BEFORE = {"n1": 0, "n2": 1, "n3": 2}


def record(
    host: str, stop: peer.Stop, noderanks: dict[str, int] | None = BEFORE, restart: int = 0
) -> peer.InventoryRecord:
    return peer.InventoryRecord(host, noderanks, restart, 1, (), (), 1, "i", stop=stop)


def test_agents_put_together_what_each_knows() -> None:
    """n4 takes the place of n2, and knows nothing; the first sign of the stop counts, and the newest step."""
    found = round_plan.merge_stops(
        [
            record("n1", peer.Stop(20.0, ("n2",), reached={"default": 47})),
            record("n3", peer.Stop(19.5, ("n2",), reached={"default": 48, "second": 3})),
            record("n4", peer.Stop(), None, -1),
        ],
        {"n1": 0, "n4": 1, "n3": 2},
    )
    assert found == peer.Stop(19.5, ("n2",), (("n2", "n4"),), {"default": 48, "second": 3})
    again = round_plan.merge_stops(
        [record(host, found, {"n1": 0, "n4": 1, "n3": 2}, 1) for host in ("n1", "n4", "n3")],
        {"n1": 0, "n4": 1, "n3": 2},
    )
    assert again == found, "a later round of the same incarnation"


def test_a_node_that_only_gave_its_place_up_is_not_called_lost() -> None:
    here = Membership()
    here.stop = peer.Stop(lost=("n2",), replaced=(("n2", "n4"), ("n3", "n5")))
    assert here.changes == (
        "node n2 lost; n4 takes its place",
        "node n3 has left the job; n5 takes its place",
    )


def test_the_first_sign_counts_until_a_seal() -> None:
    here = Membership()
    here.record_stop(10.0, "n2")
    here.record_stop(12.0)
    here.record_stop(13.0, "n3")
    assert here.stop == peer.Stop(10.0, ("n2", "n3"))
    here.stop = peer.Stop(10.0, ("n2",), (("n2", "n4"),), {"a": 5, "b": 6})
    here.record_seal("a")
    assert here.stop == peer.Stop(reached={"b": 6}), "the other training has not sealed anything yet"


def test_the_last_step_of_a_killed_rank_is_known() -> None:
    """Its page counts a step as soon as it is completed, not with the next beat a second later."""
    page = OwnProgress(lambda: Progress(version=3))
    pages = RankPages()
    try:
        pages.add(0, page.fd, 0.0)
        assert pages.reached == 3
        page.count_step(4)
        assert pages.reached == 4
        page.count_step(5)
        pages.drop(0)
        assert pages.reached == 5
    finally:
        page.close()
    pages.reset()
    assert pages.reached == 0


@pytest.mark.parametrize(
    ("welcome", "failed_at", "line"),
    [
        ({}, "", "resumed at version 7 from memory (0.25 s)"),
        ({"reached": 7}, "", "resumed at version 7 from memory (0.25 s), no step repeated"),
        (
            {"reached": 8, "stopped_at": 50.0},
            "98.0",
            "resumed at version 7 from memory (0.25 s), 1 step repeated, 2.0 s after the failure",
        ),
        (
            {"reached": 9, "stopped_at": 60.5, "stored": True},
            "",
            "resumed at version 7 from the tier (0.25 s), 2 steps repeated, 39.5 s after the training stopped",
        ),
        ({"reached": 5, "stopped_at": 101.0}, "0.000", "resumed at version 7 from memory (0.25 s)"),
    ],
)
def test_the_line_of_a_resume(
    monkeypatch: pytest.MonkeyPatch, welcome: dict[str, Any], failed_at: str, line: str
) -> None:
    monkeypatch.setitem(os.environ, joining.FAILED_ENV, failed_at)
    found = local.Welcome(7, 1, 2, 0, 2, 2, *Stamp(1, 7), 2, **welcome)
    assert joining.describe_resume(found, 7, 0.25, 100.0) == line
