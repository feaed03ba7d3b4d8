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
    cluster.power_off(hosts[-1])
    until(lambda: job.slurm().get("Restarts") == "1", 60, what=f"requeued\n{job.story()}")
    job.reach(at + 4, "step", 60, restart=1)
    for host in hosts[:-1]:
        found = cluster.exec(host, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()
        assert job.agent_pid(host) == before[host] and len(found) == 2, "one agent, and its supervisor"
        assert "event=reachable" in job.agent_log(host), "its log has come along"
    job.finish(120)
    assert hosts[-1] not in job.hosts() and job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert not [e for e in job.events() if e["name"] == "bereft"]
