"""Parity in place of copies, on a real cluster: a node of a group is cut, and the job is what it would have been."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training import Training

Train = Callable[..., Training]
Reference = Callable[[str], Training]
NODES = 6
CUT_AT = 15


@pytest.mark.parametrize(("parallel", "victim"), [("fsdp2", 1), ("ddp", 2)])
def test_a_node_of_three_is_cut(train: Train, reference: Reference, parallel: str, victim: int) -> None:
    wanted = reference(parallel)
    job = train("xor", "--gemini-redundancy=xor:3", parallel=parallel)
    job.reach(CUT_AT)
    job.cluster.power_off(job.hosts()[victim])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version 1" in job.output(), job.output()


def test_nodes_of_four_are_cut_one_after_the_other(train: Train) -> None:
    """The second one as soon as the job has come as far as before: what the first one's replacement has made again is
    what it is made of."""
    wanted = train("four", "-N4", parallel="fsdp2")
    wanted.finish()
    job = train("xor4", "-N4", "--gemini-redundancy=xor:4", parallel="fsdp2", iteration_s=0.3)
    job.reach(CUT_AT)
    job.cluster.power_off(job.hosts()[3])
    job.wait("the first recovery", lambda: any(line["restart"] == 1 for line in job.steps()), 90)
    job.reach(CUT_AT + 10)
    job.cluster.power_off(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 2 and job.output().count("resumed at version") == 2, job.output()
