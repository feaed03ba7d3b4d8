"""An agent, a trainer, a node, all nodes die at each stage of a drain, and the disk is full: on a real cluster.

One job of the MPI example, whose plate is known at each step. Whatever happens, the newest whole version on the
tier is the plate of that step, bit by bit; the job goes on; the next whole version leaves nothing half behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from heat import Heat, plates
from sharing import Shared
from waiting import until

from gemini_hpc.core.slots import Stamp
from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.tier import nodefile, version

pytestmark = pytest.mark.cluster

N = 48
STAGES = ("begun", "writing", "some", "all", "whole")
VICTIMS = ("agent of the root", "agent of another", "trainer", "node of the root", "node of another", "every node")


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A file system that can be filled; it must be there before the nodes are, and they have a /tmp of their own.

    Not named as ours are: tests that run beside look for what is left of those.
    """
    path = Path(tempfile.mkdtemp(prefix="tier-disk-", dir="/var/tmp"))
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=1777", "none", str(path)], check=True)
        try:
            yield path
        finally:
            subprocess.run(["umount", str(path)], check=True)
    finally:
        path.rmdir()


@pytest.fixture(scope="module")
def shared(disk: Path) -> Iterator[Shared]:
    settings = {"fence_budget_nodes": 1000, "agent_restarts": 1000, "tier_bytes_per_s": 8000}
    with Shared("stages", nodes=5, settings=settings) as shared:
        yield shared


@pytest.fixture
def tier(disk: Path, cluster: Cluster) -> Path:
    """The disk, emptied: of an earlier test nobody writes to it any more."""
    subprocess.run(["rm", "-rf", *disk.iterdir()], check=True)
    return disk


@dataclass
class Drained:
    """A running job and its versions on the tier."""

    job: Heat
    tier: Path
    known: dict[int, Any] = field(default_factory=dict)
    source: Iterator[Any] = field(default_factory=lambda: plates(N))

    @property
    def directory(self) -> Path:
        return self.tier / f"gemini-{self.job.id}/default"

    def newest(self) -> Stamp:
        """The whole one that a recovery would take, looked through."""
        manifest = next(version.list_whole(str(self.directory)), None)
        if manifest is None:
            return Stamp(0, 0)
        stamp = Stamp(*manifest.stamp)
        try:
            self.check(stamp, manifest)
        except FileNotFoundError:  # two newer ones are whole meanwhile
            return self.newest()
        return stamp

    def check(self, stamp: Stamp, manifest: version.VersionManifest) -> None:
        where = self.directory / version.format_name(stamp)
        for name, stored in manifest.map_shards().values():
            with nodefile.NodeFileReader(str(where / name)) as reader:
                reader.read(stored, memoryview(bytearray(stored.used)))
        with h5py.File(where / "index.h5") as index:
            field = index["tensors/field"][:]
        assert np.array_equal(field, self.plate(stamp.version)), stamp

    def plate(self, step: int) -> Any:
        while step not in self.known:
            self.known[len(self.known)] = next(self.source)
        return self.known[step]

    def half(self) -> list[str]:
        """What has not become whole and is no drain of now."""
        top = self.newest()
        entries = [Path(entry.path) for entry in os.scandir(self.directory)]
        return [
            path.name
            for path in entries
            if ((stamp := version.parse_name(path.name)) is None or stamp < top)
            and not (path / version.MANIFEST).exists()
        ]

    def stage(self, wanted: str) -> Stamp:
        """Wait until a drain that begins now has got there."""
        known = set(version.list_stamps(str(self.directory)))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for stamp in version.list_stamps(str(self.directory)):
                if stamp not in known and _is(wanted, os.listdir(self.directory / version.format_name(stamp))):
                    return stamp
            time.sleep(0.001)
        raise AssertionError(f"no drain came to {wanted}\n{self.story()}")

    def next_whole(self, after: Stamp, timeout_s: float = 60.0) -> None:
        try:
            until(lambda: self.newest() > after, timeout_s, 0.1, what=f"a version newer than {after} on the tier")
            until(lambda: not self.half(), 20, 0.1, what="half versions are gone")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.half()}\n{self.story()}") from None
        assert self.job.agrees()

    def story(self) -> str:
        cluster = self.job.cluster
        told = cluster.run(["gemini-hpc", "inspect", str(self.job.id), "--full"], user="alice")
        controller = (cluster.log_directory / "controller.log").read_text()[-3000:]
        return f"{self.job.said()[-3000:]}\n{told.stdout}{told.stderr}\n{controller}\n{self.job.slurm()}"


def _is(stage: str, names: list[str]) -> bool:
    files = [name for name in names if name.startswith("node-")]
    return {
        "begun": True,
        "writing": any(name.startswith(".node-") for name in names),
        "some": bool(files),
        "all": len(files) == 3,
        "whole": version.MANIFEST in names,
    }[stage]


@pytest.fixture
def drained(cluster: Cluster, tier: Path) -> Drained:
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=1")
    job = Drained(Heat.submit(cluster, "pmi2", *options, n=N, steps=100000, step_s=0.05), tier)
    job.job.reach(5)
    until(lambda: job.newest() > Stamp(0, 0), 30, what="a version on the tier")
    return job


