"""The MPI example on a real cluster: a node is cut, the requeued job ends with the field of one process."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from heat import Heat, plates
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

N, STEPS = 300, 50
OUTAGE_S = 40
RUN_DIR = "/run/gemini-hpc"
LONG = 150  # half a minute: a first version is on the tier by then, also on a busy machine


def wanted(steps: int) -> str:
    """Return the digest of the final field."""
    return hashlib.sha256(next(islice(plates(N), steps, None)).tobytes()).hexdigest()


@pytest.mark.parametrize(
    "how",
    [
        "mpirun",
        "mpiexec",
        pytest.param(
            "pmix", marks=pytest.mark.witness("an MPI program loses a node: the result is that of one process")
        ),
    ],
)
def test_a_node_is_cut(cluster: Cluster, how: str) -> None:
    job = Heat.submit(cluster, how, n=N, steps=STEPS, step_s=0.1)
    job.reach(15)
    host = job.hosts()[1]
    cluster.cut_power(host)
    assert job.finish() == wanted(STEPS)
    assert "from memory" in job.said(), job.said()
    steps = [line["step"] for line in job.lines("step")]
    assert set(steps) == set(range(1, STEPS + 1)) and len(steps) - STEPS <= 1, steps
    assert job.agrees()


def cut_for_a_while(
    cluster: Cluster, how: str, outage_s: float = OUTAGE_S, prepare: Callable[[str], Any] = lambda host: None
) -> Heat:
    """Start a job, and cut the power of one of its nodes, without which it cannot go on.

    prepare: called with the node when it has booted.

    After OUTAGE_S slurmctld no longer wants to end the job there, so the node's slurmd is not told to forget it.
    """
    for node in cluster.node_names[3:]:
        cluster.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test"])
    job = Heat.submit(cluster, how, n=N, steps=STEPS, step_s=0.1)
    job.reach(15)
    host = job.hosts()[1]
    cluster.cut_power(host)
    until(lambda: job.slurm()["JobState"] == "PENDING", 60, what="the requeue")
    time.sleep(outage_s)
    # Slurm takes a node that registers into service at once; it is to start nothing there before it is prepared
    cluster.run(["scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=test"])
    cluster.restore_power(host)
    prepare(host)
    time.sleep(3)  # before 23.11 slurmd runs no prolog of a job that comes back within 2 s of its end on the node
    cluster.resume(host)
    return job


def test_a_start_that_lacks_an_agent_is_sent_back(cluster: Cluster) -> None:
    """No agent can be started on the node that comes back. `gemini-hpc run` does not begin anew."""
    blocked = list[str]()

    def block(host: str) -> None:
        cluster.exec(host, ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", RUN_DIR])
        blocked.append(host)

    job = cut_for_a_while(cluster, "pmi2", 1.0, block)
    sent_back = rf"run: no agent answers on {blocked[0]}; step \d+ would be lost: requeuing it"
    until(lambda: re.search(sent_back, job.said()), 60, what="the start without an agent")
    cluster.exec(blocked[0], ["umount", RUN_DIR])
    assert job.finish() == wanted(STEPS)
    assert "from memory" in job.said(), job.said()
    assert len(job.lines("step")) - STEPS <= 1, job.lines("step")
    assert job.agrees()


def test_a_node_is_cut_and_serves_its_job_again(cluster: Cluster) -> None:
    """PMIx's files on that node's disk are no obstacle."""
    job = cut_for_a_while(cluster, "pmix")
    assert job.finish() == wanted(STEPS)
    assert "from memory" in job.said(), job.said()
    steps = [line["step"] for line in job.lines("step")]
    assert len(steps) - STEPS <= 1, steps
    assert job.agrees()


def test_a_program_chooses_its_tier_and_fewer_nodes_are_left(cluster: Cluster, tier: Path) -> None:
    """Without a word of it in the submission: new agents hear of it from the ranks. The job's user lets it go on with
    two nodes: two ranks load what three have saved."""
    program = ("--tier", str(tier), "--tier-interval-s", "1")
    job = Heat.submit(cluster, "pmi2", n=N, steps=LONG, step_s=0.2, program=program)
    until(lambda: any(tier.glob(f"gemini-{job.id}/default/*/manifest.*")), 60, what="a version on the tier")
    told = cluster.run(["gemini-hpc", "inspect", str(job.id)], user="alice").stdout
    assert f"tier {tier}: version " in " ".join(told.split()), told
    assert "traffic: background over mpi: " in " ".join(told.split()), told
    hosts = job.hosts()
    spared = [node for node in cluster.node_names if node not in hosts][:2]
    for node in set(cluster.node_names) - set(spared):
        cluster.cut_power(node)
    # Nobody is left to tell: Slurm finds out by itself.
    until(lambda: job.slurm()["JobState"] == "PENDING", 90, what="the requeue")
    cluster.run(["scontrol", "update", f"JobId={job.id}", "NumNodes=2", "NumTasks=2"])
    assert job.finish() == wanted(LONG)
    said = job.said()
    assert "the job now has 2 nodes: the step starts 2 tasks instead of 3" in said and "from the tier" in said, said
    lives = job.lines("start")
    assert [life["ranks"] for life in lives] == [3, 2] and lives[1]["start"] > 0
    assert job.agrees()
