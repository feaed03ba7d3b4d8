"""Trainings whose ranks have different parts of a model, beside real agents: killed, they go on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .agents import RealJob
from .conftest import HOST, STEPS
from .launch import Run, train

pytestmark = pytest.mark.slow

PROGRAM = "tests.train.parallel_program"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        pytest.param("tp", False, id="tp, killed"),
        pytest.param(
            *("pipeline", True),
            marks=pytest.mark.witness("ranks of a pipeline get their parts of the model back, bit for bit"),
            id="pipeline, node lost",
        ),
        pytest.param("following", True, id="an encoder that follows, node lost"),
    ],
)
def test_each_rank_gets_its_part_back(
    make_agents: Callable[..., RealJob], start: Callable[..., Run], kind: str, lost: bool
) -> None:
    options: dict[str, Any] = {"program": PROGRAM, "kind": kind, "steps": STEPS}
    whole = train(None, 2, **options)
    assert kind != "pipeline" or whole[0]["digest"] != whole[1]["digest"], "the stages are not alike"
    job = make_agents(2, 2)
    start(job, **options, kwargs=HOST, die_at=25).wait(codes=(1,))
    if lost:
        job.all["n2"].die()
    job.requeue(["n1", "n3" if lost else "n2"])
    results = start(job, **options, kwargs=HOST, seed=9).wait()
    assert {r["start"] for r in results} in ({24}, {25}), "one step repeated at most"
    for a, b in zip(whole, results, strict=True):
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > b["start"]}
        assert b["digest"] == a["digest"]
        assert b["report"]["state"] == "protected" and not b["report"]["unsaved"], b["report"]
