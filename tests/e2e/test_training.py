"""The main job with torch: whatever is cut or killed, losses and final state are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from tiers import saved
from training import Run, Training
from waiting import until

from gemini_hpc.tier import version

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

Train = Callable[..., Training]
Reference = Callable[..., Run]
CUT_AT = 15


def test_a_job_is_what_it_would_be_without_slurm(train: Train, reference: Reference) -> None:
    """Unprotected, on three nodes: the runs that all others are compared with are made without Slurm."""
    job = train("plain", iteration_s=0.0)
    job.finish()
    job.assert_same_as(reference())


@pytest.mark.witness("a node dies in mid-training: equal bits, one step repeated at most")
def test_node_cut(train: Train, reference: Reference) -> None:
    wanted = reference()
    job = train("cut", "--gemini-replicas=2")
    job.reach(CUT_AT)
    job.cluster.cut_power(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version" in job.output(), job.output()


@pytest.mark.witness("all copies are lost: the job comes back from the tier, equal bits")
def test_all_nodes_cut(train: Train, reference: Reference, tier: Path) -> None:
    wanted = reference("fsdp2")
    job = train("tier", "--gemini-replicas=2", f"--gemini-tier={tier}", "--gemini-tier-interval=1", parallel="fsdp2")
    job.reach(8)
    until(lambda: saved(tier, job) and saved(tier, job)[0].version >= 8, 60, what="a version on the tier")
    for host in job.hosts()[1:]:
        job.cluster.cut_power(host)
    job.finish()
    job.assert_same_as(wanted)
    assert "from the tier" in job.output(), job.output()
    with h5py.File(
        tier / f"gemini-{job.id}/default" / version.format_name(saved(tier, job)[0]) / "index.h5"
    ) as index:
        assert len(index["tensors"]) > 10


def test_node_cut_where_agents_bring_the_copies(train: Train, reference: Reference) -> None:
    """On the way an agent dies, too."""
    wanted = reference()
    job = train("host", "--gemini-replicas=2")
    job.reach(8)
    host = job.hosts()[0]
    pids = job.cluster.exec(host, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()
    job.cluster.exec(host, ["kill", "-9", max(pids, key=int)])
    job.wait("seal", lambda: "protected again" in job.output(), 20)
    sealed = int(re.findall(r"protected again, version (\d+) is sealed", job.output())[0])
    # the waits for the dead agent have made versions rarer for a while: the ceiling holds in failures, too
    shown = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout
    promised = max(rank["repeated"] for training in json.loads(shown)["trainings"] for rank in training["traffic"])
    job.cluster.cut_power(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    (resumed,) = map(int, re.findall(r"resumed at version (\d+) from memory", job.output()))
    assert resumed >= sealed and job.repeated() <= promised, (promised, job.output())


def test_a_cut_before_a_step_that_needs_nobody(train: Train, reference: Reference) -> None:
    """The survivors have all that the optimizer's next step takes; the version before it is not sealed, and never
    will be. They do not take that step: it would be a second one to repeat."""
    wanted = reference()
    job = train("brink", "--gemini-replicas=2", around="brink.py")
    job.wait("the brink", (job.directory / "brink").exists, 90)
    slurmctld = job.cluster.find_controller_pid()
    assert slurmctld is not None
    os.kill(slurmctld, signal.SIGSTOP)  # Slurm takes its time, as a large one does
    try:
        job.cluster.cut_power(job.hosts()[1])
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
    wanted = reference()
    job = train("reset", "--gemini-replicas=2")
    job.reach(CUT_AT)
    job.cluster.cut_power(job.hosts()[2], reset=True)
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and job.cluster.read_job(job.id)["Restarts"] == "1", job.output()


def test_trainer_killed(train: Train, reference: Reference) -> None:
    wanted = reference()
    job = train("killed", "--gemini-replicas=2")
    job.reach(CUT_AT)
    job.cluster.exec(job.hosts()[1], ["pkill", "-KILL", "-f", "train_gpt[.]py"])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and job.cluster.read_job(job.id)["Restarts"] == "0", job.output()
