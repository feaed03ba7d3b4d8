"""The persistent tier: what is saved there, when, and what the job does without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from heat import Heat
from tiers import saved
from waiting import until

from gemini_hpc.core.slots import Stamp
from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster


def ask(job: Heat, user: str, *options: str) -> subprocess.CompletedProcess[str]:
    return job.cluster.run(["gemini-hpc", "flush", *options, str(job.id)], user=user)


def inspect(job: Heat, *options: str) -> str:
    """What it prints, as one line: sentences are wrapped to the terminal's width."""
    return " ".join(job.cluster.run(["gemini-hpc", "inspect", *options, str(job.id)], user="alice").stdout.split())


def endless(cluster: Cluster, tier: Path) -> Heat:
    """A job that saves nothing by itself, and does not end."""
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=3600")
    job = Heat.submit(cluster, "pmi2", *options, n=60, steps=100000, step_s=0.1)
    job.reach(8)
    return job


@pytest.fixture
def configure(cluster: Cluster) -> Iterator[Callable[[str], Any]]:
    """Add lines to the site's settings, for jobs that start from now on."""
    file = cluster.directory / "etc" / "gemini-hpc" / "gemini.toml"
    text = file.read_text()
    yield lambda lines: file.write_text(f"{text}\n{lines}\n")
    file.write_text(text)


def test_flush_by_hand(cluster: Cluster, tier: Path) -> None:
    """Between two saves, by word of mouth; and by nobody else's."""
    job = endless(cluster, tier)
    mine = ask(job, "alice")
    assert mine.returncode == 0, mine.stderr
    [first] = saved(tier, job)
    assert f"version {first.epoch}:{first.version} is in {tier}" in mine.stdout
    assert ask(job, "bob").returncode == 1 and len(saved(tier, job)) == 1
    told = inspect(job, "--json")
    of_training = json.loads(told)["trainings"][0]["tier"]
    assert (of_training["directory"], of_training["version"], of_training["saving"], of_training["problem"]) == (
        str(tier),
        list(first),
        None,
        "",
    )
    assert 0 <= of_training["age_s"] < 60
    assert f"tier {tier}: version {first.epoch}:{first.version}, " in inspect(job)
    job.reach(first.version + 6)
    asked = ask(job, "root", "--json")
    assert asked.returncode == 0, (asked, job.slurm())
    found = json.loads(asked.stdout)
    assert (
        found["trainings"][0]["version"] == list(saved(tier, job)[0]) and saved(tier, job)[0].version > first.version
    )


def drained(job: Heat, tier: Path) -> None:
    """An administrator drains one of the job's nodes: its agents save what they have, and it goes on."""
    before, host = saved(tier, job)[0], job.hosts()[2]
    job.cluster.run(["scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=fan"])
    until(lambda: saved(tier, job)[0] > before, 40, what="a version on the tier, because a node is drained")
    assert job.slurm()["JobState"] == "RUNNING"
    job.cluster.run(["scontrol", "update", f"NodeName={host}", "State=RESUME"])


def partition_drained(job: Heat, tier: Path) -> None:
    """And the same for the whole partition."""
    before, partition = saved(tier, job)[0], f"PartitionName={job.slurm()['Partition']}"
    job.cluster.run(["scontrol", "update", partition, "State=DRAIN"])
    try:
        until(lambda: saved(tier, job)[0] > before, 40, what="a version on the tier, because a partition is drained")
    finally:
        job.cluster.run(["scontrol", "update", partition, "State=UP"])
    assert job.slurm()["JobState"] == "RUNNING"
    told = job.cluster.run(["gemini-hpc", "inspect", str(job.id), "--json"], user="alice").stdout
    assert "partition " in told and " is DRAIN: saving this version to the tier" in told, told


def test_which_versions_stay(cluster: Cluster, tier: Path) -> None:
    """The newest two, and each third that the job saves, whatever is done to it in between."""
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=3600")
    job = Heat.submit(cluster, "pmi2", *options, n=60, steps=100000, step_s=0.1)
    made: list[Stamp] = []
    for count in range(1, 7):
        if count == 5:
            host = job.hosts()[1]
            cluster.cut_power(host)
            until(lambda: job.lines("start")[-1]["start"] > 0, 60, what="the job is back")
        job.reach(made[-1].version + 2 if made else 4)
        if count == 3:
            drained(job, tier)
        elif count == 4:
            partition_drained(job, tier)
        else:
            done = ask(job, "alice")
            assert done.returncode == 0, done.stderr
        made.append(saved(tier, job)[0])
    assert sorted(set(made)) == made, "each was newer than the one before"
    assert saved(tier, job) == [made[5], made[4], made[2]]


