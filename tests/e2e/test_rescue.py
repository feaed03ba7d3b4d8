"""Two nodes that hold each other's copies are cut at once: what lives in the others' ranks brings the job back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from training import Run, Training

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

Train = Callable[..., Training]
Reference = Callable[..., Run]
CUT_AT = 8
ITERATION_S = 0.8


def test_a_whole_group_is_cut(train: Train, reference: Reference) -> None:
    """In the middle of an iteration: between an optimizer step and `step()` the survivors have the tensors of a
    version of which nobody knows the lost ranks' generators."""
    wanted = reference("ddp", 4)
    job = train("rescue", "-N4", "--gemini-replicas=2", iteration_s=ITERATION_S)
    job.reach(1)
    lost = job.hosts()[2:]
    job.reach(CUT_AT)
    # The line is written before step(), and seen late on a busy machine.
    time.sleep(max(0.0, job.steps()[-1]["time"] + 0.4 * ITERATION_S - time.time()))
    for node in lost:
        job.cluster.cut_power(node)
    job.finish()
    job.assert_same_as(wanted)
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout
    events = json.loads(done)["events"]
    story = "\n".join(f"{e['t']:.3f} {e['host']} {e['name']} {e['version']} {e['detail']}" for e in events)
    assert " rescued " in story, story
    assert job.repeated() <= 1 and not set(lost) & set(job.hosts()), story + job.output()
    assert "resumed at version" in job.output(), job.output()
