"""The main job with torch: whatever is cut or killed, losses and final state are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from training import Training

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Train = Callable[..., Training]
Reference = Callable[[str], Training]
CUT_AT = 15


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(
            "ddp", marks=pytest.mark.witness("a node dies in mid-training: equal bits, one step repeated at most")
        ),
        "fsdp2",
    ],
)
def test_node_cut(train: Train, reference: Reference, parallel: str) -> None:
    wanted = reference(parallel)
    job = train("cut", "--gemini-replicas=2", parallel=parallel)
    job.reach(CUT_AT)
    job.cluster.power_off(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version" in job.output(), job.output()


def test_node_cut_where_agents_bring_the_copies(train: Train, reference: Reference) -> None:
    """transport="host"; on the way an agent dies, too."""
    wanted = reference("ddp")
    job = train("host", "--gemini-replicas=2", transport="host")
    job.reach(8)
    host = job.hosts()[0]
    pids = job.cluster.exec(host, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()
    job.cluster.exec(host, ["kill", "-9", max(pids, key=int)])
    job.reach(25)
    job.cluster.power_off(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version 2" in job.output(), job.output()


def test_a_cut_before_a_step_that_needs_nobody(train: Train, reference: Reference) -> None:
    """The survivors have all that the optimizer's next step takes; the version before it is not sealed, and never
    will be. They do not take that step: it would be a second one to repeat."""
    wanted = reference("ddp")
    job = train("brink", "--gemini-replicas=2", around="brink.py")
    job.wait("the brink", (job.directory / "brink").exists, 90)
    slurmctld = job.cluster.controller_pid()
    assert slurmctld is not None
    os.kill(slurmctld, signal.SIGSTOP)  # Slurm takes its time, as a large one does
    try:
        job.cluster.power_off(job.hosts()[1])
        (job.directory / "go").touch()
        time.sleep(6)
    finally:
        os.kill(slurmctld, signal.SIGCONT)
    job.finish()
    job.assert_same_as(wanted)
    assert "resumed at version 6" in job.output() and job.repeated() == 1, job.output()


def test_cut_with_reset_survivors_raise_first(train: Train, reference: Reference) -> None:
    """Requirement survivors-raise-first: connections break at once; the ranks are held until Slurm knows of the dead
    node."""
    wanted = reference("ddp")
    job = train("reset", "--gemini-replicas=2")
    job.reach(CUT_AT)
    job.cluster.power_off(job.hosts()[2], reset=True)
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and job.cluster.job(job.id)["Restarts"] == "1", job.output()


def test_trainer_killed(train: Train, reference: Reference) -> None:
    wanted = reference("ddp")
    job = train("killed", "--gemini-replicas=2")
    job.reach(CUT_AT)
    job.cluster.exec(job.hosts()[1], ["pkill", "-KILL", "-f", "train_gpt[.]py"])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and job.cluster.job(job.id)["Restarts"] == "0", job.output()


def test_agent_killed_then_node_cut(train: Train, reference: Reference, cluster: Cluster) -> None:
    wanted = reference("ddp")
    job = train("agent", "--gemini-replicas=2")
    job.reach(8)
    host = job.hosts()[0]
    pids = cluster.exec(host, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()
    cluster.exec(host, ["kill", "-9", max(pids, key=int)])
    job.reach(25)
    job.cluster.power_off(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version 2" in job.output(), job.output()


def test_protection_changes_nothing(train: Train, reference: Reference) -> None:
    wanted = reference("ddp")
    job = train("undisturbed", "--gemini-replicas=3")
    job.finish()
    job.assert_same_as(wanted)


def test_user_is_told_that_there_will_be_no_requeue(train: Train) -> None:
    job = train("told", "--gemini-replicas=2", "--no-requeue")
    job.reach(1)
    said = job.output()
    assert said.count("gemini-hpc: this job was submitted without --requeue: the loss of a node ends the job") == 1, (
        said
    )


def test_nothing_is_said_where_nothing_is_wrong(train: Train) -> None:
    job = train("untold", "--gemini-replicas=2", "--requeue")
    job.reach(1)
    assert "requeue" not in job.output(), job.output()
