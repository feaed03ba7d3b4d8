"""The controller against real Slurm: a node loses power, and the job goes on on its survivors."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from waiting import until

from gemini_hpc.core.hostlist import expand

from .conftest import Site

pytestmark = pytest.mark.cluster


def story(site: Site, job: int, cut: float) -> list[str]:
    """Prints what happened when; the names of the controller's own events."""
    for e in site.events(job):
        print(f"{e['t'] - cut:7.3f} {e['name']:14} {e['host']:4} {e['detail']}")
    return [e["name"] for e in site.events(job) if e["name"] != "attached"]


def start(site: Site, *args: str, nodes: int = 3, **options: str) -> tuple[int, list[str]]:
    job = site.submit(f"-N{nodes}", "--requeue", "--exclusive", *args, **options)
    site.running(job)
    hosts = site.nodes(job)
    site.agents(job, 0, hosts)
    return job, hosts


def drained(site: Site) -> set[str]:
    return {n for n, s in site.cluster.read_node_states().items() if "dr" in s or "down" in s}


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(
            "fast", marks=pytest.mark.witness("a job that loses a node is requeued onto survivors and a spare")
        ),
        "stock",
    ],
)
def test_requeued_on_survivors_and_one_spare(make_site: Callable[..., Site], profile: str) -> None:
    site = make_site(profile=profile, settings={"fence_confirm_s": 0.5})
    job, _ = start(site)
    cut = time.time()
    site.cluster.cut_power("n2")
    facts = site.running(job, restart=1)
    print(f"again after {time.time() - cut:.2f} s")
    after = site.nodes(job)
    assert {"n1", "n3"} < set(after) and "n2" not in after and len(after) == 3
    assert facts["ReqNodeList"] in ("n1,n3", "n[1,3]")
    until(lambda: not site.reservations() and site.event(job, "released"))
    assert drained(site) == {"n2"}
    names = story(site, job, cut)
    order = ["detected", "confirmed", "reserved", "down", "pinned", "start_set", "running", "released"]
    assert [n for n in names if n in order] == order


def test_survivor_dies_while_pending(site: Site) -> None:
    # n4 and n5 are bob's: the job stays pending with its survivors pinned.
    theirs = [site.submit("-N1", "--exclusive", "-w", n, user="bob") for n in ("n4", "n5")]
    for other in theirs:
        site.running(other)
    job, _ = start(site)
    cut = time.time()
    site.cluster.cut_power("n2")
    until(lambda: site.event(job, "start_set"))
    site.cluster.cut_power("n3")
    until(lambda: site.event(job, "repinned"))
    site.cluster.run(["scancel", *map(str, theirs)])
    site.running(job, restart=1)
    assert set(site.nodes(job)) == {"n1", "n4", "n5"}
    until(lambda: not site.reservations())
    story(site, job, cut)
    assert drained(site) == {"n2", "n3"}


def test_script_that_failed_because_of_the_dead_node_is_sent_back(site: Site) -> None:
    again = 'if [ -n "$SLURM_RESTART_COUNT" ]; then exec srun sleep 600; fi'
    script = f"#!/bin/sh\n{again}\nsrun sleep 600 & sleep 8; exit 3\n"
    job, _ = start(site, script=script)
    until(lambda: site.cluster.read_job(job)["RunTime"] >= "00:00:06")
    cut = time.time()
    site.cluster.cut_power("n2")
    site.running(job, restart=1)
    assert {"n1", "n3"} < set(site.nodes(job))
    story(site, job, cut)


def test_node_that_reboots_at_once_is_not_fenced(site: Site) -> None:
    job, _ = start(site)
    cut = time.time()
    site.cluster.cut_power("n2")
    site.cluster.restore_power("n2")
    site.running(job, restart=1)
    until(lambda: not site.reservations() and site.event(job, "released"))
    names = story(site, job, cut)
    assert "down" not in names and "sent_back" in names
    assert drained(site) == set()
    assert {"n1", "n3"} <= set(site.nodes(job))


def test_slurm_sets_the_node_down_first(site: Site) -> None:
    job, _ = start(site)
    cut = time.time()
    site.cluster.cut_power("n2")
    site.cluster.run(["scontrol", "update", "nodename=n2", "state=down", "reason=admin"])
    site.running(job, restart=1)
    story(site, job, cut)
    until(lambda: not site.reservations())


def test_without_requeue_nothing_happens(site: Site) -> None:
    job = site.submit("-N3", "--no-requeue", "--exclusive")
    site.running(job)
    site.agents(job, 0, site.nodes(job))
    site.cluster.cut_power("n2")
    said = until(lambda: site.event(job, "dismissed"))
    assert "--requeue" in said["detail"]
    assert drained(site) == set()


def test_last_task_of_an_array_does_not_touch_its_sibling(site: Site) -> None:
    array = site.submit("-N2", "--requeue", "--exclusive", "--array=1-2")

    def task(number: int) -> dict[str, str]:
        line = site.cluster.run(["scontrol", "show", "job", "-o", f"{array}_{number}"]).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    until(lambda: task(1)["JobState"] == task(2)["JobState"] == "RUNNING")
    assert task(2)["JobId"] == str(array), "an update of this id would change every task"
    sibling = task(1)
    hosts = expand(task(2)["NodeList"])
    site.agents(array, 0, hosts)
    site.cluster.cut_power(hosts[1])
    until(lambda: (task(2)["Restarts"], task(2)["JobState"]) == ("1", "RUNNING"))
    assert task(2)["ReqNodeList"] == hosts[0] and hosts[0] in expand(task(2)["NodeList"])
    for key in ("JobState", "NodeList", "NumNodes", "ReqNodeList", "Restarts", "StartTime"):
        assert task(1)[key] == sibling[key]
    until(lambda: not site.reservations())
