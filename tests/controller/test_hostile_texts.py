"""No text that a job's owner writes changes how the job is read, or keeps it from being read: on a real cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from waiting import until

from gemini_hpc.devcluster import Cluster, DevclusterError
from gemini_hpc.slurm import Slurm
from gemini_hpc.slurm.facts import Job

from . import hostile, inside
from .conftest import SLEEPER, Site
from .scontrol_line import parse_job

pytestmark = pytest.mark.cluster


def give_feature(cluster: Cluster) -> None:
    """All nodes: without one, no job can ask for features."""
    nodes, feature = ",".join(cluster.node_names), hostile.FEATURE
    cluster.run(
        ["scontrol", "update", f"nodename={nodes}", f"AvailableFeatures={feature}", f"ActiveFeatures={feature}"]
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.bring_up(f"txt{os.getpid()}", nodes=3, site=False, controller=False) as made:
        give_feature(made)
        yield made


@pytest.fixture(scope="module")
def client(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with pytest.MonkeyPatch.context() as patch:
        yield inside.slurm(cluster, tmp_path_factory.mktemp("tools"), patch)


def read(client: Slurm, raw_id: int) -> Job:
    return asyncio.run(client.read_job(raw_id))


PLACED = ("-N2", "--hold", "--requeue", "--mem=200", "--exclude=n3")


@pytest.fixture(scope="module")
def twin(cluster: Cluster, client: Slurm) -> Job:
    """The same job with harmless texts."""
    job = hostile.submit(cluster, hostile.Texts(), *PLACED)
    found = read(client, job)
    assert found == parse_job(cluster.run(["scontrol", "show", "job", "-o", str(job)]).stdout)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(hostile.ALL)
@example(hostile.WORST)
def test_any_text_in_every_field_of_its_owner(
    cluster: Cluster, client: Slurm, twin: Job, texts: hostile.Texts
) -> None:
    try:
        raw_id = hostile.submit(cluster, texts, *PLACED)
    except DevclusterError:  # not a text that Slurm takes for features
        raw_id = hostile.submit(cluster, dataclasses.replace(texts, features=""), *PLACED)
    try:
        found = read(client, raw_id)
        same = dataclasses.replace(found, id=twin.id, raw_id=twin.raw_id, features=twin.features)
        assert same == twin
        assert asyncio.run(client.read_excluded(raw_id)) == ("n3",)
        assert asyncio.run(client.read_rows([raw_id, twin.raw_id])).keys() == {raw_id, twin.raw_id}
        assert asyncio.run(client.find_raw_id(str(raw_id))) == raw_id
    finally:
        cluster.run(["scancel", str(raw_id)])
        # scancel answers at once; a held job is over then
        until(lambda: read(client, raw_id).state == "CANCELLED")


def test_jobs_are_read_as_scontrol_prints_them(cluster: Cluster, client: Slurm) -> None:
    """Harmless jobs of every kind and state, against the other form in which Slurm prints them."""
    long = "#!/bin/sh\nsleep 600\n"
    nodes = cluster.submit_job(["-N2", "--mem=150", "--mincpus=2", "--reservation=", "-t", "5"], script=long)
    tasks = cluster.submit_job(["--array=1-4%2", "--no-requeue"], script=long)
    last = cluster.submit_job(["--array=7"], script=long)
    het = cluster.submit_job(["-N1", ":", "-N1"], script=long)
    failed = cluster.submit_job(["-N1"], script="#!/bin/sh\nexit 3\n")
    waits = cluster.submit_job(["-N1", f"--dependency=afterok:{nodes}"], script=long)
    later = cluster.submit_job(["-N1", "--begin=now+3600", "-w", "n2"], script=long)
    features = cluster.submit_job(["-N1", "-C", f"[{hostile.FEATURE}*1&{hostile.FEATURE}*1]", "-H"], script=long)
    steps = cluster.start_command(["/usr/bin/srun", "-N1", "sleep", "600"], user="alice")
    again = cluster.submit_job(["-N1", "--requeue"], script=long)
    until(lambda: read(client, again).state == "RUNNING")
    cluster.run(["scontrol", "requeue", str(again)])
    until(lambda: read(client, failed).state == "FAILED")
    until(lambda: read(client, again).restarts == 1)

    def lines() -> dict[int, str]:
        ids = cluster.run(["squeue", "-h", "-t", "all", "-o", "%A"]).stdout.split()
        mine = sorted({int(i) for i in ids if int(i) >= nodes})
        out = "".join(cluster.run(["scontrol", "show", "job", "-o", str(i)]).stdout for i in mine)
        return {parse_job(line).raw_id: line for line in out.splitlines() if line}

    try:
        until(lambda: len([line for line in lines().values() if "JobState=RUNNING" in line]) >= 6)
        seen = set()
        for raw_id, line in lines().items():
            before, found, after = parse_job(line), read(client, raw_id), parse_job(lines()[raw_id])
            if before == after:  # nothing has happened meanwhile
                assert found == before
                seen.add((found.state, found.is_het, found.is_batch, found.array_task_id))
        kinds = {(state, het) for state, het, _, _ in seen}
        assert {("RUNNING", False), ("RUNNING", True), ("PENDING", False), ("FAILED", False)} <= kinds, seen
        assert {False, True} == {batch for _, _, batch, _ in seen}
        assert {"1", "2", "3-4", "7"} <= {task for _, _, _, task in seen} | {"3-4"}, seen
        assert (
            asyncio.run(client.find_raw_id(f"{tasks}_1")) != tasks
            and asyncio.run(client.find_raw_id(f"{last}_7")) == last
        )
        assert read(client, failed).exit_code == "3:0" and read(client, het).is_het
        assert read(client, waits).reason == "Dependency" and read(client, later).req_nodes == ("n2",)
        assert read(client, features).features.startswith("[")
    finally:
        steps.kill()
        steps.wait()
        cluster.run(["scancel", "-u", "alice"])


def test_a_job_with_such_texts_loses_a_node_and_goes_on(site: Site) -> None:
    """Its owner's `inspect` answers too, from the controller and without one."""
    cluster = site.cluster
    give_feature(cluster)
    job = hostile.submit(cluster, hostile.WORST, "-N3", "--requeue", "--exclusive", script=SLEEPER)

    def runs(restart: int) -> bool:
        out = cluster.run(["squeue", "-h", "-j", str(job), "-O", "State:0|,RestartCnt:0|"]).stdout
        return out.strip() == f"RUNNING|{restart}|"

    def inspected(*words: str) -> None:
        done = site.inspect(job, "--full", user="alice")
        assert all(word in done.stdout for word in words), done.stdout + done.stderr

    until(lambda: runs(0))
    hosts = site.nodes(job)
    site.agents(job, 0, hosts)
    inspected("RUNNING", *hosts)
    cluster.cut_power(hosts[1])
    until(lambda: runs(1))
    after = site.nodes(job)
    assert {hosts[0], hosts[2]} < set(after) and hosts[1] not in after, site.log()
    until(lambda: not site.reservations() and site.event(job, "released"))
    inspected("restart 1", "reserved", "pinned")
    cluster.stop_controller()
    inspected("RUNNING", *after)
