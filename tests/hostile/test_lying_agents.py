"""Requirement believe-slurm: agents run as their users, so what they say is a hint: about nodes, hosts, restarts,
jobs; and there may be any amount of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from gemini_hpc.config import Settings
from gemini_hpc.wire.ports import list_candidates

from .conftest import PYTHON, Site, Steady

pytestmark = pytest.mark.cluster


def as_agent(site: Site) -> dict[str, Any]:
    """alice's second agent at the controller, as it should be."""
    return site.controller_call() | {"purpose": "control", "source": site.nodes[1]}


def controller_rss(site: Site) -> int:
    pid = site.cluster.find_controller_pid()
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def untouched(site: Site) -> bool:
    """No node and no reservation has been touched."""
    states = " ".join(site.cluster.read_node_states().values()).lower()
    shown = site.cluster.run(["scontrol", "show", "reservation", "-o"]).stdout
    return not any(word in states for word in ("drain", "down")) and "ReservationName" not in shown


@pytest.mark.witness("an agent that is not of the job is not registered")
def test_forged_agents_are_not_registered(site: Site) -> None:
    other = next(n for n in site.cluster.node_names if n not in site.nodes)
    forged = {
        "a node that is not the job's": {"source": other},
        "no node at all": {"source": "n1\n2026-11-21T00:00:00.000 job=1 event=down host=n1"},
        "a path": {"source": "../../../etc/passwd"},
        "another host than the greeting's": {"said": {"host": other}},
        "another job than the greeting's": {"said": {"job": site.job.id + 1}},
    }
    answers = site.attack("agents", "alice", **as_agent(site), agents=forged)
    assert set(answers.values()) == {"closed"}, answers
    for user in ("bob", "games", None):
        answers = site.attack("agents", user, **as_agent(site), agents={"another's job": {}})
        assert set(answers.values()) == {"closed"}, (user, answers)
    log = site.controller_log()
    assert "event=refused" in log and r"host=n1\n2026-11-21T00" in log
    assert not [line for line in log.splitlines() if line.endswith("event=down host=n1")]


def test_agents_of_a_job_without_nodes_must_call_from_theirs(site: Site) -> None:
    """Slurm has never said where a pending job runs: no name may be made up."""
    job = site.cluster.submit_job(["-N4", "--hold"], script="#!/bin/sh\n")
    node = site.nodes[0]
    call = as_agent(site) | {"job": job}
    try:
        made_up = {name: {"source": name} for name in (*site.cluster.node_names, "n99", "ctl")}
        # the controller asks slurmctld before it closes, and slurmctld may be busy
        answers = site.attack("agents", "alice", **call, agents=made_up, wait_s=15.0)
        assert set(answers.values()) == {"closed"}, answers
        there = {name: {"source": name} for name in site.cluster.node_names}
        answers = site.attack("agents", "alice", node, **call, agents=there, wait_s=15.0)
        assert answers.pop(node) == "Waits", "told how long copies of a job that waits are kept"
        assert set(answers.values()) == {"closed"}, answers
    finally:
        site.cluster.run(["scancel", str(job)])


def test_reports_about_what_is_not_the_jobs(site: Site) -> None:
    """A dead node of nobody's, living ones of the job, itself, names that are none: nothing follows."""
    free = [n for n in site.cluster.node_names if n not in site.nodes]
    site.cluster.cut_power(free[0])
    try:
        accused = [*free, site.nodes[1], "n99", "", "ctl", "x" * 5000, "n1\n event=down"]
        for restart in (0, 1, 7, 4_000_000_000):
            call = as_agent(site) | {"restart": restart}
            witnesses = [*site.nodes, *free, "n77"]
            site.attack("agents", "alice", **call, agents={"x": {}}, reports=accused, witnesses=witnesses, wait_s=0.5)
        time.sleep(2.0)
        events = [e for e in site.job.events() if e["name"] in ("confirmed", "down", "reserved", "sent_back")]
        assert not events and site.job.slurm()["Restarts"] == "0"
        assert free[0] not in [e["host"] for e in site.job.events()]
        assert "drain" not in site.cluster.read_node_state(free[0]).lower()
        assert "not plausible" in site.controller_log()
    finally:
        site.cluster.restore_power(free[0])
        if "down" in site.cluster.read_node_state(free[0]).lower():
            site.cluster.resume(free[0])
        site.cluster.wait_idle([free[0]])
    assert untouched(site)


@pytest.mark.alone
def test_flood_of_one_user_delays_no_other(site: Site) -> None:
    """bob's agents and questions without end; alice's inspect, a new job of hers, her events and her log."""
    job = site.cluster.submit_job(["-N1", "-n1"], user="bob", script="#!/bin/sh\nsleep 300\n")
    until(lambda: site.cluster.read_job(job)["JobState"] == "RUNNING", 30, 0.1, what="bob's job runs")
    (node,) = site.cluster.run(["squeue", "-h", "-j", str(job), "-o", "%N"]).stdout.split()
    call = site.controller_call() | {"job": job, "source": node, "accuse": node, "seconds": 9.0}
    log_bytes, rss = len(site.controller_log()), controller_rss(site)
    floods = [
        {"purpose": "control", "lines": 4},
        {"purpose": "control", "lines": 60, "jobs": 500},
        {"purpose": "query", "lines": 16, "jobs": 500},
    ]
    argvs = [[PYTHON, "-I", str(site.script), "flood", json.dumps(call | flood)] for flood in floods]
    processes = [site.cluster.start_command(argv, user="bob") for argv in argvs]
    try:
        time.sleep(2.0)
        for _ in range(3):
            began = time.monotonic()
            assert site.gemini("inspect", str(site.job.id)).returncode == 0
            assert time.monotonic() - began < 5.0
        for process in processes:
            out, err = process.communicate(timeout=30)
            assert process.returncode == 0, err
            assert json.loads(out)["messages"] > 100
        assert len(site.controller_log()) - log_bytes < 3 << 20
        kept = site.cluster.directory / "controller" / "jobs" / f"{job}.jsonl"
        assert kept.stat().st_size < 2 << 20
        assert controller_rss(site) - rss < 200 << 20
        assert untouched(site)
    finally:
        for process in processes:
            process.kill()
        site.cluster.run(["scancel", str(job)])
    assert "Traceback" not in site.controller_log()


