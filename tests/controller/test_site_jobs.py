"""Requirements arrays, heterogeneous-jobs, pins, reservations, hold-only-after-a-death, requeue, slurms-own-timers,
plugin-loaded on a real cluster: what is done to jobs, and to whose."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from .conftest import PYTHON, SLEEPER, Site

pytestmark = pytest.mark.cluster

ASK_SLURM = """
import asyncio, sys
from gemini_hpc.slurm import Slurm, SlurmError
async def main():
    slurm = Slurm()
    job = await slurm.read_job(int(sys.argv[1]))
    try:
        await slurm.pin_job(job, sys.argv[2].split(","), "")
    except SlurmError as exc:
        print("refused:", exc)
    else:
        print("pinned")
asyncio.run(main())
"""


def start(site: Site, *args: str, script: str = SLEEPER) -> tuple[int, list[str]]:
    job = site.submit("--requeue", "--exclusive", *(args or ("-N3",)), script=script)
    site.running(job)
    hosts = site.nodes(job)
    site.agents(job, 0, hosts)
    return job, hosts


def record(site: Site, job: int | str) -> str:
    """The job's record without what changes by itself."""
    line = site.cluster.run(["scontrol", "show", "job", "-o", str(job)]).stdout
    changing = ("RunTime=", "LastSchedEval=", "EndTime=")
    return " ".join(word for word in line.split() if not word.startswith(changing))


def named(site: Site, job: int, *names: str) -> list[dict[str, Any]]:
    return [e for e in site.events(job) if e["name"] in names]


def nothing_held(site: Site, job: int) -> None:
    assert not named(site, job, "reserved", "pinned", "down", "sent_back"), site.log()
    assert not site.reservations()
    assert site.cluster.read_job(job).get("ReqNodeList", "(null)") == "(null)"


def test_last_task_of_three(make_site: Callable[..., Site]) -> None:
    """Its raw id is the array's own: an update by that id would change all three tasks."""
    site = make_site(nodes=8)
    array = site.submit("-N2", "--requeue", "--exclusive", "--array=1-3")
    until(lambda: len(site.cluster.run(["squeue", "-h", "-r", "-t", "R", "-o", "%A"]).stdout.split()) == 3)
    raw = int(site.cluster.run(["squeue", "-h", "-r", "-j", f"{array}_3", "-o", "%A"]).stdout)
    assert raw == array
    hosts = site.nodes(f"{array}_3")
    siblings = [f"{array}_{task}" for task in (1, 2)]
    before = [record(site, task) for task in siblings]
    site.agents(raw, 0, hosts)
    site.cluster.cut_power(hosts[1])
    until(lambda: "Restarts=1" in record(site, f"{array}_3") and "JobState=RUNNING" in record(site, f"{array}_3"))
    assert hosts[0] in site.nodes(f"{array}_3") and named(site, raw, "pinned")
    until(lambda: not site.reservations())
    assert [record(site, task) for task in siblings] == before


def test_heterogeneous_job_is_never_touched(site: Site) -> None:
    job = site.submit("-N2", "--requeue", ":", "-N1", script="#!/bin/sh\nsleep 600\n")
    site.running(job)
    leader = site.cluster.run(["scontrol", "show", "job", "-o", str(job)]).stdout.splitlines()[0]
    found = next(w.removeprefix("NodeList=") for w in leader.split() if w.startswith("NodeList="))
    hosts = site.cluster.run(["scontrol", "show", "hostnames", found]).stdout.split()
    site.agents(job, 0, hosts)
    before = record(site, job)
    site.cluster.cut_power(hosts[1])
    said = until(lambda: site.event(job, "dismissed"))
    assert "heterogeneous" in said["detail"]
    time.sleep(2)
    nothing_held(site, job)
    assert record(site, job) == before
    assert "dr" not in site.cluster.read_node_states()[hosts[1]]


def test_pin_cannot_shrink_a_running_job(site: Site) -> None:
    job, hosts = start(site)
    before = record(site, job)
    asked = site.cluster.run([PYTHON, "-I", "-c", ASK_SLURM, str(job), ",".join(hosts[:2])], user="slurm")
    assert asked.stdout.startswith("refused"), asked
    time.sleep(1)
    assert record(site, job) == before and site.nodes(job) == hosts


def test_pin_does_not_outlive_its_recovery(site: Site) -> None:
    """Requeued by hand after a recovery, the job asks for what its user asked for."""
    job, hosts = start(site)
    site.cluster.cut_power(hosts[1])
    site.running(job, restart=1)
    assert site.cluster.read_job(job)["ReqNodeList"] != "(null)"
    until(lambda: not site.reservations())
    site.cluster.run(["scontrol", "requeuehold", str(job)], user="alice")
    until(lambda: site.cluster.read_job(job)["ReqNodeList"] == "(null)")
    until(lambda: named(site, job, "unpinned"))


def test_reservation_takes_few_nodes_and_leaves_others_alone(make_site: Callable[..., Site]) -> None:
    site = make_site(nodes=9)
    run = site.cluster.run
    run(["scontrol", "create", "reservation", "ReservationName=theirs", "Nodes=n4", "Users=bob", "StartTime=now",
         "Duration=60", "Flags=FLEX"])  # fmt: skip
    job, hosts = start(site, "-N3", "-w", "n1,n2,n3")
    site.cluster.cut_power(hosts[1])
    until(lambda: site.event(job, "reserved"))
    detail = (site.event(job, "reserved") or {})["detail"]
    taken = detail.split()[0].split(",")
    assert {hosts[0], hosts[2]} < set(taken) and "n4" not in taken
    assert len(taken) == 2 + 1 + 2, "survivors, one replacement, two more"
    lasts = run(["scontrol", "show", "reservation", "-o", detail.split()[2]]).stdout
    assert "Duration=00:10:00" in lasts
    until(lambda: site.reservations() == ["theirs"])
    run(["scontrol", "delete", "ReservationName=theirs"])


