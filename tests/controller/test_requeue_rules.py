"""The rules about candidates, what Slurm would allocate, and release."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gemini_hpc.controller.requeue_rules import (
    count_candidates,
    explain_bar,
    find_candidates,
    find_release_reason,
    fits_job,
    is_held,
)
from gemini_hpc.slurm.facts import Reservation
from gemini_hpc.slurm.text import parse_node

from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-running.txt").read_text().splitlines()[0]
JOB = parse_job(LINE)
NODE = parse_node("NodeName=n2 CPUTot=4 RealMemory=2000 NodeAddr=10.77.0.12 State=ALLOCATED Partitions=main")


def test_candidates_fit_and_idle_ones_come_first() -> None:
    nodes = {
        name: parse_node(f"NodeName={name} CPUTot={cpus} RealMemory=2000 State={state} Partitions={part}")
        for name, cpus, state, part in (
            ("n1", 4, "ALLOCATED", "main"),
            ("n4", 4, "MIXED", "main"),
            ("n5", 4, "IDLE", "main"),
            ("n6", 4, "IDLE", "other"),
            ("n7", 4, "IDLE+DRAIN", "main"),
            ("n8", 4, "IDLE+RESERVED", "main"),
            ("n9", 1, "IDLE", "main"),
        )
    }
    job = dataclasses.replace(JOB, min_cpus=2)
    assert [n.name for n in find_candidates(job, nodes, ["n1"], ["n8"])] == ["n5", "n4"]
    wanting = dataclasses.replace(job, features="gpu&ib")
    assert not fits_job(wanting, nodes["n5"])
    assert fits_job(wanting, dataclasses.replace(nodes["n5"], features=frozenset(("gpu", "ib"))))


def test_release() -> None:
    cases: list[tuple[str | None, float | None, bool]] = [
        ("RUNNING", None, False),
        ("PENDING", None, False),
        ("COMPLETED", 0.0, True),
        ("CANCELLED", 0.0, True),
        ("FAILED", 10.0, False),
        ("FAILED", 900.0, True),
        ("TIMEOUT", 0.0, False),
        ("TIMEOUT", 900.0, True),
        ("NODE_FAIL", 1000.0, True),
        (None, None, True),
        (None, 10.0, False),
        (None, 900.0, True),
    ]
    for case in cases:
        state, ended, free = case
        assert bool(find_release_reason(state, ended, 900.0)) is free, case


def test_copies_of_a_completed_job_stay_until_a_loss_before_its_end_would_be_known() -> None:
    assert not find_release_reason("COMPLETED", 7.9, 900.0, doubt_s=8.0)
    assert find_release_reason("COMPLETED", 8.0, 900.0, doubt_s=8.0) == "job COMPLETED"
    assert find_release_reason("CANCELLED", 0.0, 900.0, doubt_s=8.0) == "job CANCELLED"


def test_reasons_that_no_node_can_help() -> None:
    assert (
        is_held("JobHeldUser")
        and is_held("QOSMaxJobsPerUserLimit")
        and is_held("AssocGrpCpuLimit")
        and is_held("Dependency")
    )
    assert not is_held("Resources") and not is_held("BeginTime") and not is_held("Priority") and not is_held("")
    assert not is_held("ReqNodeNotAvail, UnavailableNodes:n2")


def test_candidates_have_the_gres() -> None:
    asked = dataclasses.replace(JOB, gres_per_node={"gpu:a100": 2})
    assert not fits_job(asked, NODE)
    assert fits_job(asked, dataclasses.replace(NODE, gres={"gpu": 4, "gpu:a100": 4}))
    assert not fits_job(asked, dataclasses.replace(NODE, gres={"gpu": 4, "gpu:v100": 4}))


def test_one_percent_of_a_large_partition() -> None:
    cluster = {f"n{i}": NODE for i in range(1000)}
    assert count_candidates(JOB, cluster, 1, 2) == 11
    assert count_candidates(JOB, {"n1": NODE}, 1, 2) == 3
    elsewhere = {f"n{i}": dataclasses.replace(NODE, partitions=("other",)) for i in range(1000)}
    assert count_candidates(JOB, elsewhere, 1, 2) == 3


def test_what_slurm_would_not_allocate() -> None:
    cases: list[tuple[str, dict[str, str], float | None, str]] = [
        ("IDLE", {"main": "UP"}, None, ""),
        ("ALLOCATED", {"main": "UP"}, 200.0, ""),
        ("IDLE+RESERVED", {"main": "UP"}, None, ""),
        ("IDLE+DRAIN", {"main": "UP"}, None, "DRAIN"),
        ("MIXED+DRAIN", {"main": "UP"}, None, "DRAIN"),
        ("DOWN", {"main": "UP"}, None, "DOWN"),
        ("IDLE+MAINTENANCE", {"main": "UP"}, None, "MAINT"),
        ("IDLE+MAINT", {"main": "UP"}, None, "MAINT"),
        ("IDLE+REBOOT_REQUESTED", {"main": "UP"}, None, "REBOOT"),
        ("ALLOCATED+REBOOT_ISSUED", {"main": "UP"}, None, "REBOOT"),
        ("IDLE", {"main": "DOWN"}, None, "partition main is DOWN"),
        ("IDLE", {"main": "INACTIVE"}, None, "partition main is INACTIVE"),
        ("IDLE", {"main": "DRAIN"}, None, "partition main is DRAIN"),
        ("IDLE", {"main": "UP"}, 50.0, "reservation weekly"),
    ]
    for case in cases:
        state, partitions, reserved_from, word = case
        node = parse_node(f"NodeName=n2 CPUTot=4 RealMemory=2000 State={state} Partitions=main")
        others = [] if reserved_from is None else [weekly(("n1", "n2"), reserved_from)]
        why = explain_bar(JOB, node, partitions, others, 100.0)
        assert word in why and bool(why) is bool(word), case


def weekly(nodes: tuple[str, ...], start: float) -> Reservation:
    return Reservation("weekly", nodes, ("bob",), "ACTIVE", frozenset(), start)


def test_one_of_two_partitions_is_enough() -> None:
    job = dataclasses.replace(JOB, partition="main,long")
    node = dataclasses.replace(NODE, partitions=("main", "long"))
    assert explain_bar(job, node, {"main": "DOWN", "long": "UP"}, [], 0.0) == ""
    assert "long is DOWN" in explain_bar(job, node, {"main": "DOWN", "long": "DOWN"}, [], 0.0)
    assert explain_bar(job, dataclasses.replace(NODE, partitions=("other",)), {}, [], 0.0)
    assert not explain_bar(job, NODE, {"main": "UP"}, [weekly(("n9",), 0.0)], 100.0)
