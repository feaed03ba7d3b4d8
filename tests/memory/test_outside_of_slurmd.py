"""Requirement memory on the real cluster (cgroup v1): the agents' memory is counted, and ends, outside slurmd's
cgroup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster import cgroups
from gemini_hpc.node import oom
from gemini_hpc.node.memory_cgroup import AGENT_ROOM_BYTES

from .conftest import CAP_BYTES, MIB, Site

Inspect = Callable[[int], dict[str, Any]]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not cgroups.are_possible(), reason="no writable memory cgroup (v1) on this machine"),
]
OWN = "gemini-hpc"


def agents(job: LiteJob, node: str) -> list[str]:
    return job.cluster.exec(node, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()


@pytest.mark.witness("agents' memory is counted and bounded outside of Slurm's own")
def test_agent_has_left_slurmds_cgroup(site: Site) -> None:
    job = site.job(nodes=2, steps=1000)
    job.reach(3)
    for node in job.hosts():
        assert site.cgroup(node, site.slurmd(node)) == "slurmd"
        (task,) = site.sh(node, f"pgrep -f '^[^ ]*python {job.directory}/lite'").split()[-1:]
        assert site.cgroup(node, task) == "slurmd"
        own = f"{OWN}/{job.id}"
        assert {site.cgroup(node, pid) for pid in agents(job, node)} == {own}
        scores = {site.sh(node, f"cat /proc/{pid}/oom_score_adj") for pid in agents(job, node)}
        assert scores == {str(oom.NEWEST), str(oom.SUPERVISOR)}
        assert site.memory(node, own, "limit_in_bytes") == CAP_BYTES // 4 + AGENT_ROOM_BYTES, "one of four CPUs"
        rooms = site.memory(node, OWN, "limit_in_bytes") - CAP_BYTES
        assert rooms >= 2 * AGENT_ROOM_BYTES and not rooms % AGENT_ROOM_BYTES, "its own, and the reaper's"
        assert f"memory counted in /{own}" in job.agent_log(node)
    node = job.hosts()[1]
    site.sh(node, f"kill -9 {job.agent_pid(node)}")
    until(lambda: job.lines("rejoined"), 20, what="hand-back")
    assert {site.cgroup(node, pid) for pid in agents(job, node)} == {own}, "its successor is there too"


def test_replicas_are_not_charged_to_slurmd(site: Site) -> None:
    """slurmd's cgroup has room for its daemons, its steps and 64 MiB; the replicas of a node take 128."""
    cluster, node = site.cluster, "n1"
    before = site.slurmd(node)
    limit = site.memory(node, "slurmd", "usage_in_bytes") + 64 * MIB
    site.sh(node, f"echo {limit} >/sys/fs/cgroup/memory/slurmd/memory.limit_in_bytes")
    try:
        job = site.job(nodes=2, steps=20, size=32 * MIB, options=("-wn1,n2", "-c4"), pause_s=0.05)
        job.reach(3)
        taken = site.memory(node, OWN, "usage_in_bytes")
        job.finish()
        assert taken >= 128 * MIB
        assert site.slurmd(node) == before and "down" not in cluster.read_node_state(node)
        assert "Killed" not in job.output()
    finally:
        site.sh(node, "echo -1 >/sys/fs/cgroup/memory/slurmd/memory.limit_in_bytes")


def test_refusal_has_the_numbers_and_reaches_trainer_and_inspect(site: Site, inspect: Inspect) -> None:
    job = site.job(nodes=2, steps=5, size=60 * MIB, options=("-c4",))
    until(lambda: "not enough memory for the replicas" in job.output(), 30, what="the refusal")
    assert "wanted 120 MiB beside 120 MiB already held, the node's cap is 200 MiB (memory_cap_bytes)" in job.output()
    told = [e["detail"] for e in inspect(job.id)["events"] if e["name"] == "refused"]
    assert told and "the node's cap is 200 MiB" in told[0], told


def test_a_job_has_its_share_of_the_cap(site: Site, inspect: Inspect) -> None:
    """A job with one of four CPUs, which comes first, leaves the others theirs; and hears of it."""
    small = site.job(nodes=2, steps=1000, size=30 * MIB, options=("-wn1,n2", "-c1"))
    until(lambda: "not enough memory for the replicas" in small.output(), 30, what="the refusal")
    assert "the job's share of the node (1 of 4 CPUs) is 50 MiB of its cap of 200 MiB" in small.output()
    assert "more CPUs or GPUs of the node, or --exclusive, raise it" in small.output()
    large = site.job(nodes=2, steps=1000, size=30 * MIB, options=("-wn1,n2", "-c3"))
    large.reach(3)
    nodes = inspect(large.id)["nodes"]
    assert [node["memory_cap_bytes"] for node in nodes] == [150 * MIB] * 2, nodes


