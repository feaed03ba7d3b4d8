"""A rank dies inside the optimizer step, at every tensor (JIT, section 4.2.2): what comes back is the version before
or the one after, never a mixture, and the losses are those of a training that nobody has killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .agents import RealJob
from .conftest import HOST
from .launch import Run, train

pytestmark = pytest.mark.slow

TENSORS = 11  # of the training's model
FEW = (0, 5, TENSORS - 1)


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(
            FEW,
            marks=pytest.mark.witness("a rank that dies inside the optimizer leaves no mixture of two versions"),
            id="the first, one in the middle, the last",
        ),
        pytest.param([n for n in range(TENSORS) if n not in FEW], id="all others"),
    ],
)
def test_at_every_tensor(make_agents: Callable[..., RealJob], tensors: Sequence[int]) -> None:
    options: dict[str, Any] = {"kind": "ddp", "norm": "layer", "kwargs": HOST, "sleep_s": 0.02}
    job = make_agents(2, 2)
    done = 0
    for number in tensors:
        run = Run(job, 2, {**options, "steps": done + 6, "die_at_tensor": number})  # type: ignore[arg-type]
        assert run.processes[1].wait(60) == 1, (number, run.processes[1].read())
        for process in run.processes:
            process.signal(signal.SIGKILL)
            process.wait(10)
        job.requeue(["n1", "n2"])
        done += 2  # the third step was under way
    last = {**options, "steps": done + 6, "die_at_tensor": TENSORS}
    results = Run(job, 2, last).wait()  # type: ignore[arg-type]
    assert [r["start"] for r in results] == [done, done], "no completed step was lost in any of these"
    whole = train(None, 2, **{**options, "steps": done + 6})
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    for mine, wanted in zip(results, whole, strict=True):
        assert all(wanted["losses"][step] == loss for step, loss in mine["losses"].items())
