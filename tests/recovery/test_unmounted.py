"""A job's directories are unmounted under it (`umount -l`, by a site's script perhaps), and then it loses a node."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any


def test_the_agents_are_found_again_and_the_job_resumes(lite: Lite, cluster: Cluster) -> None:
    job = lite()
    job.reach(10)
    hosts = job.hosts()
    before = {host: job.agent_pid(host) for host in hosts}
    for host in hosts:
        assert cluster.exec(host, ["umount", "-l", f"/run/gemini-hpc/{job.id}"]).returncode == 0
    until(lambda: len({e["host"] for e in job.events() if e["name"] == "unreachable"}) == 3, 20, 0.2, what="told")
    at = max(line["version"] for line in job.lines("sealed"))
    job.reach(at + 3)  # who is connected is protected as before
    cluster.cut_power(hosts[-1])
    until(lambda: job.slurm().get("Restarts") == "1", 60, what=f"requeued\n{job.story()}")
    job.reach(at + 4, "step", 60, restart=1)
    for host in hosts[:-1]:
        found = cluster.exec(host, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()
        assert job.agent_pid(host) == before[host] and len(found) == 2, "one agent, and its supervisor"
        assert "event=reachable" in job.agent_log(host), "its log has come along"
    job.finish(120)
    assert hosts[-1] not in job.hosts() and job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert not [e for e in job.events() if e["name"] == "bereft"]


def test_the_next_step_of_the_job_finds_the_agents_again(lite: Lite, cluster: Cluster) -> None:
    """No prolog comes between two steps of a job."""
    job = lite(run="gemini-hpc run -- srun --kill-on-bad-exit=1")
    job.reach(10)
    hosts = job.hosts()
    before = {host: job.agent_pid(host) for host in hosts}
    for host, what in zip(hosts, (f"/run/gemini-hpc/{job.id}", "/run/gemini-hpc"), strict=False):
        assert cluster.exec(host, ["umount", "-l", what]).returncode == 0
    rank = next(line for line in job.lines("resumed") if line["node"] == hosts[1])
    assert cluster.exec(hosts[1], ["kill", "-9", str(rank["pid"])]).returncode == 0
    until(lambda: any(line["step"] == f"{job.id}.1" for line in job.lines("resumed")), 60, what="another step")
    again = [line for line in job.lines("resumed") if line["step"] == f"{job.id}.1"]
    at = again[0]["version"]
    assert at > 0 and job.completed(min(line["t"] for line in again)) - at in (0, 1), job.story()
    job.reach(at + 5)
    assert {host: job.agent_pid(host) for host in hosts} == before, job.story()
    assert "not protected" not in job.output() and "restart 1 of 3" in job.output(), job.story()
    job.finish()
    assert job.slurm()["Restarts"] == "0"


ROUNDS, STEPS = 3, 4
SCRIPT = f"""#!/bin/sh
cd $HOME
for round in $(seq {ROUNDS}); do
    until [ -e go$round ]; do sleep 0.05; done
    for step in $(seq {STEPS}); do
        (sleep 0.$((step * 12)); srun --overlap -N1 -n1 sh -c 'echo "socket $GEMINI_SOCKET"' >>told) &
    done
    wait
    : >done$round
done
"""


def test_of_steps_that_begin_at_once_each_finds_the_agent(cluster: Cluster) -> None:
    """One of them has the directory made again, and the agent moves in a moment later."""
    home = cluster.locate_home("alice")
    job = cluster.submit_job(["-N2", "--exclusive", "--gemini-replicas=2"], script=SCRIPT)
    until(lambda: cluster.read_job(job)["JobState"] == "RUNNING")
    host = cluster.read_job(job)["BatchHost"]
    until(lambda: cluster.exec(host, ["test", "-e", f"/run/gemini-hpc/{job}/map"]).returncode == 0)
    try:
        for number in range(1, ROUNDS + 1):
            assert cluster.exec(host, ["umount", "-l", f"/run/gemini-hpc/{job}"]).returncode == 0
            (home / f"go{number}").touch()
            until((home / f"done{number}").exists, what=f"round {number}")
        assert (home / "told").read_text().splitlines() == [
            f"socket /run/gemini-hpc/{job}/agent.sock"
        ] * ROUNDS * STEPS
    finally:
        for path in (*home.glob("go?"), *home.glob("done?"), *home.glob("told")):
            path.unlink()
