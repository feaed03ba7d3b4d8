"""Requirement users-errors on the real cluster, with strict_prolog: what users do wrong ends their step, never a
node."""

from __future__ import annotations

import re
import time

import pytest
from harness import LiteJob
from waiting import until

from .conftest import Site

pytestmark = pytest.mark.cluster

UNPROTECTABLE = 78


def undrained(site: Site) -> bool:
    return not any("drain" in state or "down" in state for state in site.cluster.read_node_states().values())


@pytest.mark.witness("a user's mistake ends the job with one line and drains no node")
def test_more_replicas_than_nodes_is_exit_78_and_one_line(site: Site) -> None:
    site.configure(strict_prolog=True)
    out = site.cluster.locate_home("alice") / f"unprotectable-{time.time_ns()}"
    # So many tasks: the number of nodes follows from them, and is not known at submission.
    fixed = ["-n4", "--ntasks-per-node=2", f"--output={out}", "--gemini-replicas=3"]
    job = site.cluster.submit_job(fixed, script="#!/bin/bash\necho never\n")
    until(lambda: site.cluster.read_job(job).get("JobState") == "FAILED", 30, 0.1, what="the end")
    assert site.cluster.read_job(job)["ExitCode"] == f"{UNPROTECTABLE}:0"
    assert out.read_text().count("gemini-hpc:") == 1 and "never" not in out.read_text()
    assert "ask for more nodes or fewer replicas" in out.read_text()
    assert undrained(site)


@pytest.mark.parametrize(
    "env",
    [
        {"SPANK_GEMINI_REPLICAS": "99999"},
        {"SPANK_GEMINI_TIER": "$(reboot)"},
        {"SPANK_GEMINI_TIER_INTERVAL": "-1"},
        {"SLURM_SPANK_GEMINI_REPLICAS": "x"},
    ],
    ids=str,
)
def test_bad_values_in_the_jobs_environment(site: Site, env: dict[str, str]) -> None:
    """Past the plugin's own check, as a user with a program of their own can."""
    site.configure(strict_prolog=True)
    job = site.cluster.submit_job(
        ["-N2", "--gemini-replicas=2", "--output=/dev/null"], script="#!/bin/bash\nexit 0\n", env=env
    )
    until(lambda: site.cluster.read_job(job).get("JobState") == "COMPLETED", 30, 0.1, what="the end")
    assert undrained(site)


def test_strict_prolog_does_drain_for_the_nodes_own_faults(site: Site) -> None:
    """Or the tests above would say nothing."""
    site.configure(strict_prolog=True)
    site.sh(
        "n2",
        "mount -t tmpfs -o size=4k none /run/gemini-hpc && dd if=/dev/zero of=/run/gemini-hpc/full bs=4k count=1",
    )
    try:
        site.cluster.submit_job(
            ["-N2", "-wn1,n2", "--gemini-replicas=2", "--output=/dev/null"], script="#!/bin/bash\nexit 0\n"
        )
        until(lambda: "drain" in site.cluster.read_node_state("n2"), 40, 0.1, what="drained")
    finally:
        site.sh("n2", "umount /run/gemini-hpc")


@pytest.mark.alone
def test_hung_agents_hold_no_epilog(site: Site) -> None:
    """Both processes of each agent are stopped: the epilog ends within 5 s, with 0, and the node is free again."""
    job = site.job(nodes=2)
    job.reach(3)
    hosts = job.hosts()
    for host in hosts:
        site.sh(host, f"pkill -STOP -f 'gemini_hpc.agent --job {job.id} '")
    began = time.monotonic()
    site.cluster.run(["scancel", str(job.id)])
    until(lambda: all(site.cluster.read_node_state(h) == "idle" for h in hosts), 20, 0.05, what="nodes free")
    took_s = time.monotonic() - began
    assert undrained(site)
    for host in hosts:
        site.sh(host, f"pkill -CONT -f 'gemini_hpc.agent --job {job.id} '")
    assert took_s < 5.0 + 2.0 + 1.0, "epilog's bound, KillWait, the poll of Slurm"
    print(f"idle again after {took_s:.2f} s")


def test_one_survivor_is_elected(site: Site) -> None:
    """No controller, one node dies: of three survivors' epilogs one makes the one reservation."""
    site.cluster.stop_controller()
    log = site.cluster.log_directory / "slurmctld.log"
    job: LiteJob = site.job(nodes=3)
    job.reach(5)
    hosts = job.hosts()
    site.cluster.cut_power(hosts[1])
    until(lambda: "event=detected" in job.agent_log(hosts[0]), 20, what="the agents know")
    site.cluster.run(["scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=test"])
    job.reach(1, "resumed", 60, 1)
    made = re.findall(rf"Created reservation[ =]*(gemini_{job.id}_\w+)", log.read_text())
    assert len(made) == 1 and {hosts[0], hosts[2]} <= set(job.hosts()), made
    job.finish()
