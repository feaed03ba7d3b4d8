"""The MPI example on a real cluster: a node is cut, the requeued job ends with the field of one process."""

from __future__ import annotations

import hashlib
import shutil
from itertools import islice

import pytest
from heat import LAUNCHERS, Heat, plates, swept
from leaks.cluster import nothing_left
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

N, STEPS = 300, 50


@pytest.fixture(scope="module")
def wanted() -> str:
    """The final field's digest."""
    return hashlib.sha256(next(islice(plates(N), STEPS, None)).tobytes()).hexdigest()


@pytest.mark.parametrize(
    "how",
    [
        *(how for how in LAUNCHERS if how != "pmix"),
        pytest.param(
            "pmix", marks=pytest.mark.witness("an MPI program loses a node: the result is that of one process")
        ),
    ],
)
def test_a_node_is_cut(cluster: Cluster, wanted: str, how: str) -> None:
    with nothing_left(cluster, 30):
        job = Heat.submit(cluster, how, n=N, steps=STEPS, step_s=0.1)
        job.reach(15)
        host = job.hosts()[1]
        cluster.power_off(host)
        assert job.finish() == wanted
        assert "from memory" in job.said(), job.said()
        steps = [line["step"] for line in job.lines("step")]
        assert set(steps) == set(range(1, STEPS + 1)) and len(steps) - STEPS <= 1, steps
        assert job.agrees()
        cluster.restore()
        swept(cluster)


def test_all_nodes_are_cut_and_fewer_are_left(cluster: Cluster, wanted: str) -> None:
    """Its user lets it go on with two: from its own files on the tier, by two ranks instead of three."""
    tier = cluster.home("alice") / "tier-heat"
    tier.mkdir(mode=0o777)
    shutil.chown(tier, 5001)
    with nothing_left(cluster, 45):
        options = (f"--gemini-tier={tier}", "--gemini-tier-interval=1")
        job = Heat.submit(cluster, "pmi2", *options, n=N, steps=STEPS, step_s=0.2)
        until(lambda: any(tier.glob(f"gemini-{job.id}/default/*/manifest.*")), 60, what="a version on the tier")
        hosts = job.hosts()
        for host in hosts:
            cluster.power_off(host)
        until(lambda: job.slurm()["JobState"] == "PENDING", 90, what="the requeue")
        cluster.run(["scontrol", "update", f"JobId={job.id}", "NumNodes=2", "NumTasks=2"])
        assert job.finish() == wanted
        assert "from the tier" in job.said(), job.said()
        lives = job.lines("start")
        assert [life["ranks"] for life in lives] == [3, 2] and lives[1]["start"] > 0
        assert job.agrees()
        cluster.restore(90)
        swept(cluster)


def test_a_program_chooses_its_tier(cluster: Cluster) -> None:
    """Without a word of it in the submission: new agents hear of it from the ranks, and look there."""
    tier = cluster.home("alice") / "tier-chosen"
    tier.mkdir(mode=0o777)
    shutil.chown(tier, 5001)
    with nothing_left(cluster, 45):
        program = ("--tier", str(tier), "--tier-interval-s", "1")
        job = Heat.submit(cluster, "pmi2", n=N, steps=100000, step_s=0.1, program=program)
        until(lambda: any(tier.glob(f"gemini-{job.id}/default/*/manifest.*")), 60, what="a version on the tier")
        told = cluster.run(["gemini-hpc", "inspect", str(job.id)], user="alice").stdout
        assert f"tier {tier}: version " in " ".join(told.split()), told
        for host in job.hosts():
            cluster.power_off(host)
        cluster.run(["scontrol", "requeue", str(job.id)])
        cluster.restore(0)
        until(lambda: len(job.lines("start")) == 2, 120, what="the job is back")
        assert job.lines("start")[1]["start"] > 0 and "from the tier" in job.said(), job.said()
        cluster.run(["scancel", str(job.id)])
        until(lambda: not cluster.run(["squeue", "-h"]).stdout.strip(), 60, what="queue empty")
        cluster.restore()
        swept(cluster)