def test_a_planted_directory_is_passed_over(cluster: Cluster, tier: Path) -> None:
    """Another user has taken the next job's name in a sticky directory: the job saves beside it, says so, and
    after the loss of all nodes and of the controller's state goes on from what it has saved itself."""
    team = cluster.directory / "home" / tier.name
    team.mkdir()
    team.chmod(0o1777)
    number = cluster.submit_job(["-N1", "--wrap=true"]) + 1
    planted = team / f"gemini-{number}"
    assert cluster.run(["mkdir", "-m", "755", str(planted), f"{planted}/default"], user="bob").returncode == 0
    job = Heat.submit(
        cluster, "pmi2", f"--gemini-tier={team}", "--gemini-tier-interval=3600", n=60, steps=10**5, step_s=0.1
    )
    assert job.id == number
    job.reach(8)
    done = ask(job, "alice")
    (own,) = team.glob(f"gemini-{number}-*")
    assert done.returncode == 0 and str(own) in done.stdout, (done, job.said())
    assert own.stat().st_uid == 5001 and list(planted.iterdir()) == [planted / "default"]
    assert f"{planted} is another job's" in inspect(job, "--json")
    for host in job.hosts():
        cluster.cut_power(host)
    cluster.stop_controller()
    for path in (cluster.directory / "controller").iterdir():  # all that it knew of the job
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cluster.start_controller()
    cluster.run(["scontrol", "requeue", str(job.id)])
    cluster.restore(0)
    until(lambda: len(job.lines("start")) == 2, 90, what="the job is back")
    assert job.lines("start")[1]["start"] >= 8
    until(lambda: "from the tier" in job.said(), 10, what="srun has passed the line on")


def test_the_tier_is_away_when_it_is_wanted(cluster: Cluster, tier: Path) -> None:
    """As while a file system is not mounted: the job waits, says for what, and goes on when it is there."""
    away = tier.with_name("tier-away")
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=1")
    job = Heat.submit(cluster, "pmi2", *options, n=60, steps=100000, step_s=0.1)
    until(lambda: saved(tier, job), 60, what="a version on the tier")
    for host in job.hosts():
        cluster.cut_power(host)
    tier.rename(away)
    newest = saved(away, job)[0]
    cluster.run(["scontrol", "requeue", str(job.id)])
    cluster.restore(0)
    reason = f"cannot read the tier: {tier}: the directory is not there"
    until(lambda: f"waiting: {reason}" in job.said(), 90, what=f"it says: {reason}")
    assert reason in inspect(job)
    time.sleep(5)  # the agents look each second
    assert len(job.lines("start")) == 1, "it has not begun anew"
    away.rename(tier)
    until(lambda: len(job.lines("start")) == 2, 60, what="the job is back")
    assert job.lines("start")[1]["start"] == newest.version
    until(lambda: "from the tier" in job.said(), 10, what="srun has passed the line on")


def test_a_tier_that_is_not_there(cluster: Cluster) -> None:
    """Its user hears of it when the job begins; it is as protected as without."""
    tier = cluster.locate_home("alice") / "not-there"
    job = Heat.submit(cluster, "pmi2", f"--gemini-tier={tier}", n=60, steps=30, step_s=0.1)
    job.finish()
    reason = f"gemini-hpc: cannot read the tier: {tier}: the directory is not there"
    assert job.said().count(reason) == 1 and not tier.exists(), job.said()


def test_the_site_has_a_tier_for_all(cluster: Cluster, configure: Callable[[str], Any]) -> None:
    """Its user says nothing of one, and has no directory there yet."""
    above = cluster.locate_home("alice") / "site"
    above.mkdir()
    above.chmod(0o777)
    configure(f'tier = "{above}/{{user}}"\ntier_interval_s = 1.0')
    job = Heat.submit(cluster, "pmi2", n=60, steps=60, step_s=0.1)
    until(lambda: saved(above / "alice", job), 60, what="a version on the site's tier")
    job.finish()
    assert "cannot read the tier" not in job.said(), job.said()
    made = (above / "alice").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (5001, 0o700)


def test_an_automatic_interval_is_long_once_a_save_has_been_measured(
    cluster: Cluster, tier: Path, configure: Callable[[str], Any]
) -> None:
    """The site's second holds until then; two nodes of a group are hardly ever lost together."""
    configure("tier_interval_s = 1.0")
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=auto")
    job = Heat.submit(cluster, "pmi2", *options, n=60, steps=150, step_s=0.1)
    until(lambda: saved(tier, job), 60, what="a version on the tier")
    until(lambda: "h: auto: a save takes" in inspect(job), 20, what="an automatic interval")
    first = saved(tier, job)[0]
    (training,) = json.loads(inspect(job, "--json"))["trainings"]
    assert 3600 < training["tier"]["interval_s"] <= 86400
    job.reach(first.version + 30)
    assert saved(tier, job) == [first], "three seconds later nothing more is due"
    job.finish()


def test_before_the_time_limit(cluster: Cluster, tier: Path, configure: Callable[[str], Any]) -> None:
    """The limit comes down to two minutes after the job has begun."""
    configure("tier_before_end_s = 120.0")
    job = endless(cluster, tier)
    assert not saved(tier, job)
    cluster.run(["scontrol", "update", f"JobId={job.id}", "TimeLimit=2"])
    until(lambda: saved(tier, job), 60, what="a version on the tier before the time limit")
    assert job.slurm()["JobState"] == "RUNNING" and saved(tier, job)[0].version >= 8


def test_a_job_that_is_cancelled_leaves_its_last_version(cluster: Cluster, tier: Path) -> None:
    """Nobody saves at an interval: agents do when the job has ended, then free the memory."""
    job = endless(cluster, tier)
    job.reach(10)
    job.cluster.run(["scancel", str(job.id)])
    until(lambda: saved(tier, job), 30, what="a version on the tier after the job's end")
    last = max(line["step"] for line in job.lines("step"))
    assert saved(tier, job)[0].version >= last - 2
