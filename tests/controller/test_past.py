"""A job that is over: what its log still tells, and how `inspect` and `jobs` show it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec
import pytest

from gemini_hpc.cli import amounts, jobs
from gemini_hpc.cli.inspect import render
from gemini_hpc.config import Settings
from gemini_hpc.query import ask, figures, past
from gemini_hpc.query.inspect_document import build_inspect_document
from gemini_hpc.wire import inspect_schema
from gemini_hpc.wire.inspect_schema import EventRecord
from gemini_hpc.wire.sanitize import MAX_DETAIL, sanitize

from .test_inspect_document import SLURM, pairs

NOW = 1_760_000_000.0
FORGOTTEN = {"state": "UNKNOWN", "reason": "Slurm does not know this job any more"}
RESUMED = json.dumps({"rank": 1, "began": NOW - 80.0, "fetched": NOW - 79.5, "loaded": NOW - 79.25, "shards": 2})
NIGHT = [
    EventRecord(NOW - 300, "attached", "n1", 0, 0, "2 nodes"),
    EventRecord(NOW - 100, "detected", "", 0, 0, "n1: n2 is silent"),
    EventRecord(
        NOW - 95,
        "confirmed",
        "n2",
        0,
        0,
        "no answer from slurmd, agent and kernel for 5.0 s, 2 witnesses " + "and so on " * 6,
    ),
    EventRecord(NOW - 85, "running", "", 0, 0, "restart 1 on n1,n3"),
    EventRecord(NOW - 79, "resumed", "n3", 1, 40, RESUMED),
    EventRecord(NOW - 78, "first_iteration", "n3", 1, 41),
    EventRecord(NOW - 20, "detached", "n1", 1, 77, "exit code 1; sealed default 2:77"),
    EventRecord(NOW - 19, "ended", "", 1, 0, "FAILED exit 1:0"),
]


def shown(events: list[EventRecord], slurm: dict[str, str]) -> tuple[dict[str, Any], str]:
    d = build_inspect_document(7, [], events, slurm, ("n1",), "controller", NOW)
    return d, render(sanitize(d), 80)


def test_a_job_that_died_at_night() -> None:
    d, text = shown(NIGHT, FORGOTTEN)
    assert d["state"] == "ended" and d["missing"] == [] and d["nodes"] == []
    assert d["ended"] == {"state": "FAILED", "t": NOW - 19, "exit_code": "1:0", "version": 77, "stored": None}
    assert text.startswith("job 7: ended") and "restarts 1" in text
    assert "ended as FAILED, exit code 1:0" in text and "19 s ago" in text
    assert "last sealed version: 77" in text and "recoveries: 1" in text and "recovery of restart 0" in text
    assert "rank 1, fetched in 0.50 s, loaded in 0.25 s, 2 shards" in " ".join(text.split())
    assert "{" not in text and "protected" not in text and max(map(len, text.splitlines())) <= 80


def test_slurm_knows_it_still() -> None:
    cases: list[str] = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"]
    for state in cases:
        slurm = {**SLURM, "state": state, "exit_code": "0:9", "end_time": f"{NOW - 30:.0f}"}
        d, text = shown(NIGHT[:-1], slurm)
        assert d["state"] == "ended" and d["ended"]["state"] == state and d["ended"]["t"] == NOW - 30, state
        assert f"ended as {state}, exit code 0:9" in text and "partly" not in text, state


def test_a_job_that_lives_has_not_ended() -> None:
    cases: list[str] = ["RUNNING", "PENDING", "COMPLETING", "REQUEUE_HOLD", "SUSPENDED", ""]
    for state in cases:
        d, _ = shown(NIGHT, {**SLURM, "state": state})
        assert d["ended"] is None and d["state"] != "ended", state


def test_copies_that_are_still_kept_are_shown() -> None:
    d = build_inspect_document(7, pairs({}), NIGHT, {**SLURM, "state": "FAILED"}, (), "controller", NOW)
    assert d["state"] == "ended" and len(d["nodes"]) == 4 and d["trainings"]


def test_an_owner_does_not_say_how_his_job_ended() -> None:
    forged = [*NIGHT[:-1], EventRecord(NOW, "ended", "n1", 1, 0, "COMPLETED exit 0:0")]
    d, _ = shown(forged, FORGOTTEN)
    assert d["ended"]["state"] == "UNKNOWN"
    odd = [*NIGHT[:-1], EventRecord(NOW, "ended", "", 1, 0, "x\x1b[2J")]
    assert shown(odd, FORGOTTEN)[0]["ended"]["state"] == "UNKNOWN"
    loud = [EventRecord(NOW, "resumed", "n1", 0, 1, text) for text in ("{" * 900, '{"rank": [1]}', '{"rank": 1e999}')]
    assert "[1]" not in shown([*loud, *NIGHT], FORGOTTEN)[1]


def test_a_job_that_came_back_after_its_end() -> None:
    """FAILED, requeued by the controller, and now forgotten without another word."""
    again = [*NIGHT, EventRecord(NOW - 10, "sent_back", "", 1), EventRecord(NOW - 5, "running", "", 1)]
    assert shown(again, FORGOTTEN)[0]["ended"]["state"] == "UNKNOWN"


def test_nothing_is_known_of_what_was_sealed() -> None:
    _, text = shown([NIGHT[0], NIGHT[-1]], FORGOTTEN)
    assert "no sealed version is known" in text and "recoveries: none" in text
    _, text = shown([*NIGHT, EventRecord(NOW, "saved", "n1", 1, 60)], FORGOTTEN)
    assert "on the tier: version 60" in text


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "job": 7, "id": "7", "uid": 5001, "user": "alice", "state": "protected", "slurm": "RUNNING", "nodes": 16,
        "state_of": "", "sealed_age_s": 0.42, "sealed_version": 41, "survives": 1, "recoveries": 2, "restarts": 2,
        "ended": None,
    }  # fmt: skip
    return good | changes


def over(since_s: float, sealed: int | None, **changes: Any) -> dict[str, Any]:
    ended = {"state": "ended", "slurm": "FAILED", "ended": NOW - since_s, "sealed_version": sealed}
    return row(sealed_age_s=None, survives=None, **ended, **changes)


def test_the_table() -> None:
    rows = [
        row(),
        row(
            job=8,
            id="4294967295_1000",
            user="a-very-long-user-name",
            state="partly protected",
            state_of="(1 of 2 trainings)",
            slurm="OUT_OF_MEMORY",
        ),
        over(8000, 77, job=9, id="9"),
        over(8000, None, job=11, id="11"),
        row(job=10, id="10", user="x\x1b[2J\n", state="arming", sealed_age_s=None, survives=None, nodes=10000),
    ]
    text = jobs.render({"schema": 1, "t": NOW, "jobs": rows, "not_shown": 3})
    lines = text.splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 80 and "\x1b" not in text
    assert lines[0].split() == list(jobs.HEAD)
    assert lines[1].split() == ["7", "alice", "protected", "RUNNING", "16", "41", "0.4", "s", "1", "node", "2"]
    assert lines[3].strip() == "(1 of 2)" and lines[3].index("(") == lines[2].index("partly")
    assert " 2 h " in lines[4] and lines[-1] == "and 3 older ones"
    assert lines[5].split()[5:8] == ["-", "2", "h"], "it has never sealed"
    for since_s, words in (
        (45, " 45 s "),
        (7199, " 120 min "),
        (7200, " 2 h "),
        (9e5, " 10 days "),
        (8e6, " 93 days "),
    ):
        ended = jobs.render({"schema": 1, "t": NOW, "jobs": [over(since_s, 77)], "not_shown": 0})
        assert words in ended, "in its column"
    assert "no protected jobs" in jobs.render({"schema": 1, "t": NOW, "jobs": [], "not_shown": 0})


def test_a_row_of_a_living_job() -> None:
    d = build_inspect_document(7, pairs({}), NIGHT[:6], SLURM, (), "controller", NOW)
    assert figures.count_survivable_nodes(d) == 1 and figures.compute_sealed_age_s(d) is not None
    nothing = build_inspect_document(
        7, pairs(dict.fromkeys(("n1", "n2", "n3", "n4"), 0))[:1], [], SLURM, (), "controller", NOW
    )
    assert figures.count_survivable_nodes(nothing) is None


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "UNKNOWN"])
def test_what_the_controller_writes_is_what_is_read(state: str) -> None:
    for code in ("1:0", "", "x", "0:15"):
        events = [EventRecord(NOW, past.ENDED, "", 0, 0, past.describe_end(state, code))]
        how = past.derive_end(events, FORGOTTEN)
        assert how is not None and how.state == state and how.exit_code == (code if ":" in code else "")


def test_the_last_sealed_version_is_of_the_last_life() -> None:
    """What the one before had sealed was lost with its nodes."""
    log = [
        EventRecord(NOW - 900, "detached", "n1", 0, 500, "sealed default 1:500"),
        EventRecord(NOW - 20, "detached", "n3", 1, 20, "sealed default 65:20"),
        EventRecord(NOW - 19, "ended", "", 1, 0, "FAILED exit 1:0"),
    ]
    assert shown(log, FORGOTTEN)[0]["ended"]["version"] == 20


def test_an_agents_events_are_its_owners_word() -> None:
    """In its part as in the log: under its host's name, of bounded length, and of a size that can be shown."""
    parts = pairs({})
    forged = EventRecord(NOW - 1, "ended", "", 1, 0, "COMPLETED exit 0:0")
    large = EventRecord(NOW - 2, "resumed", "n1", 1, 3, '{"rank": ' + "9" * 200 + "}")
    long = EventRecord(NOW - 3, "degraded", "n1", 1, 3, "x" * 1000)
    parts[0] = msgspec.structs.replace(parts[0], events=(forged, large, long))
    d = build_inspect_document(7, parts, NIGHT, FORGOTTEN, (), "controller", NOW)
    assert d["ended"]["state"] == "FAILED"
    assert max(len(e["detail"]) for e in d["events"]) <= MAX_DETAIL
    assert render(sanitize(d), 80)


