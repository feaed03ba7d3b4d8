"""Two owners' protected jobs on a full cluster: neither gets a node of the other's, and both come back."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from waiting import until

from .conftest import Site

pytestmark = pytest.mark.cluster


def protected(site: Site, user: str, nodes: int = 3) -> tuple[int, list[str]]:
    job = site.submit(f"-N{nodes}", "--requeue", "--exclusive", user=user)
    site.running(job)
    hosts = site.nodes(job)
    site.agents(job, 0, hosts, user=user)
    return job, hosts


def reserved(site: Site, job: int) -> set[str]:
    """What is held for a job now."""
    for line in site.cluster.run(["scontrol", "show", "reservation", "-o"]).stdout.splitlines():
        if line.startswith(f"ReservationName=gemini_{job}_"):
            names = next(w.removeprefix("Nodes=") for w in line.split() if w.startswith("Nodes="))
            return set(site.cluster.run(["scontrol", "show", "hostnames", names]).stdout.split())
    return set()


def test_two_jobs_of_two_users_lose_a_node_within_a_second_on_a_full_cluster(make_site: Callable[..., Site]) -> None:
    """All other nodes are busy, and others wait for them: the first recovery holds them all, the second what is left
    when the first has what it needs."""
    site = make_site(nodes=8)
    ours, mine = protected(site, "alice")
    other, theirs = protected(site, "bob")
    fillers = [site.submit("-N1", "--exclusive", user="bob", script="#!/bin/sh\nsrun sleep 14\n") for _ in range(2)]
    for filler in fillers:
        site.running(filler)
    for _ in range(8):
        site.submit("-N1", "--exclusive", user="bob", script="#!/bin/sh\nsrun sleep 3\n")
    cut = time.time()
    site.cluster.cut_power(mine[1])
    site.cluster.cut_power(theirs[1])
    held: dict[int, set[str]] = {}

    def both() -> bool:
        for job, foreign in ((ours, {theirs[0], theirs[2]}), (other, {mine[0], mine[2]})):
            held[job] = held.get(job, set()) | reserved(site, job)
            assert not held[job] & foreign, f"{held} has survivors of the other's"
        facts = [site.cluster.read_job(job) for job in (ours, other)]
        return all((f["JobState"], f["Restarts"]) == ("RUNNING", "1") for f in facts)

    until(both, 90, 0.1)
    print(f"both run again after {time.time() - cut:.1f} s; held were {held}")
    assert {mine[0], mine[2]} < set(site.nodes(ours)), site.log()
    assert {theirs[0], theirs[2]} < set(site.nodes(other)), site.log()
    until(lambda: not site.reservations())


def test_nodes_of_another_owners_protected_job_are_never_candidates(make_site: Callable[..., Site]) -> None:
    """There are no others: so nothing but the survivors is held, until the other job has ended."""
    site = make_site(nodes=6)
    ours, mine = protected(site, "alice")
    other, theirs = protected(site, "bob")
    site.cluster.cut_power(mine[1])
    until(lambda: site.event(ours, "start_set"))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        assert reserved(site, ours) == {mine[0], mine[2]}, site.log()
        time.sleep(0.2)
    site.cluster.run(["scancel", str(other)], user="bob")
    site.running(ours, restart=1, timeout_s=60)
    now = set(site.nodes(ours))
    assert {mine[0], mine[2]} < now and now - set(mine) <= set(theirs)
    until(lambda: not site.reservations())
