"""A rank dies inside the optimizer step, at every tensor (JIT, section 4.2.2): what comes back is the version before
or the one after, never a mixture, and the losses are those of a training that nobody has killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from .agents import RealJob
from .conftest import HOST
from .launch import Run, train

pytestmark = pytest.mark.slow

MOST = 64  # tensors


def test_at_every_tensor(make_agents: Callable[..., RealJob]) -> None:
    options: dict[str, Any] = {"kind": "ddp", "norm": "layer", "kwargs": HOST, "sleep_s": 0.02}
    job = make_agents(2, 2)
    done, died = 0, 0
    for number in count():
        run = Run(job, 2, {**options, "steps": done + 6, "die_at_tensor": number})  # type: ignore[arg-type]
        code = run.processes[1].wait(60)
        if code == 0:
            results = run.wait()
            break
        assert code == 1 and number < MOST, run.processes[1].read()
        for process in run.processes:
            process.signal(signal.SIGKILL)
            process.wait(10)
        died += 1
        job.requeue(["n1", "n2"])
        done += 2  # the third step was under way
    assert died > 10, "a tensor each"
    assert [r["start"] for r in results] == [done, done], "no completed step was lost in any of these"
    whole = train(None, 2, **{**options, "steps": done + 6})
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    for mine, wanted in zip(results, whole, strict=True):
        assert all(wanted["losses"][step] == loss for step, loss in mine["losses"].items())
