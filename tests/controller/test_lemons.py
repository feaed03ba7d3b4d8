"""The controller's memory of nodes that did harm: kept, bounded, aged out, shown, and heeded."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc import clock
from gemini_hpc.cli.inspect import render
from gemini_hpc.controller import lemons
from gemini_hpc.controller.lemons import FILE, MOST_NODES, MOST_VISITS, Lemons
from gemini_hpc.controller.reservation import Held
from gemini_hpc.query.inspect_document import build_inspect_document

from .test_requeue import PENDING, ScriptedSlurm, nothing


@pytest.fixture
def kept(tmp_path: Path) -> Lemons:
    return Lemons(str(tmp_path), 30)


def later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    now = time.time()
    monkeypatch.setattr(clock, "time", lambda: now + days * 86400)


def test_it_outlives_the_controller(kept: Lemons, tmp_path: Path) -> None:
    kept.add_visit("n2", "fenced", 7, "no answer")
    kept.add_visit("n2", "fenced", 7, "no answer")
    kept.add_visit("n3", "unhealthy", 8, "the health check is red")
    again = Lemons(str(tmp_path), 30)
    assert (again.count_visits("n2"), again.count_visits("n3"), again.count_visits("n1")) == (2, 1, 0)
    assert [(row.host, row.count, row.kinds) for row in again.list_rows(("n1", "n3", "n2"))] == [
        ("n2", 2, ("fenced", "fenced")),
        ("n3", 1, ("unhealthy",)),
    ]


def test_it_ages_out(kept: Lemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.add_visit("n2", "fenced", 7, "no answer")
    later(monkeypatch, 29)
    kept.add_visit("n2", "unhealthy", 8, "the health check is red")
    assert kept.count_visits("n2") == 2
    later(monkeypatch, 31)
    assert kept.count_visits("n2") == 1 and Lemons(str(tmp_path), 30).list_rows(("n2",))[0].kinds == ("unhealthy",)
    later(monkeypatch, 99)
    assert not kept.list_rows(("n2",)) and Lemons(str(tmp_path), 30).count_visits("n2") == 0


def test_one_job_says_it_once(kept: Lemons) -> None:
    for _ in range(3):
        kept.add_visit("n2", "failed", 7, "rank 1")
    kept.add_visit("n2", "failed", 8, "rank 1")
    assert kept.count_visits("n2") == 2


def test_it_is_bounded(kept: Lemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lemons, "MOST_NODES", 20)
    for at in range(2 * MOST_VISITS):
        kept.add_visit("n0", "fenced", at, "x" * 10_000)
    assert kept.count_visits("n0") == MOST_VISITS
    for at in range(1, 60):
        kept.add_visit(f"n{at}", "fenced", at, "x" * 10_000)
    assert len(kept._visits) == 20 and kept.count_visits("n59") == 1 and kept.count_visits("n0") == 0
    assert (tmp_path / FILE).stat().st_size * MOST_NODES / 20 < lemons.MOST_BYTES


def test_off_or_unreadable(tmp_path: Path) -> None:
    Lemons(str(tmp_path), 0).add_visit("n2", "fenced", 7, "")
    assert not (tmp_path / FILE).exists()
    (tmp_path / FILE).write_text('{"n2": [{"t": "x"}]}')
    broken = Lemons(str(tmp_path), 30)
    broken.add_visit("n3", "fenced", 7, "")
    assert Lemons(str(tmp_path), 30).count_visits("n3") == 1
    nowhere = Lemons(str(tmp_path / "none"), 30)
    nowhere.add_visit("n3", "fenced", 7, "")
    assert nowhere.count_visits("n3") == 1, "what cannot be written is known until the end"


def test_a_node_that_did_harm_is_chosen_last(kept: Lemons) -> None:
    async def reserved(wanted: int, *, busy: bool = False) -> list[str]:
        slurm: Any = ScriptedSlurm()
        if busy:
            slurm.states |= {"n4": "ALLOCATED", "n5": "ALLOCATED"}
        held = Held(
            slurm=slurm,
            raw_id=1,
            user_id=5001,
            log_event=nothing,
            write_journal=nothing,
            wanted=wanted,
            count_visits=kept.count_visits,
        )
        job = dataclasses.replace(PENDING, partition="main")
        await held.reserve_nodes(job, await slurm.read_nodes(), ["n1", "n3"], ["n2"])
        (found,) = slurm.held.values()
        return list(found)

    assert asyncio.run(reserved(1)) == ["n1", "n3", "n4"]
    kept.add_visit("n4", "fenced", 7, "")
    assert asyncio.run(reserved(1)) == ["n1", "n3", "n5"]
    assert asyncio.run(reserved(2)) == ["n1", "n3", "n5", "n4"], "no other one is left"
    assert asyncio.run(reserved(1, busy=True)) == ["n1", "n3", "n5"]


def test_inspect_shows_those_of_the_job(kept: Lemons) -> None:
    kept.add_visit("n2", "fenced", 7, "of another job")
    kept.add_visit("n2", "failed", 8, "of another job")
    slurm = {"state": "RUNNING", "nodes": "n1,n2"}
    document = build_inspect_document(9, [], [], slurm, (), "controller", time.time(), kept.list_rows(("n1", "n2")))
    [row] = document["lemons"]
    assert (row["host"], row["count"], row["kinds"]) == ("n2", 2, ["fenced", "failed"])
    assert "n2 had 2 incidents lately: failed, fenced" in render(document)
    assert "of another job" not in str(document)
