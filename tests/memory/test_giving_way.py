"""Requirement give-way on the real cluster: replicas that nobody trains with give way, and go when they serve
nobody."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.controller.requeue_rules import find_release_reason
from gemini_hpc.node.meminfo import read_meminfo

from .conftest import MIB, Site

pytestmark = pytest.mark.cluster

TAKEN_MIB, BELOW_MIB = 4096, 2048
# Takes memory as fast as one core can, then keeps it for a moment.
HOG = f"""python3 -c '
import mmap, time
m = mmap.mmap(-1, {TAKEN_MIB} << 20)
for at in range(0, {TAKEN_MIB} << 20, 64 << 20):
    m[at : at + (64 << 20)] = bytes(64 << 20)
time.sleep(4)
print("had", len(m))'
"""


FAILS: dict[str, Any] = {"prefix": "set -e; ", "run": "srun --kill-on-bad-exit=1", "nodes": 2, "steps": 1000}


def detached(site: Site, job: LiteJob) -> list[str]:
    """End a job's script as a failure; the nodes on which its agents stay."""
    hosts = job.hosts()
    site.sh(hosts[0], f"pkill -KILL -f '{job.directory}/lite[.]py'")
    until(lambda: job.state == "FAILED", 30, what="the job's end")
    until(lambda: all("event=detached" in job.agent_log(h) for h in hosts), 15, what="detached")
    assert all(job.agent_pid(h) for h in hosts)
    return hosts


@pytest.mark.alone
def test_detached_agent_gives_way(site: Site) -> None:
    """Another owner's job takes the memory; agents whose job is over let go at once, others do not."""
    free = read_meminfo()["MemAvailable"]
    wanted = (TAKEN_MIB + 3 * 1024) * MIB
    assert free >= wanted, f"{wanted >> 20} MiB of free memory are wanted to take some of it, {free >> 20} are there"
    site.configure(memory_floor_bytes=free - BELOW_MIB * MIB, retention_s=60.0)
    on = site.job(nodes=2, steps=1000, options=("-wn3,n4",))
    on.reach(3)
    over = site.job(**FAILS, size=20 * MIB, options=("-wn1,n2", "-c2"))
    over.reach(3)
    hosts = detached(site, over)  # last: from here on the controller's own retention time runs
    out = site.cluster.locate_home("bob") / "hog"
    site.cluster.submit_job(["-N1", "-wn1", f"--output={out}"], user="bob", script=f"#!/bin/bash\n{HOG}")
    floor = free - BELOW_MIB * MIB
    until(lambda: read_meminfo()["MemAvailable"] < floor, 30, 0.005, what="memory short")
    short_at = time.time()
    until(lambda: not any(over.agent_pid(h) for h in hosts), 10, what="given way")
    for host in hosts:
        line = next(x for x in over.agent_log(host).splitlines() if "event=released" in x)
        assert "free memory has fallen below the floor" in line
        found = re.search(r" t=([0-9.]+) ", line)
        assert found is not None
        assert float(found[1]) - short_at < 1.0, line
        print(f"{host} gave way after {float(found[1]) - short_at:.3f} s")
    assert all(on.agent_pid(h) for h in on.hosts()), "who trains keeps what it has"
    at = max(line["version"] for line in on.lines("sealed"))
    on.reach(at + 3)
    until(lambda: out.exists() and "had" in out.read_text(), 30, what="the other owner's job")


def test_kept_after_a_failure_for_the_retention_time(site: Site) -> None:
    site.configure(retention_s=4.0)
    job = site.job(**FAILS)
    job.reach(3)
    hosts = detached(site, job)
    gone_at = time.monotonic()
    time.sleep(1.5)
    assert all(job.agent_pid(h) for h in hosts)
    until(lambda: not any(job.agent_pid(h) for h in hosts), 15, what="retention over")
    assert time.monotonic() - gone_at > 2.0
    assert "the retention time of 4 s is over" in job.agent_log(hosts[0])


@pytest.mark.parametrize("how", ["COMPLETED", "CANCELLED"])
def test_nothing_is_kept_when_slurm_says_that_it_is_over(site: Site, how: str) -> None:
    """No rank has called close(), so at the epilog the agents cannot know; the controller can."""
    job = LiteJob(site.cluster, nodes=2, steps=1000, run="timeout 5 srun").submit()
    job.reach(3)
    hosts = job.hosts()
    if how == "CANCELLED":
        site.cluster.run(["scancel", str(job.id)])
    until(lambda: job.state == how, 90, 0.1, what=how)
    until(lambda: not any(job.agent_pid(h) for h in hosts), 20, 0.1, what="let go")
    assert f"controller: job {how}" in job.agent_log(hosts[0]), job.agent_log(hosts[0])


@pytest.mark.parametrize(
    ("state", "kept"), [("FAILED", True), ("NODE_FAIL", True), ("OUT_OF_MEMORY", True), ("PENDING", True),
                        ("COMPLETED", False), ("CANCELLED", False), ("TIMEOUT", True), ("DEADLINE", False)]
)  # fmt: skip
def test_states(state: str, kept: bool) -> None:
    assert (find_release_reason(state, 1.0, 900.0) == "") == kept
    assert find_release_reason("FAILED", 901.0, 900.0)
