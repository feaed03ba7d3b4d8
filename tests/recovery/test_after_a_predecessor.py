"""A job that goes on from another one of its owner (`--gemini-after`): from its memory, while that is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import LiteJob, given_back
from sharing import LET_GO_S, Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any
RETENTION_S = 30.0
SETTINGS = {"retention_s": RETENTION_S}


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared("successor", RETENTION_S + LET_GO_S, nodes=7, settings=SETTINGS) as shared:
        yield shared


@pytest.fixture
def full(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Agents may take 376 MiB of a node: enough for the 256 MiB of one job's copies, not for twice that."""
    settings = {**SETTINGS, "memory_cap_bytes": 376 << 20}
    with (
        Shared("full", RETENTION_S + LET_GO_S, nodes=2, settings=settings) as shared,
        shared.lent(request) as cluster,
    ):
        yield cluster


def run_out(job: LiteJob, at: int = 10) -> int:
    """Let it come to a version and to its time limit; the version that it had reached then."""
    job.reach(at)
    assert job.cluster.run(["scontrol", "update", f"JobId={job.id}", "EndTime=now+1"]).returncode == 0
    until(lambda: job.state == "TIMEOUT", 60, what="the time limit")
    return job.completed(time.time())


def successor(job: LiteJob, **options: Any) -> LiteJob:
    """Submitted as the next part of the same training."""
    more = options.pop("options", ())
    return LiteJob(job.cluster, options=(f"--gemini-after={job.id}", *more), **options).submit()


def named(job: LiteJob, name: str) -> list[dict[str, Any]]:
    return [event for event in job.events() if event["name"] == name]


def test_memory_of_a_job_that_ran_out_of_time(lite: Lite, cluster: Cluster) -> None:
    """Version by version the same chain, from memory alone; then the predecessor's memory is given back."""
    first = lite()
    reached = run_out(first)
    hosts = first.hosts()
    assert all(first.agent_pid(host) for host in hosts), "kept for a successor"
    second = successor(first)
    second.reach(reached + 3)
    assert second.hosts() == hosts
    assert second.resumed(0) in (reached, reached - 1), second.story()
    until(lambda: not any(first.agent_pid(host) for host in hosts), 10, what="the predecessor lets go")
    (took,) = named(second, "took_over")
    assert took["version"] == second.resumed(0) and took["detail"].startswith(f"job {first.id}; default: version")
    gone = named(first, "released")
    assert len(gone) == 3 and all(f"job {second.id} has taken it over" in event["detail"] for event in gone), gone
    second.finish()
    given_back(cluster)


def stopped(job: LiteJob, at: int = 10) -> int:
    """Let it come to a version, and send its step a signal (`scancel --signal`), of which it fails; the version that
    it had reached then."""
    job.reach(at)
    assert job.cluster.run(["scancel", "--signal=USR1", str(job.id)], user="alice").returncode == 0
    until(lambda: job.state == "FAILED", 30, what="its end")
    return job.completed(time.time())


@pytest.fixture
def first(lite: Lite) -> LiteJob:
    """A job that fails when its step does."""
    job: LiteJob = lite(prefix="set -e\n")
    return job


def test_other_nodes(first: LiteJob, cluster: Cluster) -> None:
    """Only the controller can say where the predecessor was."""
    reached = stopped(first)
    old = first.hosts()
    cluster.run(["scontrol", "update", f"nodename={','.join(old)}", "state=drain", "reason=test"])
    second = successor(first)
    second.reach(reached + 3)
    assert not set(second.hosts()) & set(old)
    assert second.resumed(0) in (reached, reached - 1), second.story()
    until(lambda: not any(first.agent_pid(host) for host in old), 10, what="the predecessor lets go")


