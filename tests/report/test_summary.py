"""The first lines of `gemini-hpc inspect`: state, what may be lost, what to do; all of it on one screen."""

from __future__ import annotations

from typing import Any

import pytest

from gemini_hpc.cli.inspect import render
from gemini_hpc.core.slots import Stamp
from gemini_hpc.query.inspect_document import build_inspect_document
from gemini_hpc.report.summary import choose_advice, format_summary
from gemini_hpc.wire.inspect_schema import EventRecord, HeldSlot, InspectPart, TrainingState

NOW = 1000.0
RUNNING = {"state": "RUNNING", "restarts": "0"}


def job(nodes: int, ranks: int, **changes: Any) -> list[InspectPart]:
    """Return the parts of a job whose shards lie on their home and the next node, in pairs."""
    hosts = tuple(f"n{i}" for i in range(nodes))
    parts = []
    for i, host in enumerate(hosts):
        ranks_here = [r for r in range(ranks) if r * nodes // ranks in (i, i ^ 1)]
        held = [
            HeldSlot("default", r, ranks, r * nodes // ranks, n, state, Stamp(1, v), 10, 9, NOW - 2, NOW - 1)
            for r in ranks_here
            for n, (v, state) in enumerate(((5, "complete"), (6, "filling")))
        ]
        training = TrainingState("default", ranks, Stamp(1, 5), changes.get("state", "protected"), tuple(ranks_here))
        part = InspectPart(
            host=host, job=7, uid=5001, restart=0, replicas=2, epoch=1, round=1, state="live", hosts=hosts,
            noderanks={h: n for n, h in enumerate(hosts)}, address="10.0.0.1", interface="eth0", port=1,
            memory_bytes=1, memory_cap_bytes=2, trainings=(training,), held=tuple(held), events=(), suspects=(),
            dead=(), unprotected=changes.get("unprotected", ""),
        )  # fmt: skip
        parts.append(part)
    return parts


def document(nodes: int = 4, ranks: int = 4, absent: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    parts = [part for part in job(nodes, ranks, **changes) if part.host not in absent]
    slurm = RUNNING | {"nodes": ",".join(f"n{i}" for i in range(nodes))}
    return build_inspect_document(7, parts, changes.get("events", ()), slurm, absent, "controller", NOW)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (8, 64), (64, 512)])
def test_a_job_fits_on_one_screen(nodes: int, ranks: int) -> None:
    lost = [
        EventRecord(t, name, "n1", restart)
        for restart in range(5)
        for t, name in (
            (restart * 3600.0, "detected"),
            (restart * 3600.0 + 1, "down"),
            (restart * 3600.0 + 2, "running"),
        )
    ]
    d = document(nodes, ranks, events=lost)
    lines = render(d).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, lines
    assert [line.partition(":")[0] for line in lines[:3]] == ["job 7", "may be lost", "to do"]
    full = render(d, full=True).splitlines()
    assert sum(line.startswith("recovery of") for line in full) == 5
    assert sum(" sealed " in line for line in full if line.startswith("  ")) >= 2 * ranks, "every shard's holders"


def test_nodes_in_trouble_come_first() -> None:
    lines = render(document(16, 16, absent=("n13",))).splitlines()
    first = lines[lines.index("nodes") + 2]
    assert (
        first.split()[1] == "n13" and "no agent" in first and any(line == "  and 8 more (--full)" for line in lines)
    )


@pytest.mark.parametrize(
    ("changes", "state", "lost", "to_do"),
    [
        ({}, "protected", "any 1 node; step 5 is safe, 2 s old", "nothing (gemini-hpc inspect 7 --full"),
        ({"absent": ("n1",)}, "partly protected", "1 node in 75 % of cases", "run gemini-hpc doctor on n1: no agent"),
        ({"state": "degraded"}, "degraded", "any 1 node", "see the note; nothing newer is sealed"),
        ({"state": "recovering"}, "recovering", "any 1 node", "nothing; the ranks get their state back"),
        ({"unprotected": "agent waits"}, "unprotected", "any 1 node", "see the note; the training runs on"),
    ],
)
def test_the_three_lines(changes: dict[str, Any], state: str, lost: str, to_do: str) -> None:
    first, second, third = format_summary(document(**changes), 200)
    assert first.startswith(f"job 7: {state}   slurm RUNNING   restarts 0   2 copies")
    assert second.startswith(f"may be lost: {lost}") and third.startswith(f"to do: {to_do}")


def test_jobs_that_wait() -> None:
    def lines(state: str, restarts: int) -> list[str]:
        slurm = {"state": state, "reason": "Resources", "restarts": str(restarts)}
        return format_summary(build_inspect_document(7, [], [], slurm, (), "controller", NOW), 80)

    assert lines("PENDING", 0)[0] == "job 7: pending   slurm PENDING (Resources)   restarts 0"
    assert lines("PENDING", 0)[2] == lines("PENDING", 1)[2] == "to do: nothing; the job waits for Slurm"
    assert lines("RUNNING", 0)[2].startswith("to do: see the note")


def test_advice_after_the_end() -> None:
    d = document() | {"ended": {"state": "TIMEOUT", "t": NOW, "exit_code": "", "version": 41, "stored": None}}
    assert choose_advice(d) == "see the events below"
    assert "--gemini-after=7" in choose_advice(d | {"kept_until": NOW + 60})
    assert "step 40 on the tier" in choose_advice(d | {"ended": d["ended"] | {"stored": 40}})
    assert choose_advice(d | {"ended": d["ended"] | {"state": "COMPLETED"}}) == "nothing"
