"""Parity in place of copies, on a real cluster: nodes of a group are cut, and the job is what it would have been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import saved
from training import Run, Training
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

Train = Callable[..., Training]
Reference = Callable[..., Run]
CUT_AT = 15


def test_a_node_of_three_is_cut(train: Train, reference: Reference) -> None:
    wanted = reference()
    job = train("xor", "--gemini-redundancy=xor:3")
    job.reach(CUT_AT)
    job.cluster.cut_power(job.hosts()[2])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 1 and "resumed at version 1" in job.output(), job.output()


def survives(job: Training, *wanted: float) -> dict[str, Any]:
    """Wait until `inspect` says with which probability the job survives the loss of 1, 2 ... nodes."""

    def told() -> dict[str, Any] | None:
        done = job.cluster.run(["gemini-hpc", "inspect", "--json", str(job.id)], user="alice")
        found: dict[str, Any] = json.loads(done.stdout)
        rows = found["trainings"][0]["survival"]["survives"]
        return found if [row["probability"] for row in rows[: len(wanted)]] == list(wanted) else None

    return until(told, 30, what=f"survival with {wanted}")  # type: ignore[no-any-return]


def test_two_nodes_of_a_group_are_cut_with_two_blocks(train: Train, reference: Reference) -> None:
    job = train("rs", "-N4", "--gemini-redundancy=rs:2+2", parallel="fsdp2", iteration_s=0.3)
    job.reach(CUT_AT)
    found = survives(job, 1.0, 1.0, 0.0)
    assert (found["redundancy"], found["replicas"], found["parity"]) == ("rs", 4, 2)
    hosts = job.hosts()
    for host in (hosts[1], hosts[2]):
        job.cluster.cut_power(host)
    job.finish()
    job.assert_same_as(reference("fsdp2", 4))
    assert job.repeated() <= 1 and "resumed at version" in job.output(), job.output()


def test_two_nodes_of_a_group_are_cut(train: Train, reference: Reference, tier: Path) -> None:
    """Memory cannot serve that: `inspect` has said so before, and the job comes back from the tier."""
    wanted = reference("fsdp2")
    options = (f"--gemini-tier={tier}", "--gemini-tier-interval=1")
    job = train("both", "--gemini-redundancy=xor:3", *options, parallel="fsdp2")
    job.reach(8)
    until(lambda: saved(tier, job) and saved(tier, job)[0].version >= 8, 60, what="a version on the tier")
    found, hosts = survives(job, 1.0, 0.0), job.hosts()
    assert (found["redundancy"], found["replicas"]) == ("xor", 3)
    fatal = found["trainings"][0]["survival"]["fatal"]
    assert sorted(hosts[:2]) in fatal, fatal
    for host in hosts[1:]:
        job.cluster.cut_power(host)
    job.finish()
    job.assert_same_as(wanted)
    assert "from the tier" in job.output(), job.output()
