"""Ranks that mean different moments of a training by a version count differently (core.moments)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemini_hpc.core.moments import UNKNOWN, add_marks, is_common

from .agents import RealJob
from .conftest import HOST
from .launch import Run
from .moment_trainings import KINDS, RANDOM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return Run(None, 4, {"programs": ["moments", "honest"]}).wait(120.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_common_exactly_where_all_ranks_mean_the_same_moment(
    kind: str, four: list[dict[str, Any]]
) -> None:
    assert not any(one["moments"]["problem"] for one in four)
    groups = [[0, 1], [2, 3]] if kind == "pipeline" else [[0, 1, 2, 3]]
    common = apart = 0
    for run in zip(*(one["moments"]["runs"][kind] for one in four), strict=True):
        for calls in zip(*run, strict=False):  # the version's number is the number of the call
            meant = all(len({calls[rank][0] for rank in group}) == 1 for group in groups)
            assert is_common(add_marks(mark for _, mark in calls)) == meant, calls
            common, apart = common + meant, apart + (not meant)
    assert common > RANDOM and apart > RANDOM


def test_what_programs_do_beside_their_iterations_is_no_difference(four: list[dict[str, Any]]) -> None:
    honest = [one["honest"] for one in four]
    assert not any(one["problem"] for one in honest)
    for marks in zip(*(one["marks"] for one in honest), strict=True):
        assert UNKNOWN not in marks and add_marks(marks) == 0
    assert add_marks(one["unknown"] for one in honest) == UNKNOWN


@pytest.mark.witness("ranks that count their steps differently are told, and never resumed as a mixture")
@pytest.mark.parametrize("deed", ["skip", "twice"])
def test_a_mixture_is_void_and_told_and_not_resumed(
    deed: str, make_agents: Callable[..., RealJob], start: Callable[..., Run]
) -> None:
    job = make_agents(2, 2)
    common = 11
    options: dict[str, Any] = {"program": "tests.train.miscounting", "iterations": 90, "kwargs": HOST}
    run = start(job, **options, common=common, deeds={f"1 {common + 1}": deed}, die_at=80)
    run.wait(codes=(1,))
    said = [line for line in "\n".join(run.stderr).splitlines() if "of different moments of the training" in line]
    calls = "1 step() call fewer" if deed == "skip" else "1 step() call more"
    assert len(said) == 1 and f"rank 1 has made {calls}" in said[0], run.stderr
    void = int(said[0].partition("version ")[2].partition(" ")[0])  # the first that both ranks had time to save
    assert void > common + (deed == "twice")
    job.requeue(["n1", "n2"])
    results = start(job, **options, common=90, deeds={}).wait()
    assert {r["begun"] for r in results} == {common + (deed == "twice")}, "the last one that both ranks meant alike"
    assert all(r["report"]["state"] == "protected" and r["report"]["sealed"][1] >= 89 for r in results)


def test_a_training_inside_join_is_told_at_its_first_step(
    make_agents: Callable[..., RealJob], start: Callable[..., Run]
) -> None:
    job = make_agents(2, 2)
    options: dict[str, Any] = {"program": "tests.train.miscounting", "kwargs": HOST, "deeds": {}, "common": 3}
    run = start(job, **options, iterations=4, join=True)
    run.wait()
    assert "\n".join(run.stderr).count("runs inside DDP.join") == 1
