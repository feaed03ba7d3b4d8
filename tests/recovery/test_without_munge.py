"""A node dies on a cluster whose agents, controller and commands use the site's key in place of MUNGE.

Slurm itself has MUNGE here: Debian's release has no other way.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from harness import LiteJob
from sharing import SETTINGS, Shared
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

PYTHON = "/opt/gemini-hpc/venv/bin/python3"
TICKETS = "/run/gemini-hpc-tickets.sock"
# Which processes of ours have MUNGE's library, and how many there are.
MAPPED = """
import json, os
found = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        argv = open(f"/proc/{pid}/cmdline").read().split("\\0")
        if any(name in argv for name in ("gemini_hpc.agent", "gemini_hpc.controller", "gemini_hpc.node.tickets")):
            found[pid] = ["libmunge" in open(f"/proc/{pid}/maps").read(), argv]
    except OSError:
        pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with Shared("nomunge", nodes=4, settings={**SETTINGS, "auth": "key"}) as shared:
        yield shared


def ours(cluster: Cluster, node: str | None) -> dict[str, tuple[bool, list[str]]]:
    done = cluster.run([PYTHON, "-I", "-c", MAPPED], node=node)
    return dict(json.loads(done.stdout))


def asked(cluster: Cluster, *argv: str, user: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(["gemini-hpc", *argv], user=user)


def test_a_node_is_lost_and_its_job_comes_back(cluster: Cluster) -> None:
    job = LiteJob(cluster).submit()
    job.reach(10)
    hosts = job.hosts()
    for node in (None, *hosts):
        found = ours(cluster, node)
        assert found and not any(mapped for mapped, _ in found.values()), (node, found)
    said = asked(cluster, "inspect", str(job.id), user="alice")
    assert said.returncode and "no ticket for this user" in said.stderr and len(said.stderr.splitlines()) == 1
    service = cluster.run(
        ["sh", "-c", f"{PYTHON} -I -m gemini_hpc.node.tickets </dev/null >/dev/null 2>&1 & echo $!"]
    )
    until(lambda: cluster.run(["test", "-S", TICKETS]).returncode == 0, 20, what="tickets are issued")
    for user in ("alice", "root"):
        told = asked(cluster, "inspect", "--json", str(job.id), user=user)
        assert told.returncode == 0, told.stderr
        assert len(json.loads(told.stdout)["nodes"]) == 3, told.stdout
    assert asked(cluster, "inspect", str(job.id), user="bob").returncode == 1
    cluster.cut_power(hosts[1])
    job.finish()
    assert job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert hosts[1] not in job.hosts()
    cluster.run(["kill", service.stdout.strip()])
