"""Spares in a real job: a lost node costs an attempt of the same step, and no requeue; without a spare left it costs
a requeue, as ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

pytestmark = pytest.mark.cluster

Lite = Any


def protected(lite: Lite, spares: int = 1) -> LiteJob:
    options = (f"-N{3 + spares}", "--no-kill", f"--gemini-spares={spares}")
    job: LiteJob = lite(run="srun", python="python -m gemini_hpc.launch", options=options)
    job.reach(10)
    return job


def hosts_of(job: LiteJob, step: str, restart: int = 0) -> dict[int, int]:
    """Node rank by rank, of those that have begun in this attempt."""
    return {x["rank"]: x["node_rank"] for x in job.lines("resumed", restart) if x["step"] == step}


def wait_for(job: LiteJob, step: str, most: int = 1) -> None:
    until(lambda: len(hosts_of(job, step)) == job.nodes, 30, what=f"{step}\n{job.story()}")
    again = [x for x in job.lines("resumed") if x["step"] == step]
    assert len({x["version"] for x in again}) == 1, job.story()
    assert job.completed(min(x["t"] for x in again)) - again[0]["version"] in range(most + 1), job.story()
    job.reach(again[0]["version"] + 5)


def down(job: LiteJob, node: str) -> bool:
    return "DOWN" in job.cluster.run(["scontrol", "show", "node", node]).stdout


@pytest.mark.witness("a spare takes a lost node's place without a requeue")
def test_a_spare_takes_a_lost_nodes_place_and_then_there_is_none(lite: Lite) -> None:
    job = protected(lite)
    n1, second, third, spare = job.hosts()
    job.cluster.cut_power(second)
    wait_for(job, f"{job.id}.0+1")
    assert job.slurm()["Restarts"] == "0" and job.state == "RUNNING", job.story()
    until(lambda: down(job, second), 20, what="the lost node is fenced all the same")
    until(lambda: job.hosts() == [n1, third, spare], 10, what="Slurm has let go of it")
    names = [e["name"] for e in job.events()]
    assert "without" in names and "goes_on" in names and "sent_back" not in names, names

    job.cluster.cut_power(third)
    until(lambda: job.slurm().get("Restarts") == "1", 45, what=f"requeued\n{job.story()}")
    job.finish(120)
    assert not {second, third} & set(job.hosts()) and job.resumed(1) > 10 and job.repeated(1) in (0, 1), job.story()


def test_nodes_are_left_and_no_step_is_repeated(lite: Lite) -> None:
    """One that an administrator drains, then one that the owner names."""
    job = protected(lite, spares=2)
    drained, node = job.hosts()[1:3]
    job.cluster.run(["scontrol", "update", f"nodename={drained}", "state=drain", "reason=maintenance"])
    wait_for(job, f"{job.id}.0+1", most=0)

    done = job.cluster.run(["gemini-hpc", "evacuate", str(job.id), node], user="bob")
    assert done.returncode == 1 and "gemini-hpc evacuate: " in done.stderr, done.stderr
    done = job.cluster.run(["gemini-hpc", "evacuate", str(job.id), "n99"], user="alice")
    assert done.returncode == 1 and "does not run on n99" in done.stderr, done.stderr
    began = time.time()
    done = job.cluster.run(["gemini-hpc", "evacuate", str(job.id), node], user="alice")
    assert (done.returncode, done.stdout) == (0, f"job {job.id} goes on without {node}\n"), done.stderr
    wait_for(job, f"{job.id}.0+2", most=0)
    names = [e["name"] for e in job.events() if e["t"] > began]
    assert "moving" in names and "without" in names and "left_out" in names and "detected" not in names, names

    done = job.cluster.run(["gemini-hpc", "evacuate", str(job.id), job.hosts()[0]], user="alice")
    assert done.returncode == 1 and "no spare of the job is free" in done.stderr, done.stderr
    job.finish(60)
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED" and not down(job, node), job.story()


def test_the_spare_itself_is_lost(lite: Lite) -> None:
    job = protected(lite)
    spare = job.hosts()[3]
    job.cluster.cut_power(spare)
    wait_for(job, f"{job.id}.0+1")
    until(lambda: down(job, spare), 20, what="the lost node is fenced all the same")
    job.finish(60)
    assert job.slurm()["Restarts"] == "0" and job.state == "COMPLETED", job.story()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gemini-spares=1"], "--gemini-spares needs --no-kill"),
        (["--gemini-spares=3", "--no-kill"], "want 5 nodes, and --nodes asks for 4"),
        (["--gemini-spares=x", "--no-kill"], "wanted a whole number from 0 to 1024, found 'x'"),
    ],
)
def test_what_cannot_be_is_refused_at_submission(cluster: Any, words: list[str], said: str) -> None:
    sbatch = ["sbatch", "-N4", "--gemini-replicas=2", *words, "--wrap", "true"]
    done = cluster.run(sbatch, user="alice")
    assert done.returncode != 0 and said in done.stderr, done.stderr