class Answers:
    """A controller's line; lists two jobs that have ended."""

    def __init__(self, *_: object) -> None:
        """Forget the arguments."""

    def list_jobs(self, everything: bool) -> inspect_schema.JobsAnswer:
        ended = (NOW - 3600, *((NOW - 86400 * 2,) if everything else ()))
        rows = tuple(inspect_schema.JobRow(i, 5001, "FAILED", 2, 0, 0, t) for i, t in enumerate(ended, 1))
        return inspect_schema.JobsAnswer(rows, 0)

    def close(self) -> None:
        """Do nothing."""


def test_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "ControllerLine", Answers)
    for word, expected in (("30m", []), ("2h", [1]), ("1d", [1]), ("3d", [1, 2])):
        found = jobs.collect_jobs(Settings(), since_s=amounts.parse_span(word), now=NOW)["jobs"]
        assert [row["job"] for row in found] == expected, word
    for word in ("", "d", "3", "-3d", "3.5h", "0h", "3 d", "1w", "\u0663d", "9" * 30 + "d"):
        with pytest.raises(argparse.ArgumentTypeError, match="90m, 8h or 3d"):
            amounts.parse_span(word)


def test_the_step_of_a_running_job_is_what_its_agents_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's event log knows only the version that the last restart began with."""
    row = inspect_schema.JobRow(7, 5001, "RUNNING", 2, 1, 1, sealed=70)
    document: dict[str, Any] = {
        "t": NOW,
        "state": "protected",
        "slurm": {"state": "RUNNING", "id": "7"},
        "nodes": [],
        "recoveries": [],
        "trainings": [],
    }
    assert jobs._build_row(row, document)["sealed_version"] == 70, "nothing is sealed since"
    monkeypatch.setattr(figures, "find_sealed_version", lambda d: 174)
    assert jobs._build_row(row, document)["sealed_version"] == 174
    assert jobs._build_row(row, None)["sealed_version"] == 70