def kill_agent(job: Heat, host: str) -> None:
    pids = job.cluster.exec(host, ["pgrep", "-f", f"gemini_hpc.agent --job {job.id} "]).stdout.split()
    job.cluster.exec(host, ["kill", "-9", max(pids, key=int)])


def strike(job: Heat, victim: str, hosts: list[str]) -> Callable[[], None]:
    """Do it; returned is what has to be done for the next one to find a cluster that is whole."""
    cluster, host = job.cluster, hosts[0] if victim.endswith("root") else hosts[1]
    if victim.startswith("agent"):
        kill_agent(job, host)
        return lambda: None
    if victim == "trainer":
        cluster.exec(host, ["pkill", "-KILL", "-f", "heat_mpi[.]py"])
        return lambda: None
    going = cluster.node_names if victim == "every node" else [host]
    for node in going:
        cluster.cut_power(node)
    if victim == "every node":
        cluster.restore(0)
        return lambda: None
    return lambda: cluster.restore(0)


def repeated(job: Heat) -> int:
    """Steps that have been done again till now."""
    steps = [line["step"] for line in job.lines("step")]
    return len(steps) - len(set(steps))


def campaign(drained: Drained, cases: list[tuple[str, str]]) -> None:
    job = drained.job
    for stage, victim in cases:
        until(lambda: job.slurm().get("JobState") == "RUNNING", 60, what="running")
        hosts, before, again = job.hosts(), drained.newest(), repeated(job)
        drained.stage(stage)
        repair = strike(job, victim, hosts)
        newest = drained.newest()
        print(f"{stage}: {victim}: {before} before, {newest} after", flush=True)
        assert newest >= before
        # Where nobody is left to tell, Slurm itself finds out after a minute that the job is gone.
        drained.next_whole(newest, 150 if victim == "every node" else 60)
        repair()
        if victim == "every node":
            assert f"resumed at version {newest.version} from the tier" in job.said(), job.said()
        else:
            more = repeated(job) - again
            assert more <= 1, f"{stage}: {victim}: {more} repeated\n{drained.story()}"


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_each_victim(drained: Drained, stage: str) -> None:
    """A job for each stage: after five times that a job is lost with all of its nodes Slurm holds it."""
    campaign(drained, [(stage, victim) for victim in VICTIMS])


def test_the_newest_version_is_damaged(drained: Drained) -> None:
    """And memory has nothing: the one before it is taken, and the damage is told."""
    job, cluster = drained.job, drained.job.cluster
    until(lambda: len(list(version.list_whole(str(drained.directory)))) == 2, 30, what="two versions on the tier")
    for node in cluster.node_names:
        cluster.cut_power(node)
    newest, older = (Stamp(*manifest.stamp) for manifest in version.list_whole(str(drained.directory)))
    bend(drained.directory / version.format_name(newest) / "node-0001.h5")
    cluster.run(["scontrol", "requeue", str(job.id)])
    cluster.restore(0)

    def newer() -> bool:
        return Stamp(*next(version.list_whole(str(drained.directory))).stamp) > newest

    until(newer, 120, 0.1, what="a version newer than the damaged one")
    drained.next_whole(newest)
    assert f"resumed at version {older.version} from the tier" in job.said(), job.said()
    told = cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout
    assert "its digest differs" in told, told


def bend(path: Path) -> None:
    """One number of the plate is another."""
    with h5py.File(path, "r+") as file:
        found: list[h5py.Dataset] = []
        file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
        plate = max(found, key=lambda dataset: dataset.nbytes)
        plate[0, 0] = plate[0, 0] + 1.0


def test_the_disk_is_full(drained: Drained) -> None:
    """The disk fills in the midst of a drain; tests/tier fills it at each system call."""
    before = drained.newest()
    drained.stage("writing")
    filler = drained.tier / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    job = drained.job
    until(lambda: "versions are not saved to the tier: " in job.said(), 60, what=f"it is told\n{drained.story()}")
    newest = drained.newest()
    assert newest >= before
    filler.unlink()
    drained.next_whole(newest)
    until(lambda: "versions are saved to the tier again" in job.said(), 60, what=f"it is told\n{drained.story()}")
    assert "the file system is full" in job.said(), job.said()
    told = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout
    full = [e for e in json.loads(told)["events"] if e["name"] == "not_saved" and "system is full" in e["detail"]]
    assert len(full) == 1, f"told once: {full}"
    assert job.slurm()["Restarts"] == "0"


def test_a_job_that_ends_well_in_a_drain(cluster: Cluster, tier: Path) -> None:
    """What it was writing will never become whole: it goes with the agents."""
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=1")
    job = Heat.submit(cluster, "pmi2", *options, n=N, steps=60, step_s=0.05)
    directory = tier / f"gemini-{job.id}/default"
    until(directory.exists, 60, what="a drain")
    job.finish()
    until(lambda: not _half(directory), 20, what="half versions are gone")


def _half(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if not (directory / name / version.MANIFEST).exists()]
