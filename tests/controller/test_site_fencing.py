"""Requirements believe-slurm, prove-death, budget, administrators-resume, one-controller on a real cluster: who is
believed, and what is never done to a node."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import pytest
from waiting import until

from gemini_hpc.config import Settings

from .conftest import PYTHON, Site


def start(site: Site, *args: str) -> tuple[int, list[str]]:
    job = site.submit("--requeue", "--exclusive", *(args or ("-N3",)))
    site.running(job)
    hosts = site.nodes(job)
    site.agents(job, 0, hosts)
    return job, hosts


def fenced(site: Site) -> list[str]:
    out = site.cluster.run(["scontrol", "show", "node", "-o"]).stdout
    return [line.split()[0].split("=")[1] for line in out.splitlines() if "gemini-hpc" in line]


def over_budget(site: Site, job: int) -> bool:
    return any("budget" in e["detail"] for e in site.events(job))


def stays(site: Site, true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert true(), site.log()
        time.sleep(0.2)


@pytest.mark.witness("a node whose slurmd hangs is not set DOWN")
@pytest.mark.cluster
def test_slurmd_that_hangs_is_not_a_dead_node(site: Site) -> None:
    """Only the daemon is stopped; the agent lives and answers, whatever its peers report."""
    job = site.submit("-N3", "--requeue", "--exclusive")
    site.running(job)
    hosts = site.nodes(job)
    site.cluster.exec(hosts[1], ["pkill", "-STOP", "-x", "slurmd"])
    site.agents(job, 0, hosts, f"accuse:{hosts[1]}")
    said = until(lambda: site.event(job, "not_fenced"))
    assert (said["host"], "left to Slurm" in said["detail"]) == (hosts[1], True)
    stays(site, lambda: not fenced(site) and site.event(job, "confirmed") is None, 2)
    site.cluster.exec(hosts[1], ["pkill", "-CONT", "-x", "slurmd"])


@pytest.mark.cluster
def test_frozen_node_whose_kernel_still_accepts_connections_is_left_to_slurm(site: Site) -> None:
    """Nothing runs on it any more, but its kernel lives: anybody can make a port look like that. When Slurm itself
    finds it dead, the requeue is steered as ever."""
    job, hosts = start(site)
    site.cluster.exec(hosts[1], ["bash", "-c", "kill -STOP -1"])
    try:
        said = until(lambda: site.event(job, "not_fenced"))
        assert "kernel" in said["detail"] and said["host"] == hosts[1]
        stays(site, lambda: "dr" not in site.cluster.read_node_states()[hosts[1]] and not fenced(site), 3)
        site.cluster.run(["scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=slurmd is gone"])
        site.running(job, restart=1)
        assert {hosts[0], hosts[2]} < set(site.nodes(job)) and not fenced(site)
        assert site.event(job, "pinned")
    finally:
        site.end_agents()  # whoever waits outside for a stopped process is stopped as well
        site.cluster.cut_power(hosts[1])


@pytest.mark.cluster
def test_controller_that_reaches_few_nodes_fences_nobody(make_site: Callable[..., Site]) -> None:
    """One node is dead indeed; but as long as the controller misses others as well, the fault may be its own."""
    site = make_site(settings={"fence_budget_nodes": 100})
    job, hosts = start(site, "-N5")
    addresses = [site.cluster.find_address(host) for host in hosts[2:4]]
    for address in addresses:
        assert site.cluster.run(["ip", "route", "add", "unreachable", address]).returncode == 0
    time.sleep(1.5)  # what they have said lately vouches for them for a second
    site.cluster.cut_power(hosts[4])
    until(lambda: site.event(job, "detected"))
    stays(site, lambda: site.event(job, "confirmed") is None and not fenced(site), 3)
    for address in addresses:
        site.cluster.run(["ip", "route", "del", "unreachable", address])
    until(lambda: fenced(site) == [hosts[4]])


def test_default_budget() -> None:
    defaults = {f.name: f.default for f in fields(Settings)}
    assert (defaults["fence_budget_nodes"], defaults["fence_budget_window_s"]) == (2, 600.0)
    assert (defaults["fence_confirm_s"], defaults["slurm_settle_s"]) == (5.0, 60.0)


@pytest.mark.cluster
def test_mass_outage_over_several_jobs_fences_nobody(make_site: Callable[..., Site]) -> None:
    """Each job alone would be within the budget."""
    site = make_site(nodes=6, settings={"fence_budget_nodes": 2, "fence_confirm_s": 1.5})
    jobs = [start(site, "-N2") for _ in range(3)]
    for _, hosts in jobs:
        site.cluster.cut_power(hosts[1])
    for job, _ in jobs:
        until(partial(over_budget, site, job))
    stays(site, lambda: not fenced(site), 4)


@pytest.mark.cluster
def test_fenced_node_stays_down_when_it_comes_back(site: Site) -> None:
    job, hosts = start(site)
    site.cluster.cut_power(hosts[1])
    site.running(job, restart=1)
    site.cluster.restore_power(hosts[1])
    stays(site, lambda: "drain" in site.cluster.read_node_states()[hosts[1]], 4)
    reason = site.cluster.run(["scontrol", "show", "node", "-o", hosts[1]]).stdout
    assert f"Reason=gemini-hpc: no answer from slurmd and agent, job {job} restart 0" in reason


@pytest.mark.cluster
def test_node_that_has_booted_anew_is_given_back(make_site: Callable[..., Site]) -> None:
    site = make_site(settings={"auto_resume_s": 2.0})
    job, hosts = start(site)
    site.cluster.cut_power(hosts[1])
    site.running(job, restart=1)
    site.cluster.restore_power(hosts[1])
    assert "dr" in site.cluster.read_node_states()[hosts[1]], "it has to answer for a while"
    until(lambda: site.cluster.read_node_states()[hosts[1]] == "idle")
    given_back = f"event=given-back host={hosts[1]}"
    assert given_back in site.log()
    # From 24.11 on Slurm keeps the reason of a node that it has taken back.
    stays(site, lambda: site.log().count(given_back) == 1 and "give-back:" not in site.log(), 4)


@pytest.mark.cluster
def test_nobody_is_fenced_before_slurmctld_has_settled(make_site: Callable[..., Site]) -> None:
    site = make_site(settings={"slurm_settle_s": 15.0})
    booted = time.time()
    job, hosts = start(site)
    site.cluster.cut_power(hosts[1])
    said = until(lambda: site.event(job, "confirmed"))
    assert said["t"] - booted > 10, "the cluster was up some seconds before"
    site.running(job, restart=1)


@pytest.mark.cluster
def test_backup_slurmctld_takes_over_in_mid_recovery(make_site: Callable[..., Site]) -> None:
    """The controller host dies between DOWN and the start; the other controller finishes from the journal."""
    lines = ["SlurmctldHost=n6(10.77.0.16)", "SlurmctldTimeout=5", "PartitionName=two Nodes=n[1-5] Default=YES"]
    settings = {"controller_host": "ctl,n6"}
    site = make_site(nodes=6, slurm_conf=lines, settings=settings)
    cluster = site.cluster
    assert cluster.find_address("n6") == "10.77.0.16"
    backup = cluster.start_command(["slurmctld", "-D", "-f", f"{cluster.directory}/etc/slurm/slurm.conf"], node="n6")
    standby = cluster.start_command(
        [PYTHON, "-I", "-m", "gemini_hpc.controller"], user="slurm", node="n6", stderr=None
    )
    site.servers += [backup, standby]
    job, hosts = start(site, "-N3", "-p", "two")
    time.sleep(7)  # slurmctld saves its state every 5 s; what it has not saved it forgets, we or no we
    cluster.cut_power(hosts[1])
    until(lambda: site.event(job, "pinned"))
    cluster.stop_controller(signal.SIGKILL)
    # The oldest: this host's own; the pids of nodes are visible here as well.
    cluster.run(["pkill", "-KILL", "-o", "-x", "slurmctld"])
    until(lambda: site.event(job, "taken_over"), 60, 0.2)
    site.running(job, restart=1, timeout_s=60)
    until(lambda: not site.reservations())
    assert fenced(site) == [hosts[1]]


@pytest.mark.cluster
def test_controller_beside_a_backup_stands_by(make_site: Callable[..., Site]) -> None:
    site = make_site(slurm_conf=["SlurmctldHost=n5(10.77.0.15)"])
    log = site.cluster.directory / "standby.log"
    with log.open("w") as out:
        argv = [PYTHON, "-I", "-m", "gemini_hpc.controller"]
        site.processes.append(site.cluster.start_command(argv, user="slurm", node="n5", stdout=out, stderr=out))
    until(lambda: "event=standby reason=the slurmctld in charge is on ctl" in log.read_text())
    stays(site, lambda: "event=ready" not in log.read_text(), 3)


@pytest.mark.cluster
def test_reservation_that_serves_nobody_is_swept(site: Site) -> None:
    """As a controller leaves it that dies right after the creation, whose job is then cancelled."""
    for name in ("gemini_4711_0123456789ab", "somebody_elses"):
        create = ["scontrol", "create", "reservation", f"ReservationName={name}", "Nodes=n1", "Users=alice"]
        done = site.cluster.run([*create, "StartTime=now", "Duration=10", "Flags=IGNORE_JOBS,FLEX,OVERLAP"])
        assert done.returncode == 0, done.stderr
    site.cluster.stop_controller(signal.SIGKILL)
    site.cluster.start_controller()
    until(lambda: site.reservations() == ["somebody_elses"])
    site.cluster.run(["scontrol", "delete", "ReservationName=somebody_elses"])
