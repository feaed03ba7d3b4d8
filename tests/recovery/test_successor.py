"""A job that goes on from another one of its owner (`--gemini-after`): from its memory, while that is kept."""

from __future__ import annotations

import time
from typing import Any

from harness import LiteJob, leaks
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

Lite = Any


def run_out(job: LiteJob, version: int = 10) -> int:
    """Let it come to a version and to its time limit; the version that it had reached then."""
    job.reach(version)
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
    until(lambda: not leaks(cluster), 20, what="memory given back")
