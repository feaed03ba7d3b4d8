"""Parity in place of copies, on a real cluster: nodes of a group are cut, and the job is what it would have been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_tier import saved
from training import Training
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Train = Callable[..., Training]
Reference = Callable[[str], Training]
NODES = 6
CUT_AT = 15


@pytest.fixture
def tier(cluster: Cluster) -> Path:
    path = cluster.home("alice") / "tier"
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    return path


@pytest.mark.parametrize(("parallel", "victim"), [("fsdp2", 1), ("ddp", 2)])
def test_a_node_of_three_is_cut(train: Train, reference: Reference, parallel: str, victim: int) -> None:
    wanted = reference(parallel)
    job = train("xor", "--gemini-redundancy=xor:3", parallel=parallel)
    job.reach(CUT_AT)
    job.cluster.power_off(job.hosts()[victim])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version 1" in job.output(), job.output()


@pytest.fixture
def on_four(train: Train, references: dict[str, Training]) -> Training:
    """An undisturbed run on four nodes."""
    if "four" not in references:
        references["four"] = train("four", "-N4", parallel="fsdp2")
        references["four"].finish()
    return references["four"]


def test_nodes_of_four_are_cut_one_after_the_other(train: Train, on_four: Training) -> None:
    """The second one as soon as the job has come as far as before: what the first one's replacement has made again is
    what it is made of."""
    job = train("xor4", "-N4", "--gemini-redundancy=xor:4", parallel="fsdp2", iteration_s=0.3)
    job.reach(CUT_AT)
    job.cluster.power_off(job.hosts()[3])
    job.wait("the first recovery", lambda: any(line["restart"] == 1 for line in job.steps()), 90)
    job.reach(CUT_AT + 10)
    job.cluster.power_off(job.hosts()[1])
    job.finish()
    job.assert_same_as(on_four)
    assert job.repeated() <= 2 and job.output().count("resumed at version") == 2, job.output()


def test_two_nodes_of_a_group_are_cut_with_two_blocks(train: Train, on_four: Training) -> None:
    job = train("rs", "-N4", "--gemini-redundancy=rs:2+2", parallel="fsdp2", iteration_s=0.3)
    job.reach(CUT_AT)
    asked = job.cluster.run(["gemini-hpc", "inspect", "--json", str(job.id)], user="alice")
    found = json.loads(asked.stdout)
    survival = found["trainings"][0]["survival"]
    assert (found["redundancy"], found["replicas"], found["parity"]) == ("rs", 4, 2)
    assert [row["probability"] for row in survival["survives"]] == [1.0, 1.0, 0.0], survival
    hosts = job.hosts()
    for host in (hosts[1], hosts[2]):
        job.cluster.power_off(host)
    job.finish()
    job.assert_same_as(on_four)
    assert job.repeated() <= 1 and "resumed at version 1" in job.output(), job.output()


def test_two_nodes_of_a_group_are_cut(train: Train, reference: Reference, tier: Path) -> None:
    """Memory cannot serve that: `inspect` has said so before, and the job comes back from the tier."""
    wanted = reference("fsdp2")
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=1")
    job = train("both", "--gemini-redundancy=xor:3", *options, parallel="fsdp2")
    job.reach(8)
    until(lambda: saved(tier, job) and saved(tier, job)[0].version >= 8, 60, what="a version on the tier")
    asked = job.cluster.run(["gemini-hpc", "inspect", "--json", str(job.id)], user="alice")
    found = json.loads(asked.stdout)
    hosts = job.hosts()
    survival = found["trainings"][0]["survival"]
    assert (found["redundancy"], found["replicas"]) == ("xor", 3)
    assert [row["probability"] for row in survival["survives"][:2]] == [1.0, 0.0], survival
    assert sorted(hosts[:2]) in survival["fatal"], survival
    for host in hosts[1:]:
        job.cluster.power_off(host)
    job.finish()
    job.assert_same_as(wanted)
    assert "from the tier" in job.output(), job.output()
