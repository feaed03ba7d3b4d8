"""The outlook of jobs on a drained node, by copies, tier, spares and Slurm's own rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gemini_hpc.cli import main, node
from gemini_hpc.core.slots import Stamp
from gemini_hpc.query import ask
from gemini_hpc.query.drain import UNPROTECTED, Outlook, predict_outlook
from gemini_hpc.query.inspect_document import Document, build_inspect_document
from gemini_hpc.slurm import Slurm, SlurmRefused
from gemini_hpc.slurm.facts import Job
from gemini_hpc.wire import own_key
from gemini_hpc.wire.flush import Flushing
from gemini_hpc.wire.inspect_schema import InspectPart, TierState

from .test_admin_comment import JOB
from .test_inspect_document import NOW, SLURM, pairs


def document(change: Callable[[InspectPart], InspectPart] = lambda part: part, **slurm: str) -> Document:
    """A job on n1 to n4; n1+n2 and n3+n4 hold each other's shards of version 5."""
    parts = [change(part) for part in pairs({})]
    return build_inspect_document(7, parts, [], SLURM | slurm, (), "controller", NOW)


def with_tier(part: InspectPart) -> InspectPart:
    if part.host != "n1":
        return part
    training = msgspec.structs.replace(part.trainings[0], tier=TierState("/t", Stamp(1, 3), NOW - 9, None, 0, ""))
    return msgspec.structs.replace(part, trainings=(training,))


def with_spare(part: InspectPart) -> InspectPart:
    return msgspec.structs.replace(part, hosts=("n1", "n2", "n3", "n4", "n5"), spares=1)


def alone(part: InspectPart) -> InspectPart:
    """The partner of n1 has lost its copies."""
    return msgspec.structs.replace(part, held=()) if part.host == "n2" else part


ALL_FIVE = {"nodes": "n1,n2,n3,n4,n5"}


@pytest.mark.parametrize(
    ("d", "host", "wanted"),
    [
        (document(), "n3", Outlook("stays", "memory", 5)),
        (document(with_spare, **ALL_FIVE), "n3", Outlook("leaves", "memory", 5)),
        (document(with_spare, **ALL_FIVE), "n1", Outlook("stays", "memory", 5, "its batch script runs there")),
        (document(with_spare, **ALL_FIVE), "n5", Outlook("idle", "", 0)),
        (document(alone), "n3", Outlook("stays", "memory", 5)),
        (
            document(alone),
            "n1",
            Outlook("stays", "", 0, "this node holds the only copy, and the tier has none"),
        ),
        (
            document(lambda part: with_tier(alone(part))),
            "n1",
            Outlook("stays", "tier", 3, "memory has no other copy of what this node holds"),
        ),
        (document(note="submitted without --requeue"), "n3", Outlook("stays", "", 0, "submitted without --requeue")),
        (
            document(lambda part: msgspec.structs.replace(part, trainings=(), held=())),
            "n3",
            Outlook("stays", "", 0, "nothing is saved yet"),
        ),
    ],
)
def test_the_outlook(d: Document, host: str, wanted: Outlook) -> None:
    found = predict_outlook(d, host)
    assert found == wanted
    assert found.survives == (bool(wanted.source) or wanted.drain == "idle")


def test_a_job_that_nobody_protects_does_not_survive() -> None:
    found = node.build_document("n3", "ALLOCATED", [(0, 7), (0, 8)], {7: document()}, 2, NOW)
    assert [(j["job"], j["survives"], j["step"]) for j in found["jobs"]] == [(7, True, 5), (8, False, None)]
    assert found["jobs"][1]["why"] == UNPROTECTED.why and json.loads(json.dumps(found)) == found
    text = node.render(found).splitlines()
    assert text[0] == "node n3 is ALLOCATED"
    assert text[2].split() == ["7", "root", "protected", "runs", "on", "here", "step", "5", "from", "memory"]
    assert text[3].split() == ["8", "root", "unprotected", "runs", "on", "here", "begins", "anew", "or", "ends"]
    assert "to move job 7 by a requeue: gemini-hpc requeue --after-save 7" in text
    assert text[-1] == "and 2 jobs of others" and all(len(line) <= 80 for line in text)


def test_an_empty_node() -> None:
    assert node.render(node.build_document("n3", "IDLE+DRAIN", [], {}, 0, NOW)).splitlines() == [
        "node n3 is IDLE+DRAIN",
        "no job of yours runs there",
    ]


def test_text_of_others_cannot_steer_the_terminal() -> None:
    d = document(note="x\x1b[31m")
    d["slurm"]["id"] = "7\x1b]0;t\x07"
    assert "\x1b" not in node.render(node.build_document("n3", "IDLE", [(0, 7)], {7: d}, 0, NOW))


# ---- requeue --after-save ------------------------------------------------------------------------------


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for agents and Slurm, and record the requests to Slurm."""
    told = SimpleNamespace(
        saved=[Flushing("default", Stamp(1, 9), 0, over=True, where="/t/x")], job=JOB, done=[], refusal=""
    )

    async def job(self: Slurm, raw_id: int) -> Job:
        found: Job = told.job
        return found

    async def again(self: Slurm, job: Job) -> None:
        if told.refusal:
            raise SlurmRefused(told.refusal)
        told.done.append(job.raw_id)

    monkeypatch.setattr(ask, "flush", lambda settings, raw_id, report: told.saved)
    monkeypatch.setattr(Slurm, "read_job", job)
    monkeypatch.setattr(Slurm, "requeue_job", again)
    monkeypatch.setattr(own_key, "load_settings", lambda raw_id, path: None)
    return told


def test_a_job_is_requeued_once_it_is_saved(requeued: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["requeue", "--after-save", str(JOB.raw_id)]) == 0
    assert requeued.done == [JOB.raw_id]
    assert capsys.readouterr().out == f"job {JOB.raw_id} is requeued; saved: default at step 9\n"
    assert main.main(["requeue", "--after-save", str(JOB.raw_id), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "job": JOB.raw_id, "saved": {"default": 9}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"saved": [Flushing(over=True, reason="the job has no tier")]}, "runs on: the job has no tier (scontrol "),
        ({"job": dataclasses.replace(JOB, may_requeue=False)}, "runs on: this job was submitted without"),
        ({"refusal": "Requested operation is presently disabled"}, "presently disabled"),
    ],
)
def test_else_it_runs_on(
    requeued: Any, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vars(requeued).update(change)
    assert main.main(["requeue", "--after-save", str(JOB.raw_id)]) == 1
    told = capsys.readouterr()
    assert words in told.err and not told.out and not requeued.done


def test_without_the_option_nothing_is_requeued(requeued: Any) -> None:
    with pytest.raises(SystemExit):
        main.main(["requeue", str(JOB.raw_id)])
    assert not requeued.done