def test_fewer_nodes_and_one_of_them_lost(lite: Lite, cluster: Cluster) -> None:
    """Two ranks load what three have saved, with a node gone that held one of the copies. (A job that may be requeued
    comes back itself.)"""
    first = lite(prefix="set -e\n", options=("--no-requeue",))
    reached = stopped(first)
    lost = first.hosts()[2]
    cluster.cut_power(lost)
    second = successor(first, nodes=2)
    second.reach(reached + 3)
    assert second.resumed(0) in (reached, reached - 1), second.story()


def test_one_that_comes_to_nothing_takes_nothing_away(first: LiteJob, cluster: Cluster) -> None:
    """A successor that ends before its first version leaves the state to the next one."""
    reached = stopped(first)
    early = successor(first, steps=1)  # its last step is long done: it only loads
    until(lambda: early.state == "COMPLETED", 30, what="its end")
    assert named(early, "took_over") and all(first.agent_pid(host) for host in first.hosts())
    second = successor(first)
    second.reach(reached + 3)
    assert second.resumed(0) in (reached, reached - 1), second.story()


def test_a_job_that_runs_is_left_alone(first: LiteJob, cluster: Cluster) -> None:
    first.reach(10)
    second = successor(first)
    second.reach(3)
    assert second.resumed(0) == 0
    (told,) = {line["reason"] for line in second.lines("lost")}
    assert told.startswith(f"nothing is taken over from job {first.id}: ") and "the job still runs" in told
    first.reach(first.completed(time.time()) + 3)


def test_nobody_elses(first: LiteJob, cluster: Cluster) -> None:
    """Another user that names the job is told nothing, and it is there for its owner afterwards."""
    reached = stopped(first)
    options = ["-N3", "--gemini-replicas=2", f"--gemini-after={first.id}", f"--nodelist={','.join(first.hosts())}"]
    thief = LiteJob(cluster, id=cluster.submit_job([*options, "--output=/dev/null", "--wrap=sleep 600"], user="bob"))
    until(lambda: "event=agreed" in thief.agent_log(first.hosts()[0]), 30, what="its agents agree")
    log = thief.agent_log(first.hosts()[0])
    assert "event=not_taken_over" in log and "pulled" not in log, log
    cluster.run(["scancel", str(thief.id)])
    until(lambda: thief.state == "CANCELLED", 30, what="its end")
    second = successor(first)
    second.reach(reached + 3)
    assert second.resumed(0) in (reached, reached - 1), second.story()


def test_memory_that_is_gone(lite: Lite, cluster: Cluster) -> None:
    """The user hears why the training begins anew."""
    first = lite()
    first.reach(10)
    hosts = first.hosts()
    cluster.run(["scancel", str(first.id)])
    until(lambda: not any(first.agent_pid(host) for host in hosts), 30, what="memory given back")
    second = successor(first)
    second.reach(3)
    assert second.resumed(0) == 0
    (told,) = {line["reason"] for line in second.lines("lost")}
    assert told.startswith(f"nothing is taken over from job {first.id}: no agent on "), told
    assert named(second, "not_taken_over")


def test_what_is_no_job(cluster: Cluster) -> None:
    """Refused at submission, with one line."""
    for text in ("0", "x", "12_3", "-1", "4294967296", "7;reboot"):
        words = ["sbatch", "-N2", "--gemini-replicas=2", f"--gemini-after={text}", "--wrap=true"]
        done = cluster.run(words, user="alice")
        assert done.returncode != 0 and "--gemini-after: wanted the number of a job" in done.stderr, done


def test_where_both_do_not_fit(full: Cluster) -> None:
    """The memory of a copy passes from one agent to the other, where there is no room for a second one."""
    whole: dict[str, Any] = {"nodes": 2, "size": 64 << 20, "pause_s": 0.5, "options": ("-c4",)}
    first = LiteJob(full, **whole, prefix="set -e\n").submit()
    reached = stopped(first)
    second = successor(first, **whole)
    second.reach(reached + 3)
    assert second.resumed(0) in (reached, reached - 1), second.story()
    assert len(named(first, "handed_over")) == 4, second.story()
    assert not named(second, "refused") and not named(second, "unserved"), second.story()
