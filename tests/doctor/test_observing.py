"""A real site that only observes: a node loses power, Slurm alone acts, and doctor prints the score."""

from __future__ import annotations

import json
import os

import pytest
from waiting import until

from gemini_hpc.devcluster import Cluster

from .conftest import Patient

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def score(site: Patient) -> str:
    return str(site.doctor("--only", "controller.mode")["controller.mode"]["found"])


def test_a_power_cut() -> None:
    settings = {"mode": "observe"}
    with Cluster.bring_up(f"observing{os.getpid()}", nodes=3, settings=settings) as cluster:
        site = Patient(cluster)
        with site.job("--requeue") as job:
            victim = cluster.run(["squeue", "-h", "-j", str(job), "-o", "%N"]).stdout.strip()
            victim = cluster.run(["scontrol", "show", "hostnames", victim]).stdout.split()[-1]
            cluster.cut_power(victim)
            until(lambda: "withheld" in [e["name"] for e in site.picture(job).get("events", [])], 60)
            until(lambda: cluster.read_node_state(victim).lower().startswith("down"), 60)
            until(lambda: "confirmed 1 and refuted 0" in score(site), 60)
            reason = cluster.run(["sinfo", "-h", "-n", victim, "-o", "%E"]).stdout
            assert "gemini" not in reason, "Slurm's own reason"
            assert "gemini_" not in cluster.run(["scontrol", "show", "reservation"]).stdout
            events = {e["name"] for e in site.picture(job)["events"]}
            assert not events & {"down", "reserved", "pinned", "sent_back", "start_set"}, events
        acts = json.loads((site.state / "withheld.json").read_text())
        assert [(a["act"], a["node"], a["verdict"]) for a in acts] == [("fence", victim, "confirmed")]
