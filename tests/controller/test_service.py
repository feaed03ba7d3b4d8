"""The service: whom it believes, whom it answers, when it lets memory go, and what survives its own death."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

import pytest
from waiting import until

from .conftest import PYTHON, Site

pytestmark = pytest.mark.cluster

# Several times what a death takes to be confirmed here: whatever follows would have followed.
FOLLOWS_S = 1.5


def start(site: Site, mode: str = "") -> tuple[int, list[str]]:
    job = site.submit("-N3", "--requeue", "--exclusive")
    site.running(job)
    hosts = site.nodes(job)
    site.agents(job, 0, hosts, mode)
    return job, hosts


def _cancelled(site: Site, job: int, host: str) -> bool:
    return "released job CANCELLED" in site.words(job, 0, host)


def untouched(site: Site) -> bool:
    return set(site.cluster.read_node_states().values()) <= {"idle", "allocated"} and not site.reservations()


@pytest.mark.witness("a healthy node is not touched, whatever agents report")
def test_false_report_about_a_live_node_changes_nothing(site: Site) -> None:
    job, _ = start(site, "accuse:n2")
    said = until(lambda: site.event(job, "dismissed"))
    assert "false suspicion" in said["detail"]
    deadline = time.monotonic() + FOLLOWS_S
    while time.monotonic() < deadline:
        assert untouched(site)
        time.sleep(0.2)
    assert site.cluster.read_job(job)["Restarts"] == "0"


def test_reports_about_nodes_of_others_are_dropped(site: Site) -> None:
    job, _ = start(site, "accuse:n4")
    site.cluster.cut_power("n4")
    until(lambda: "not plausible" in site.log())
    time.sleep(FOLLOWS_S)
    assert site.event(job, "detected") is None
    assert "drain" not in site.cluster.read_node_states()["n4"]


def test_agent_that_is_gone_on_a_live_node_is_no_reason_to_requeue(site: Site) -> None:
    job, _ = start(site)
    site.processes[1].kill()
    until(lambda: site.event(job, "detected"))
    time.sleep(FOLLOWS_S)
    assert untouched(site)
    assert site.cluster.read_job(job)["JobState"] == "RUNNING" and site.cluster.read_job(job)["Restarts"] == "0"


def test_other_uid_cannot_register_for_a_job(site: Site) -> None:
    job = site.submit("-N2", "--requeue")
    site.running(job)
    hosts = site.nodes(job)
    site.agent(job, 0, hosts[0], hosts, "accuse:n2", user="bob")
    until(lambda: "event=refused" in site.log())
    assert "event=registered" not in site.log()


def test_cancelled_while_pending_releases_the_agents(site: Site) -> None:
    job, _ = start(site)
    site.cluster.run(["scontrol", "update", "nodename=n4,n5", "state=drain", "reason=test"])
    site.cluster.cut_power("n2")
    until(lambda: site.event(job, "start_set"))
    cancelled = time.time()
    site.cluster.run(["scancel", str(job)], user="alice")
    for host in ("n1", "n3"):
        until(partial(_cancelled, site, job, host))
    print(f"released after {time.time() - cancelled:.2f} s")
    until(lambda: not site.reservations())


def test_completed_releases_at_once_and_failed_after_retention(make_site: Callable[..., Site]) -> None:
    site = make_site(settings={"retention_s": 3.0})
    go = site.cluster.locate_home("alice") / "go"
    script = f"#!/bin/sh\nuntil [ -e {go} ]; do sleep 0.1; done\n"
    good, bad = site.submit("-N1", script=script), site.submit("-N1", script=script + "exit 2\n")
    where = {}
    for job in (good, bad):
        site.running(job)
        (where[job],) = site.nodes(job)
        site.agents(job, 0, [where[job]], "silent")
    go.touch()
    until(lambda: "released job COMPLETED" in site.words(good, 0, where[good]))
    until(lambda: "released job FAILED, retention of 3 s is over" in site.words(bad, 0, where[bad]))
    ended = datetime.fromisoformat(site.cluster.read_job(bad)["EndTime"])
    (line,) = (line for line in site.log().splitlines() if f"job={bad} event=release " in line)
    assert (datetime.fromisoformat(line.split()[0]) - ended).total_seconds() >= 3.0, line


def test_agent_of_a_job_that_slurm_does_not_know_is_told_to_go(site: Site) -> None:
    site.agent(4711, 0, "n1", ["n1"], "silent")
    until(lambda: "released job unknown to Slurm" in site.words(4711, 0, "n1"))


@pytest.mark.witness("`inspect` answers a job's owner, with a controller and without; a stranger learns nothing")
def test_inspect(site: Site) -> None:
    job, hosts = start(site)
    timed = time.monotonic()
    done = site.inspect(job)
    took = time.monotonic() - timed
    print(done.stdout, f"{took:.2f} s")
    assert done.returncode == 0, done.stderr
    assert "may be lost: any 1 node" in done.stdout
    document = json.loads(site.inspect(job, "--json", user="slurm").stdout)
    assert document["schema"] == 1 and document["state"] == "protected" and document["asked"] == "controller"
    assert document["trainings"][0]["survival"]["survives"][1] == {"k": 2, "probability": 0.0}
    assert {e["host"] for e in document["events"]} == set(hosts)
    refused = site.inspect(job, user="bob")
    unknown = site.inspect(99999, user="bob")
    assert refused.returncode == unknown.returncode == 1
    assert refused.stderr.replace(str(job), "N") == unknown.stderr.replace("99999", "N")
    assert refused.stdout == "" and refused.stderr.count("\n") == 1
    assert site.inspect("abc").returncode == 2  # type: ignore[arg-type]
    assert site.inspect(job, user="root").returncode == 0

    site.cluster.stop_controller()
    without = site.inspect(job, "--json")
    assert without.returncode == 0, without.stderr
    assert json.loads(without.stdout)["asked"] == "agents"
    assert json.loads(without.stdout)["state"] == "protected"
    assert "not yours" in site.inspect(job, user="bob").stderr
    for process in site.processes:
        process.kill()
    nobody = site.inspect(job)
    assert nobody.returncode == 1 and "no agent answers" in nobody.stderr and nobody.stderr.count("\n") == 1


def test_partly_protected_when_an_agent_is_missing(site: Site) -> None:
    job, _ = start(site, "silent")
    site.processes[0].kill()
    document = json.loads(site.inspect(job, "--json").stdout)
    assert document["state"] == "partly protected" and len(document["missing"]) == 1


@pytest.mark.witness("a controller that was killed finishes its recoveries when it is back")
def test_restarted_controller_finishes_what_it_began(site: Site) -> None:
    theirs = [site.submit("-N1", "--exclusive", "-w", n, user="bob") for n in ("n4", "n5")]
    for other in theirs:
        site.running(other)
    job, _ = start(site)
    site.cluster.cut_power("n2")
    until(lambda: site.event(job, "pinned"))
    site.cluster.stop_controller(signal.SIGKILL)
    assert site.reservations()
    site.cluster.start_controller()
    until(lambda: site.event(job, "taken_over"))
    site.cluster.run(["scancel", *map(str, theirs)])
    site.running(job, restart=1)
    assert {"n1", "n3"} < set(site.nodes(job))
    until(lambda: not site.reservations())


def test_controller_that_came_back_after_the_start_cleans_up(site: Site) -> None:
    job, _ = start(site)
    site.cluster.cut_power("n2")
    until(lambda: site.event(job, "start_set"))
    site.cluster.stop_controller(signal.SIGKILL)
    site.running(job, restart=1)
    assert site.reservations()
    site.cluster.start_controller()
    until(lambda: not site.reservations())
    assert site.cluster.read_job(job)["JobState"] == "RUNNING"


@pytest.mark.witness("of two controllers on a host one acts")
def test_only_one_controller_acts(site: Site) -> None:
    done = site.cluster.run(["/opt/gemini-hpc/venv/bin/python", "-I", "-m", "gemini_hpc.controller"], user="slurm")
    assert done.returncode == 1 and "another controller" in done.stderr


def test_another_owners_job_on_the_node_vetoes(site: Site) -> None:
    job = site.submit("-N3", "--requeue", "-n3", "--oversubscribe")
    site.running(job)
    hosts = site.nodes(job)
    other = site.submit("-N1", "-w", hosts[1], user="bob")
    site.running(other)
    site.agents(job, 0, hosts)
    site.cluster.cut_power(hosts[1])
    said = until(lambda: site.event(job, "not_fenced"))
    assert "other owners" in said["detail"]
    assert "dr" not in site.cluster.read_node_states()[hosts[1]]


def test_a_job_that_has_ended_is_told_from_the_log(make_site: Callable[..., Site]) -> None:
    """Its owner, the next morning: Slurm has forgotten the job, its agents are gone."""
    site = make_site(slurm_conf=["MinJobAge=2"], settings={"retention_s": 3.0})
    job = site.submit("-N2", "--requeue", script="#!/bin/sh\nsrun sleep 8\nexit 3\n")
    site.running(job)
    site.agents(job, 0, site.nodes(job))
    listed = json.loads(site.jobs("--json").stdout)["jobs"]
    assert [(j["job"], j["user"], j["slurm"], j["nodes"], j["ended"]) for j in listed] == [
        (job, "alice", "RUNNING", 2, None)
    ]
    until(lambda: site.event(job, "ended"), 60)
    until(lambda: "Invalid job id" in site.cluster.run(["scontrol", "show", "job", str(job)]).stderr, 90)
    site.end_agents()

    done = site.inspect(job, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["state"], document["ended"]["state"]) == ("ended", "FAILED")
    assert abs(document["ended"]["t"] - time.time()) < 300 and document["notes"] == []
    text = site.inspect(job).stdout
    assert "ended as FAILED" in text and "protected" not in text and max(map(len, text.splitlines())) <= 80
    assert site.inspect(job, user="root").returncode == 0
    refused, unknown = site.inspect(job, user="bob"), site.inspect(99999, user="bob")
    assert refused.returncode == 1 and refused.stderr.replace(str(job), "N") == unknown.stderr.replace("99999", "N")

    for user, seen in (("alice", [job]), ("root", [job]), ("slurm", [job]), ("bob", [])):
        found = json.loads(site.jobs("--json", user=user).stdout)["jobs"]
        assert [j["job"] for j in found] == seen, user
        assert [j["state"] for j in found] == ["ended"] * len(seen)
    table = site.jobs()
    assert table.returncode == 0 and "FAILED" in table.stdout and max(map(len, table.stdout.splitlines())) <= 80

    site.cluster.stop_controller()
    nobody = site.jobs()
    assert nobody.returncode == 1 and nobody.stderr.count("\n") == 1 and "no controller" in nobody.stderr
    site.cluster.start_controller()
    until(lambda: site.inspect(job).returncode == 0)
    assert json.loads(site.inspect(job, "--json").stdout)["state"] == "ended"


def test_settings_that_are_not_there_are_an_error(site: Site) -> None:
    for verb in (["inspect", "1"], ["jobs"], ["flush", "1"], ["report", "1"], ["doctor"], ["controller"]):
        argv = [PYTHON, "-I", "-m", "gemini_hpc.cli.main", *verb, "--config", "/nowhere/gemini.toml"]
        done = site.cluster.run(argv, user="alice")
        assert done.returncode in (1, 2) and done.stdout == "", verb
        assert done.stderr.count("\n") == 1 and "/nowhere/gemini.toml: no such file" in done.stderr, done.stderr