def test_frames_that_would_fill_the_controllers_memory(site: Site) -> None:
    for purpose in ("control", "query"):
        lines = 60 if purpose == "control" else 12
        rss = controller_rss(site)
        call = site.controller_call() | {"purpose": purpose, "source": site.nodes[1]}
        assert site.attack("bombs", "alice", **call, lines=lines)["outcomes"] == ["closed"]
        assert controller_rss(site) - rss < 64 << 20


def test_silent_connections_do_not_keep_others_out(site: Site) -> None:
    """From a node of its own, and from the very host of the one who asks; at an agent and at the controller."""
    idle = (
        "import socket, sys, time; s = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) "
        "for _ in range(600)]; print('open', flush=True); time.sleep(60)"
    )
    for call in (site.call() | {"purpose": "query"}, site.controller_call()):
        where = [str(call["host"]), str(call["port"])]
        holders = []
        try:
            for node in (next(n for n in site.cluster.node_names if n not in site.nodes), None):
                argv = ["prlimit", "--nofile=4096", PYTHON, "-I", "-c", idle, *where]
                holders.append(site.cluster.start_command(argv, user="bob", node=node))
                assert holders[-1].stdout is not None and holders[-1].stdout.readline() == "open\n"
            began = time.monotonic()
            answers = site.attack("call", "alice", **call, calls={str(n): {} for n in range(10)})
            assert set(answers.values()) == {"ok"}, answers
            assert time.monotonic() - began < 4.0
        finally:
            for holder in holders:
                holder.kill()


def test_another_user_behind_the_first_ports_of_a_job(site: Site) -> None:
    """Ports follow from the job's id; bob has the first three on every node before her agents come."""
    out = site.cluster.locate_home("alice") / "squatted"
    script = '#!/bin/sh\nsrun sh -c "echo socket=$GEMINI_SOCKET"\n'
    options = ["-N2", "--ntasks-per-node=1", "--gemini-replicas=2", "--hold", f"--output={out}"]
    job = site.cluster.submit_job(options, script=script)
    ports = list_candidates(Settings(), job)[:3]
    argv = [PYTHON, "-I", str(site.script), "squat", json.dumps({"ports": ports, "seconds": 40})]
    squatters = [site.cluster.start_command(argv, user="bob", node=node) for node in site.cluster.node_names]
    try:
        for squatter in squatters:
            assert squatter.stdout is not None and squatter.stdout.readline() == "listening\n"
        site.cluster.run(["scontrol", "release", str(job)])
        until(lambda: site.cluster.read_job(job)["JobState"] in ("COMPLETED", "FAILED"), 40, 0.1, what="the job ends")
        assert out.read_text().count(f"socket=/run/gemini-hpc/{job}/agent.sock") == 2, out.read_text()
    finally:
        for squatter in squatters:
            squatter.kill()


def test_another_user_between_the_agents_of_a_job(site: Site) -> None:
    """bob has the first ports of the job on every node, and passes what comes there on to the agent behind them."""
    out = site.cluster.locate_home("alice") / "relayed"
    script = '#!/bin/sh\nsrun sh -c "echo socket=$GEMINI_SOCKET"\nsleep 4\n'
    options = ["-N2", "--ntasks-per-node=1", "--gemini-replicas=2", "--hold", f"--output={out}"]
    job = site.cluster.submit_job(options, script=script)
    ports = list_candidates(Settings(), job)
    how = {"ports": ports[:3], "to": ports[3], "seconds": 60, "handshake_bytes": 2500}
    argv = [PYTHON, "-I", str(site.script), "relay", json.dumps(how)]
    relays = [site.cluster.start_command(argv, user="bob", node=node) for node in site.cluster.node_names]
    try:
        for relay in relays:
            assert relay.stdout is not None and relay.stdout.readline() == "listening\n"
        site.cluster.run(["scontrol", "release", str(job)])
        until(lambda: site.cluster.read_job(job)["JobState"] in ("COMPLETED", "FAILED"), 60, 0.1, what="the job ends")
        assert out.read_text().count(f"socket=/run/gemini-hpc/{job}/agent.sock") == 2, out.read_text()
    finally:
        for relay in relays:
            relay.kill()
    said = " ".join(relay.communicate(timeout=10)[0] for relay in relays).split()
    assert "called" in said, "or this test shows nothing"
    assert "session" not in said, "agents spoke to each other through bob"


def test_memory_of_an_agent_is_its_owners(site: Site) -> None:
    """Descriptors go to processes of the owner's that have come through the socket, and by no other way."""
    node = site.nodes[0]
    with Steady(site):
        for user in ("bob", "nobody", "games"):
            assert site.attack("peek", user, node, pid=site.pids[node]) == {"got": []}