def test_the_jobs_own_reservation_stays_its_own(site: Site) -> None:
    site.cluster.run(["scontrol", "create", "reservation", "ReservationName=class", "Nodes=n1,n2,n3,n4",
                      "Users=alice", "StartTime=now", "Duration=60"])  # fmt: skip
    job, hosts = start(site, "-N3", "--reservation=class")
    site.cluster.cut_power(hosts[1])
    site.running(job, restart=1)
    assert site.reservations() == ["class"]
    assert site.cluster.read_job(job)["Reservation"] == "class"
    assert "own reservation class is kept" in (site.event(job, "reserved") or {})["detail"]
    site.cluster.run(["scancel", str(job)])
    until(lambda: not site.cluster.run(["scontrol", "delete", "ReservationName=class"]).returncode)


def test_another_job_of_the_owner_cannot_use_the_reservation(site: Site) -> None:
    job, hosts = start(site)
    site.cluster.run(["scontrol", "update", "nodename=n4,n5", "state=drain", "reason=test"])
    site.cluster.cut_power(hosts[1])
    name = until(site.reservations)[0]
    other = site.submit("-N1", "--begin=now+1hour")
    until(
        lambda: not site.cluster.run(["scontrol", "update", f"JobId={other}", f"ReservationName={name}"]).returncode
    )
    until(lambda: named(site, job, "foreign_detached"))
    assert (
        "Reservation" not in site.cluster.read_job(other) or site.cluster.read_job(other)["Reservation"] == "(null)"
    )
    site.cluster.run(["scontrol", "update", "nodename=n4,n5", "state=resume"])
    site.running(job, restart=1)
    until(lambda: not site.reservations())


def test_job_that_waits_for_a_hold_keeps_no_nodes(site: Site) -> None:
    job, hosts = start(site)
    site.cluster.run(["scontrol", "update", "nodename=n4,n5", "state=drain", "reason=test"])
    site.cluster.cut_power(hosts[1])
    until(lambda: site.event(job, "start_set"))
    site.cluster.run(["scontrol", "hold", str(job)])
    held = time.monotonic()
    until(lambda: not site.reservations())
    assert time.monotonic() - held < 5
    until(lambda: site.cluster.read_job(job)["ReqNodeList"] == "(null)")


def test_drain_holds_nothing(site: Site) -> None:
    job, hosts = start(site)
    site.cluster.run(["scontrol", "update", f"nodename={hosts[1]}", "state=drain", "reason=maintenance"])
    time.sleep(3)
    assert site.cluster.read_job(job)["JobState"] == "RUNNING"
    nothing_held(site, job)
    site.cluster.run(["scontrol", "requeue", str(job)])
    site.running(job, restart=1, timeout_s=40)
    nothing_held(site, job)


def test_preemption_holds_nothing(make_site: Callable[..., Site]) -> None:
    lines = ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
             "PartitionName=high Nodes=n[1-5] PriorityTier=10 MaxTime=INFINITE State=UP"]  # fmt: skip
    site = make_site(slurm_conf=lines)
    job, _ = start(site, "-N3")
    victor = site.submit("-N4", "--exclusive", "-p", "high", user="bob", script="#!/bin/sh\nsleep 5\n")
    until(lambda: site.cluster.read_job(job)["Restarts"] == "1")
    until(lambda: site.cluster.read_job(victor)["JobState"] == "RUNNING")
    nothing_held(site, job)
    site.running(job, restart=1, timeout_s=60)
    nothing_held(site, job)


def test_job_without_requeue_is_told_so(site: Site) -> None:
    job = site.submit("-N2", "--no-requeue")
    site.running(job)
    site.agents(job, 0, site.nodes(job), "silent")
    until(lambda: "notice this job was submitted without --requeue" in site.words(job, 0, "n1"))
    assert "without --requeue" in until(lambda: site.event(job, "never_requeued"), 10)["detail"]
    document = json.loads(site.inspect(job, "--json").stdout)
    assert "without --requeue" in document["slurm"]["note"]


def test_nodes_without_an_agent_are_told(site: Site) -> None:
    job = site.submit("-N3", "--requeue")
    site.running(job)
    hosts = site.nodes(job)
    for host in hosts[:2]:
        site.agent(job, 0, host, hosts, "silent")
    said = until(lambda: site.event(job, "partly_protected"))
    assert said["detail"] == f"no agent on {hosts[2]}"


@pytest.mark.long
def test_ladder_of_a_job_that_finds_no_replacement(site: Site) -> None:
    """Pinned and reserved for two minutes at most; then the original request, and nothing held."""
    job, hosts = start(site)
    site.cluster.run(["scontrol", "update", "nodename=n4,n5", "state=drain", "reason=test"])
    site.cluster.cut_power(hosts[1])
    pending = until(lambda: site.event(job, "requeued"))["t"]
    until(lambda: site.event(job, "pinned"))
    deadline = pending + 50
    while time.time() < deadline:
        assert site.reservations() and site.cluster.read_job(job)["ReqNodeList"] == "n1,n3", site.log()
        time.sleep(1)
    unpinned = until(lambda: site.event(job, "unpinned"), 100, 0.5)["t"]
    assert 110 < unpinned - pending < 150
    until(lambda: not site.reservations())
    facts = site.cluster.read_job(job)
    assert facts["JobState"] == "PENDING" and facts["ReqNodeList"] == "(null)", facts
    site.cluster.run(["scontrol", "update", "nodename=n4,n5", "state=resume"])
    site.running(job, restart=1, timeout_s=90)
