"""Jobs with their own agents, on a cluster where nobody has installed anything: final bits of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiers import saved
from training import SMALL, Run, Training
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.layout import ClusterFiles

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Train = Callable[..., Training]
Reference = Callable[..., Run]
CUT_AT = 15
# The version under way, and on a busy machine one that the survivors begin before the default heartbeats tell.
LOST_STEPS = 2
# Slurm's default grace; agents save to the tier in it.
GRACE = "KillWait=30"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster without plugin, prolog, epilog and controller. Someone has left a settings file half-written."""
    name = f"own{os.getpid()}"
    with Cluster.bring_up(name, nodes=4, site=False, controller=False, slurm_conf=[GRACE]) as started:
        (ClusterFiles(name).settings / "gemini.toml").write_text('controller_host = "somewhere\n')
        yield started


@pytest.fixture
def train(cluster: Cluster) -> Iterator[Train]:
    """Submit train_gpt.py with own agents. Afterwards nothing of any job is left."""

    def submit(*options: str, run: str = "", python: str = "python", tier: str = "") -> Training:
        directory = cluster.locate_home("alice") / f"own-{time.time_ns()}"
        shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("own_tier.py"), directory)
        words = [*SMALL, "--iteration-s=0.15", f"--log={directory}/loss.jsonl"]
        program = f"own_tier.py {tier}" if tier else "train_gpt.py"
        (directory / "own.sh").write_text(
            f"#!/bin/bash\ngemini-hpc run --own-agents {run} -- srun {python} {program} {' '.join(words)}\n"
        )
        for path in [directory, *directory.iterdir()]:
            path.chmod(0o755)
        shutil.chown(directory, 5001)
        fixed = ["--requeue", "-N3", "--ntasks-per-node=1", "--open-mode=append", "--mem=600"]
        fixed += [f"--chdir={directory}", f"--output={directory}/out"]
        return Training(cluster, cluster.submit_job([*fixed, *options, str(directory / "own.sh")]), directory)

    yield submit
    lost = [node for node in cluster.node_names if not cluster.is_on(node)]
    cluster.restore()
    for node in lost:  # its disk outlives a power cut; sites clear /tmp at a boot, or by age
        cluster.exec(node, ["sh", "-c", "rm -r /tmp/gemini-hpc-*"])
    left = ["sh", "-c", "pgrep -u alice -af gemini_hpc; ls -d /tmp/gemini* /dev/shm/* 2>/dev/null"]
    for node in cluster.node_names:
        until(lambda node=node: not cluster.exec(node, left).stdout, 20, what=f"nothing left on {node}")
    assert not list((cluster.locate_home("alice") / ".gemini-hpc" / "jobs").iterdir())


def inspect(job: Training, user: str) -> str:
    done = job.cluster.run(["gemini-hpc", "inspect", str(job.id)], user=user)
    return done.stdout + done.stderr


@pytest.mark.witness("a job without a site's installation starts its own agents, and loses a rank: equal bits")
def test_a_rank_is_killed(train: Train, reference: Reference) -> None:
    wanted = reference()
    job = train(python="--kill-on-bad-exit=1 python")
    job.reach(CUT_AT)
    shown = inspect(job, "alice")
    assert f"job {job.id}: protected" in shown and "may be lost: any 1 node" in shown, shown
    assert "protected" not in inspect(job, "bob")
    key = next((job.cluster.locate_home("alice") / ".gemini-hpc" / "jobs").iterdir())
    assert key.stat().st_mode & 0o777 == 0o600 and key.stat().st_uid == 5001
    killed = job.cluster.exec(job.hosts()[1], ["pkill", "-9", "-f", "train_gpt.py"])
    assert killed.returncode == 0, killed.stderr
    job.finish()
    job.assert_same_as(wanted)
    said = job.output()
    assert "on healthy nodes: restart 1 of 3" in said and "resumed at version" in said and job.repeated() <= 1, said
    assert "own agents on 3 nodes, 2 replicas in up to 300 MiB a node, 50% of the job's memory" in said, said


def test_a_node_is_lost_and_a_spare_takes_its_place(train: Train, reference: Reference) -> None:
    wanted = reference()
    job = train("-N4", "--no-kill", run="--spares 1", python="python -m gemini_hpc.launch")
    job.reach(CUT_AT)
    job.cluster.cut_power(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.cluster.read_job(job.id)["Restarts"] == "0" and job.repeated() <= LOST_STEPS, job.output()


def await_requeue(job: Training) -> None:
    """Wait until the first incarnation has ended. The job then waits, or has begun again at once."""
    until(lambda: job.cluster.read_job(job.id).get("Restarts") == "1", 90, what=f"requeued\n{job.output()}")
    until(lambda: job.state != "COMPLETING", 60, what="nothing of it runs")


def test_the_owner_requeues_the_job(train: Train, reference: Reference, cluster: Cluster, tier: Path) -> None:
    wanted = reference()
    job = train(tier=str(tier))
    job.reach(CUT_AT)
    assert cluster.run(["scontrol", "requeue", str(job.id)], user="alice").returncode == 0
    await_requeue(job)
    assert saved(tier, job), "the last version is on the tier before Slurm's grace is over"
    cluster.run(["scontrol", "update", f"jobid={job.id}", "StartTime=now"])
    job.finish()
    job.assert_same_as(wanted)
    assert "from the tier" in job.output() and job.repeated() <= 1, job.output()


def test_a_node_is_lost_without_a_spare(train: Train, reference: Reference, cluster: Cluster, tier: Path) -> None:
    """`run` ends the step and requeues the job. The other nodes save all shards in Slurm's grace."""
    wanted = reference()
    job = train("--no-kill", tier=str(tier))
    job.reach(CUT_AT)
    cluster.cut_power(job.hosts()[1])
    await_requeue(job)
    assert saved(tier, job)
    cluster.run(["scontrol", "update", f"jobid={job.id}", "StartTime=now"])
    job.finish()
    job.assert_same_as(wanted)
    assert "from the tier" in job.output() and job.repeated() <= LOST_STEPS, job.output()