def test_agents_of_a_node_share_the_cap(site: Site) -> None:
    """A job that has ended keeps its copies, and another one has its CPUs."""
    first = site.job(nodes=2, steps=1000, size=30 * MIB, options=("-wn1,n2", "-c4"), prefix="set -e; ")
    first.reach(2)
    site.sh("n1", f"pkill -KILL -f '{first.directory}/lite[.]py'")
    until(lambda: first.state == "FAILED", 30, what="the first job's end")
    second = site.job(nodes=2, steps=5, size=30 * MIB, options=("-wn1,n2", "-c4"))
    until(lambda: "left for all agents of this node" in second.output(), 30, what="the refusal")
    assert f"the memory cgroup /{OWN}/{second.id} has" in second.output()
    assert all(first.agent_pid(node) for node in ("n1", "n2"))


def test_a_full_cgroup_ends_agents_and_never_slurmd(site: Site) -> None:
    """Somebody who is in the agents' cgroup takes more than there is: the kernel looks for a victim in there only."""
    job = site.job(nodes=2, steps=1000, size=20 * MIB, options=("-c4",))
    job.reach(3)
    node = job.hosts()[1]
    before = site.slurmd(node)
    hog = (
        f"echo 0 >/sys/fs/cgroup/memory/{OWN}/cgroup.procs; "
        "exec python3 -c 'import mmap; m = mmap.mmap(-1, 1200 << 20); m.write(bytes(1200 << 20))'"
    )
    assert site.cluster.exec(node, ["bash", "-c", hog], timeout_s=20).returncode != 0
    assert site.slurmd(node) == before
    assert "oom_kill 0" not in site.sh(node, f"cat /sys/fs/cgroup/memory/{OWN}/memory.oom_control")
    at = max(line["version"] for line in job.lines("step"))
    job.reach(at + 1, "step")  # unprotected: with everything in there its supervisor may be ended too
    site.cluster.run(["scancel", str(job.id)])
    until(lambda: not site.cluster.run(["squeue", "-h", "-u", "alice"]).stdout.strip(), 60, 0.1, what="the end")
    # Then nobody is left who removes its files, but the next prolog on that node: what is older than a minute.
    site.sh(node, f"touch -d '2 minutes ago' /run/gemini-hpc/{job.id}")
    site.job(nodes=2, steps=2, options=(f"-w{node}",)).finish()


def test_arming_until_done(site: Site, inspect: Inspect) -> None:
    job = site.job(nodes=2, steps=2, pause_s=12.0)
    job.reach(0, "resumed")

    def state() -> set[str]:
        return {s["state"] for s in inspect(job.id).get("trainings", [])}

    until(lambda: state() == {"arming"}, 11, what="arming")
    until(lambda: state() == {"protected"}, 30, what="protected")


def test_ready_needs_no_memory(site: Site) -> None:
    """The prolog's "ready" says that sockets are open and limits known: a site without any room still gets a map."""
    site.configure(memory_cap_bytes=1)
    job = site.job(nodes=2, steps=3)
    until(lambda: "not enough memory for the replicas" in job.output(), 30, what="the refusal")
    assert job.lines("resumed"), "the map was there, the agents had agreed"
    until(lambda: job.state in ("COMPLETED", "FAILED"), 30, 0.1, what="the job's end")
    assert not {s for s in site.cluster.read_node_states().values() if "drain" in s}


def test_a_node_that_was_off_begins_with_nothing(site: Site) -> None:
    cluster = site.cluster
    job = site.job(nodes=2, steps=1000, size=20 * MIB, options=("-wn1,n2", "-c2", "--no-requeue"))
    job.reach(2)
    cluster.cut_power("n2")
    cluster.restore_power("n2")
    assert site.sh("n2", f"ls -d /sys/fs/cgroup/memory/{OWN} 2>/dev/null") == ""
    cluster.run(["scancel", str(job.id)])
    cluster.restore()
    again = site.job(nodes=2, steps=5, options=("-wn1,n2",))
    again.finish()


def test_settings_say_where(site: Site) -> None:
    site.configure(agent_cgroup="/site/agents")
    job = site.job(nodes=2, steps=1000)
    job.reach(2)
    node = job.hosts()[0]
    assert site.cgroup(node, job.agent_pid(node)) == f"site/agents/{job.id}"
    site.cluster.run(["scancel", str(job.id)])
    until(lambda: not agents(job, node), 30, what="agents gone")
    site.configure(agent_cgroup="none")
    job = site.job(nodes=2, steps=3)
    job.finish()
    site.configure(agent_cgroup="/slurmd/agents")  # a mistake of the site's: inside what it should leave
    job = site.job(nodes=2, steps=1000, options=(f"-w{node}", "-N1"), replicas=1)
    until(lambda: job.agent_pid(node), 20, what="an agent")
    assert site.cgroup(node, job.agent_pid(node)) == "slurmd"
    log = (site.cluster.log_directory / f"slurmd.{node}.log").read_text()
    assert "drain" not in site.cluster.read_node_state(node), log
