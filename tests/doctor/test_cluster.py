"""The table of all nodes: what it says of nodes that answer, differ, are busy, are down or hang."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from waiting import until

from gemini_hpc import __version__
from gemini_hpc.cli.main import main
from gemini_hpc.doctor import cluster
from gemini_hpc.doctor.finding import Finding
from gemini_hpc.slurm.facts import Node
from gemini_hpc.slurm.text import parse_node

from .conftest import Patient

DIGEST = "0123456789ab"


def node(name: str, state: str = "IDLE", reason: str = "", of: str = "main") -> Node:
    more = f" Reason={reason}" if reason else ""
    return parse_node(f"NodeName={name} NodeAddr={name} CPUTot=4 State={state} Partitions={of}{more}")


def answer(version: str = __version__, digest: str = DIGEST, **statuses: str) -> str:
    checks = [asdict(Finding(f"x.{name}", "", s, f"odd {name}", "", "", 0.1)) for name, s in statuses.items()]
    return json.dumps({"version": version, "settings_sha256": digest, "agents": 1, "checks": checks})


ANSWERS = {
    "n1": (answer(a="ok", b="accepted"), ""),
    "n2": (answer("0.1.0", a="warning"), ""),
    "n3": (answer(digest="ffff", a="warning"), ""),
    "n4": (answer(a="wrong"), ""),
    "n5": ("", "srun: error: Unable to allocate resources: Requested nodes are busy"),
    "n6": ("", "no answer within 110 s"),
    "n7": ("{", ""),
}
NODES = [*map(node, ANSWERS), node("n8", "DOWN", "disk"), node("n9", of="closed")]
REFUSED = "srun: error: Unable to allocate resources: "


def asking(argv: Sequence[str]) -> tuple[str, str]:
    (name,) = [word.partition("=")[2] for word in argv if word.startswith("--nodelist=")]
    return ANSWERS[name]


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_tool", lambda name: name)
    rows = cluster.gather(NODES, {"main": "UP", "closed": "DOWN"}, "/x.toml", DIGEST, asking)
    assert [r.status for r in rows] == [
        *("ok", "differs", "differs", "wrong", "not asked (busy)", "no answer", "no answer", "not asked", "not asked")
    ]
    d = cluster.build_document(rows, "ctl", DIGEST, 1.0)
    assert d["status"] == 1 and json.loads(json.dumps(d))["nodes"][1]["version"] == "0.1.0"
    text = cluster.format_table(rows, "ctl", DIGEST, 200)
    assert "n[2-3]: x.a: odd a" in text, "what several nodes have is said once"
    for part in ("n8: DOWN: disk", "n5: no free CPU", "n6: no answer within", "1 accepted warnings are not shown"):
        assert part in text
    assert "odd b" not in text
    assert cluster.build_document(rows[:1] + rows[7:], "ctl", DIGEST, 1.0)["status"] == 0, "what Slurm has put aside"


@pytest.mark.parametrize(
    ("why", "status"),
    [
        (f"{REFUSED}Requested nodes are busy", "not asked (busy)"),
        (f"{REFUSED}Immediate execution impossible, insufficient priority", "not asked (busy)"),
        (f"{REFUSED}Required node not available (down, drained or reserved)", "not asked"),
        (f"{REFUSED}Invalid account or account/partition combination specified", "no answer"),
        ("OSError: [Errno 16] Device or resource busy: '/run'", "no answer"),
    ],
)
def test_what_srun_says_of_a_node_that_it_is_not_given(why: str, status: str) -> None:
    assert cluster.build_row(node("n1"), "", why, DIGEST).status == status


def test_nodes_full_of_jobs_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them would take the ten minutes of the others; they are no fault, and read so in 80 columns."""
    monkeypatch.setattr(cluster, "find_tool", lambda name: name)
    full = [node(f"b{n}", "ALLOCATED") for n in range(1000)]
    rows = cluster.gather([*full, node("n1")], {"main": "UP"}, "/x.toml", DIGEST, asking)
    assert {r.status for r in rows[:-1]} == {"not asked (busy)"} and rows[-1].status == "ok"
    assert cluster.build_document(rows, "ctl", DIGEST, 1.0)["status"] == 0
    text = cluster.format_table(rows, "ctl", DIGEST, 80).splitlines()
    assert "not asked (busy) b[0-999]: jobs have all CPUs" in text
    assert text[-1].startswith("1001 nodes: 1 ok, 1000 not asked (busy); ")


def test_a_command_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.ask([sys.executable, "-c", "import sys; sys.exit('a\\nb')"]) == ("", "b")
    monkeypatch.setattr(cluster, "ONE_S", 0.3)
    assert cluster.ask([sys.executable, "-c", "import time; time.sleep(60)"]) == ("", "no answer within 0.3 s")


def test_for_root_and_all_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["doctor", "--cluster"]) == 2 and "only root" in capsys.readouterr().err
    assert main(["doctor", "--cluster", "--only", "slurm"]) == 2 and "--only" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("full", "why"), [("--exclusive", "jobs have all CPUs"), ("--mem=0", "no free CPU or memory within 10 s")]
)
def test_a_real_cluster(patient: Patient, full: str, why: str) -> None:
    """All nodes answer but for one that is drained, and one whose CPUs or memory a job has: these are named."""
    assert patient.cluster.run(["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan"]).returncode == 0
    job = patient.cluster.submit_job(["-wn2", "-n1", full, "--output=/dev/null"], script="#!/bin/bash\nsleep 300\n")
    try:
        until(lambda: patient.cluster.read_job(job)["JobState"] == "RUNNING", 30, what="the job on n2")
        done = patient.cluster.run(["gemini-hpc", "doctor", "--cluster", "--json"], timeout_s=150)
    finally:
        patient.cluster.run(["scancel", str(job)])
        patient.cluster.resume("n3")
    d = json.loads(done.stdout)
    first, busy, drained = d["nodes"]
    assert first["status"] == "ok" and done.returncode == 0, done.stdout
    assert (busy["status"], busy["why"]) == ("not asked (busy)", why), done.stdout
    assert drained["status"] == "not asked", done.stdout
    assert first["settings_sha256"] == d["settings_sha256"]
