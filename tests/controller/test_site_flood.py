"""An ordinary user who makes a healthy node look dead, on a real cluster: nothing may be done to the node."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from .conftest import PYTHON, Site
from .test_site_fencing import fenced, start, stays

pytestmark = pytest.mark.cluster


def port_of(site: Site, key: str = "SlurmdPort") -> int:
    lines = site.cluster.run(["scontrol", "show", "config"]).stdout.splitlines()
    return int(next(line.split("=")[1] for line in lines if line.startswith(f"{key} ")))


def flood(site: Site, source: str, target: str, port: int, number: int, seconds: float = 60.0) -> None:
    home = site.cluster.locate_home("alice")
    shutil.copy(Path(__file__).parent / "flooder.py", home / "flooder.py")
    (home / "flooder.py").chmod(0o755)
    log = site.cluster.directory / f"flood-{source}-{target}-{port}.log"
    argv = [
        PYTHON,
        "-I",
        str(home / "flooder.py"),
        site.cluster.find_address(target),
        str(port),
        str(number),
        str(seconds),
    ]
    with log.open("w") as out:
        site.processes.append(site.cluster.start_command(argv, user="alice", node=source, stdout=out, stderr=out))
    until(lambda: "connections" in log.read_text())


@pytest.mark.parametrize("number", [900, 6000], ids=["slurmd busy", "its queue full"])
def test_healthy_node_that_its_user_floods_is_neither_down_nor_drained(
    make_site: Callable[..., Site], number: int
) -> None:
    """The agent stopped, silent connections to slurmd. With 900 slurmd takes nothing up; with 6,000 the queue of its
    port is full, and the kernel drops what comes: as silent as a dead node, but at ports where nobody listens."""
    # Slurm itself would find the node after 10 s with the timers of the other profile.
    site = make_site(profile="stock", settings={"fence_confirm_s": 2.0})
    job, hosts = start(site)
    victim, source, port = hosts[1], hosts[0], port_of(site)
    stopped = site.processes[1]
    stopped.send_signal(signal.SIGSTOP)
    inside = site.cluster.exec(victim, ["pkill", "-STOP", "-u", "alice", "-f", "fake_agent"])
    assert inside.returncode == 0
    for part in range(3 if number > 1000 else 1):
        flood(site, (source, hosts[2], "n4")[part], victim, port, min(number, 2000))
    # 24.11's slurmd takes up every connection, and answers beside them: then only the agent is taken for gone.
    ends = ("not_fenced", "dismissed")  # of the victim: its peers may be suspected for a moment, too
    said = until(lambda: [e for e in site.events(job) if e["name"] in ends and e["host"] == victim], 90)[0]
    assert "left to Slurm" in said["detail"] or "slurmd answers" in said["detail"], said
    stays(site, lambda: "dr" not in site.cluster.read_node_states()[victim] and not fenced(site), 6)
    assert site.cluster.read_job(job)["Restarts"] == "0" and site.event(job, "confirmed") is None
    assert not site.reservations(), "an attacker's own word holds no node"
    site.cluster.exec(victim, ["pkill", "-CONT", "-u", "alice", "-f", "fake_agent"])
    stopped.send_signal(signal.SIGCONT)


PROGRAM = """#!/bin/sh
{ echo "$# $1 $2 $3"; echo "$4"; id -un; env | cut -d= -f1 | sort | tr '\\n' ' '; echo; } >>"$(dirname "$0")/said"
sleep 1000
"""


@pytest.fixture
def program() -> Iterator[Path]:
    """What the site has put into `alert_program`; there as long as the cluster. Ask for it before it."""
    place = Path(f"/var/lib/gemini-alert-test-{os.getpid()}")
    place.mkdir()
    path = place / "alert"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    (place / "said").touch()
    (place / "said").chmod(0o666)
    yield path
    shutil.rmtree(place)


def test_one_users_spent_budget_is_told_and_is_nobody_elses(program: Path, make_site: Callable[..., Site]) -> None:
    """Over it nothing is fenced for this user any more, another's node is; and the requeue by Slurm itself is steered
    onto survivors that were held meanwhile, although other jobs wait for every node."""
    settings = {"fence_budget_nodes": 3, "fence_budget_user_nodes": 1, "alert_program": str(program)}
    site = make_site(nodes=9, settings=settings)
    first, hosts = start(site)
    theirs = site.submit("-N3", "--requeue", "--exclusive", user="bob")
    site.running(theirs)
    bobs = site.nodes(theirs)
    site.agents(theirs, 0, bobs, user="bob")
    site.cluster.cut_power(hosts[1])
    site.running(first, restart=1)
    now = site.nodes(first)
    until(lambda: not site.reservations())
    for process in site.processes[:3]:  # of its first life
        process.kill()
    site.agents(first, 1, now)
    site.cluster.cut_power(now[1])
    said = until(lambda: site.event(first, "not_fenced"))
    assert "fence_budget_user_nodes: 1 nodes fenced recently" in said["detail"] and said["host"] == now[1]
    assert "event=alert kind=user budget" in site.log()
    until(lambda: len((program.parent / "said").read_text().splitlines()) >= 4)
    lines = (program.parent / "said").read_text().splitlines()
    assert lines[0] == f"4 user budget {first} {now[1]}" and "call the administrator" in lines[1]
    assert lines[2] == "slurm" and set(lines[3].split()) <= {"LC_ALL", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert len(until(site.reservations, 10)) == 1, "its own survivors are held"
    # Bob is not alice.
    site.cluster.cut_power(bobs[1])
    site.running(theirs, restart=1)
    assert {bobs[0], bobs[2]} < set(site.nodes(theirs)) and set(fenced(site)) == {hosts[1], bobs[1]}
    # Others wait; Slurm finds alice's node at last.
    for _ in range(6):
        site.submit("-N1", "--exclusive", user="bob", script="#!/bin/sh\nsrun sleep 5\n")
    site.cluster.run(["scontrol", "update", f"nodename={now[1]}", "state=down", "reason=slurmd is gone"])
    site.running(first, restart=2, timeout_s=60)
    assert {now[0], now[2]} < set(site.nodes(first)), site.log()
    assert now[1] not in fenced(site)
    until(lambda: "took more than" in site.log(), what="the program is ended")
