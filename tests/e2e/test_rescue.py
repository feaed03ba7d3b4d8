"""Two nodes that hold each other's copies are cut at once: what lives in the others' ranks brings the job back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from training import Training

pytestmark = pytest.mark.cluster

Train = Callable[..., Training]
NODES = 6
CUT_AT = 8
ITERATION_S = 0.8


@pytest.mark.parametrize("reset", [False, True], ids=["silent", "reset"])
def test_a_whole_group_is_cut(train: Train, references: dict[str, Training], reset: bool) -> None:
    """reset: the survivors' collectives fail at once. The cut is in the middle of an iteration: between an optimizer
    step and `step()` the survivors have the tensors of a version of which nobody knows the lost ranks' generators."""
    if not references:
        references["ddp"] = train("reference", "-N4")
        references["ddp"].finish()
    job = train("rescue", "-N4", "--gemini-replicas=2", iteration_s=ITERATION_S)
    job.reach(1)
    lost = job.hosts()[2:]
    job.reach(CUT_AT)
    # The line is written before step(), and seen late on a busy machine.
    time.sleep(max(0.0, job.steps()[-1]["time"] + 0.4 * ITERATION_S - time.time()))
    for node in lost:
        job.cluster.power_off(node, reset=reset)
    job.finish()
    job.assert_same_as(references["ddp"])
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout
    events = json.loads(done)["events"]
    story = "\n".join(f"{e['t']:.3f} {e['host']} {e['name']} {e['version']} {e['detail']}" for e in events)
    assert " rescued " in story, story
    assert job.repeated() <= 1 and not set(lost) & set(job.hosts()), story + job.output()
    assert "resumed at version" in job.output(), job.output()
