"""Whose word counts for a node being alive (requirement believe-slurm)."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.controller.registry import ConnectedAgent, Registry, StoredJob, Track
from gemini_hpc.wire.controller import Registration

from .test_takeover import JOB


def agent(host: str, *, verified: bool, heard_s: float = 0.0, closed: bool = False) -> ConnectedAgent:
    asked: list[object] = []
    heard = time.monotonic() - heard_s
    link: Any = SimpleNamespace(closed=closed, last_heard=heard, send=asked.append, asked=asked)
    return ConnectedAgent(link, host, 7, "x", verified)


@pytest.mark.parametrize(
    ("known", "vouched", "asked"),
    [
        ({"verified": True}, True, 0),
        ({"verified": False}, False, 0),
        ({"verified": True, "heard_s": 5.0}, False, 1),
        ({"verified": False, "heard_s": 5.0}, False, 0),
        ({"verified": True, "closed": True}, False, 0),
    ],
)
def test_an_agent_vouches_for_its_node_from_there_only(
    tmp_path: Path, known: dict[str, Any], vouched: bool, asked: int
) -> None:
    """Another user's agent could say from a login node that a dead node lives, and have a job wait for it."""
    registry = Registry(str(tmp_path))
    track = registry.jobs[7] = Track(StoredJob(7, 5001), str(tmp_path / "7.job"))
    one = track.agents["n1"] = agent("n1", **known)
    assert registry.is_vouched("n1") is vouched
    assert len(one.link.asked) == asked  # type: ignore[attr-defined]
    assert not registry.is_vouched("n2")


@pytest.mark.parametrize(
    ("words", "finished"),
    [
        ([], None),
        ([None, None], False),  # nothing has trained yet
        ([True, None], True),  # a spare has nothing to finish
        ([True, True], True),
        ([True, False], False),  # whose rank was writing results when it was lost
        ([False], False),
    ],
)
def test_a_training_has_finished_where_all_agents_say_so(
    tmp_path: Path, words: list[bool | None], finished: bool | None
) -> None:
    track = Track(StoredJob(7, 5001), str(tmp_path / "7.job"))
    for number, word in enumerate(words):
        one = track.agents[f"n{number}"] = agent(f"n{number}", verified=True, closed=number == 0)
        one.apply_registration(Registration(7, 1, f"n{number}", (), 2, 17000, "x", "attached", finished=word))
    former = track.agents["n9"] = agent("n9", verified=True)
    former.apply_registration(Registration(7, 0, "n9", (), 2, 17000, "x", "detached", finished=True))
    assert track.check_finished(1) is finished
    track.job = dataclasses.replace(JOB, nodes=("n1", "n3"))
    assert track.lacks(1, "n2") is bool(finished), "it runs on with --no-kill, and nobody looks at the node again"


@pytest.mark.parametrize("word", [False, None, True])
def test_a_node_that_a_spare_has_replaced_has_not_to_finish(tmp_path: Path, word: bool | None) -> None:
    """Its rank was ended where it was, and reports that for ever."""
    track = Track(StoredJob(7, 5001), str(tmp_path / "7.job"))
    for host, said, without in (("n1", word, ("n2",)), ("n2", False, ()), ("n3", True, ("n2",))):
        track.agents[host] = agent(host, verified=True, closed=True)
        track.agents[host].apply_registration(
            Registration(7, 1, host, (), 2, 17000, "x", "detached", without=without, finished=said)
        )
    assert track.check_finished(1) is (word is not False)


def test_what_an_agent_says_again_counts() -> None:
    one = agent("n1", verified=True)
    for rescuing in (False, True, False):
        one.apply_registration(Registration(7, 1, "n1", (), 2, 17000, "x", "attached", rescuing=rescuing))
        assert one.is_rescuing is rescuing
    one.apply_registration(Registration(7, 1, "n1", (), 2, 0, "x", "attached"))
    assert one.port == 17000


def test_a_full_disk_leaves_an_older_state_there_until_it_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(str(tmp_path))
    track = registry.track_job(dataclasses.replace(JOB, raw_id=7))
    with monkeypatch.context() as patched:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr("builtins.open", full)
        track.give_up(0, ["n2"])
        track.give_up(0, ["n3"])
        with pytest.raises(OSError, match="No space left"):
            track.remember_pin(True)
        assert not track.stored.pinned, "what is not on disk is not set"
    assert [r.getMessage() for r in caplog.records] == [
        "job=7 event=job-not-kept detail=[Errno 28] No space left on device"
    ]
    assert not Registry(str(tmp_path)).jobs[7].stored.shrunk
    track.record_state("RUNNING", False)
    assert Registry(str(tmp_path)).jobs[7].stored.shrunk == {0: ["n2", "n3"]}


def test_a_job_that_is_forgotten_does_not_come_back(tmp_path: Path) -> None:
    """A recovery that is still looking at it learns once more what Slurm says."""
    registry = Registry(str(tmp_path))
    track = registry.track_job(dataclasses.replace(JOB, raw_id=7))
    registry.drop_job(7)
    track.record_job(dataclasses.replace(JOB, raw_id=7, restarts=1))
    track.record_state("CANCELLED", True)
    track.remember_pin(True)
    assert os.listdir(tmp_path) == []
    registry.track_job(dataclasses.replace(JOB, raw_id=7))
    assert os.listdir(tmp_path) == ["7.job"]
