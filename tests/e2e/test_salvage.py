"""A node is lost and nobody takes its place: the others save what is in their memory to the tier, before that is
freed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from heat import Heat, plates
from sharing import Shared
from tiers import saved
from waiting import until

from gemini_hpc.core.slots import Stamp
from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.node.meminfo import read_meminfo
from gemini_hpc.tier import version

pytestmark = pytest.mark.cluster

N, STEPS = 48, 160
MIB = 1 << 20
BELOW_MIB, MOST_MIB = 1024, 8192
# Takes memory until less than so much of it is free, whatever others do meanwhile; then keeps it for a while.
HOG = """
import mmap, sys, time
def free():
    return int(next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable")).split()[1]) << 10
kept = []
while free() > int(sys.argv[1]) and len(kept) < int(sys.argv[2]) // 64:
    kept.append(mmap.mmap(-1, 64 << 20))
    kept[-1][:] = bytes(64 << 20)
time.sleep(30)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    settings = {"fence_budget_nodes": 1000, "tier_salvage_s": 5, "retention_s": 15, "memory_floor_bytes": 64 * MIB}
    with Shared("salvage", nodes=4, settings=settings) as shared:
        yield shared


def lost(cluster: Cluster, tier: Path, which: int) -> tuple[Heat, list[str]]:
    """A job of three nodes that has lost one of them, and there is no other; the hosts that are left."""
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=3600", "-wn1,n2,n3")
    job = Heat.submit(cluster, "pmi2", *options, n=N, steps=STEPS, step_s=0.05)
    job.reach(8)
    cluster.run(["scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=fan"])
    hosts = job.hosts()
    assert not saved(tier, job)
    cluster.cut_power(hosts[which])
    return job, [host for host in hosts if host != hosts[which]]


def agents(job: Heat) -> list[str]:
    """Hosts on which the job has one."""
    on = [host for host in job.cluster.node_names if job.cluster.is_on(host)]
    return [h for h in on if job.cluster.exec(h, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.strip()]


def story(job: Heat) -> str:
    told = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--full"], user="alice")
    return f"{job.said()[-2000:]}\n{told.stdout}{told.stderr}\n{job.slurm()}"


def newest(tier: Path, job: Heat, timeout_s: float) -> Stamp:
    """The version that has been saved: the plate of its step, and the last or the one before it of what was done."""
    try:
        until(lambda: saved(tier, job), timeout_s, what="a version on the tier")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(job)}") from None
    [stamp] = saved(tier, job)
    done = max(line["step"] for line in job.lines("step"))
    assert done - 1 <= stamp.version <= done + 1
    where = tier / f"gemini-{job.id}/default" / version.format_name(stamp)
    assert sorted(path.name for path in where.glob("*.h5")) == ["index.h5", *(f"node-000{i}.h5" for i in range(3))]
    with h5py.File(where / "index.h5") as index:
        assert np.array_equal(index["tensors/field"][:], next(itertools.islice(plates(N), stamp.version, None)))
    return stamp


def test_a_job_that_waits_for_a_node(cluster: Cluster, tier: Path) -> None:
    """Longer than memory is kept: it comes back from the tier, and repeats at most one step."""
    job, left = lost(cluster, tier, 1)
    stamp = newest(tier, job, 45)
    assert set(agents(job)) == set(left) and job.slurm()["JobState"] == "PENDING"
    until(lambda: not agents(job), 40, what="retention over")
    cluster.restore(0)
    until(lambda: job.slurm()["JobState"] == "RUNNING", 90, what="running")
    job.finish()
    assert f"resumed at version {stamp.version} from the tier" in job.said(), job.said()
    assert job.agrees() and job.lines("start")[-1]["start"] == stamp.version


def test_a_job_that_is_cancelled_while_it_waits(cluster: Cluster, tier: Path) -> None:
    """No epilog runs for it; the controller's word frees the memory, when it has been saved."""
    job, _ = lost(cluster, tier, 1)
    until(lambda: job.slurm()["JobState"] == "PENDING", 30, 0.01, what="requeued")
    cluster.run(["scancel", str(job.id)])
    newest(tier, job, 30)
    until(lambda: not agents(job), 20, what="memory freed")


def test_a_job_that_is_flushed_by_hand_while_it_waits(cluster: Cluster, tier: Path) -> None:
    """It has no nodes then: the controller knows where its agents are. Two words of it: there, and there already."""
    job, left = lost(cluster, tier, 0)
    until(lambda: job.slurm()["JobState"] == "PENDING", 30, 0.01, what="requeued")
    told = [cluster.run(["gemini-hpc", "flush", str(job.id)], user="alice") for _ in range(2)]
    stamp = newest(tier, job, 0)
    for one in told:
        assert one.returncode == 0, one.stderr + story(job)
        assert f"version {stamp.epoch}:{stamp.version} is in {tier}" in one.stdout
    assert set(agents(job)) == set(left)
    assert cluster.run(["gemini-hpc", "flush", str(job.id)], user="bob").returncode == 1
    until(lambda: not agents(job), 40, what="retention over")
    none = cluster.run(["gemini-hpc", "flush", str(job.id)], user="alice")
    assert (
        none.returncode == 1
        and "the job has no nodes now, and none of its agents is connected to the controller" in none.stderr
    ), none.stderr


@pytest.mark.alone
def test_a_job_whose_memory_is_wanted_by_others(cluster: Cluster, tier: Path) -> None:
    free = read_meminfo()["MemAvailable"]
    assert free > 2 * MOST_MIB * MIB, f"{2 * MOST_MIB} MiB of free memory are wanted, {free // MIB} are there"
    floor = free - BELOW_MIB * MIB
    file = cluster.directory / "etc" / "gemini-hpc" / "gemini.toml"
    text = file.read_text()
    own = {"memory_floor_bytes": floor, "tier_salvage_s": 600}
    lines = [line for line in text.splitlines() if line.split(" ")[0] not in own]
    file.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in own.items())]) + "\n")
    try:
        job, left = lost(cluster, tier, 2)
        until(lambda: job.slurm()["JobState"] == "PENDING", 30, what="requeued")
        time.sleep(1)
        assert not saved(tier, job) and set(agents(job)) == set(left)
        down_to = floor - BELOW_MIB * MIB // 2
        with cluster.start_command(["python3", "-c", HOG, str(down_to), str(MOST_MIB)], "bob") as process:
            newest(tier, job, 30)
            until(lambda: not agents(job), 20, what="memory freed")
            process.kill()
        logs = [cluster.exec(host, ["cat", f"/run/gemini-hpc/{job.id}/agent.log"]).stdout for host in left]
        assert all("free memory has fallen below the floor" in log for log in logs), logs
    finally:
        file.write_text(text)
