"""A training that finds what it has loaded bad: `Checkpointer.reject`, beside real agents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.tier import names, version
from gemini_hpc.tier.find import find

from .agents import RealJob
from .launch import Run, train
from .test_keep import SLOW

pytestmark = pytest.mark.slow

STEPS = 24
OPTIONS = {"kind": "ddp", "steps": STEPS, "kwargs": {"transport": "host", "seal_timeout_s": 3.0}}
SEALED: dict[str, Any] = {
    "pause_sealed": True,
    "pause_s": 0.2,
}  # what was made last is sealed, and nothing newer begun
MakeJob = Callable[..., RealJob]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Digests of the final state of a training without us."""
    return [r["digest"] for r in train(None, 2, kind="ddp", steps=STEPS)]


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


def run(job: RealJob, **more: Any) -> Run:
    return Run(job, 2, {**OPTIONS, **more})  # type: ignore[arg-type]


def left(job: RealJob, tier: Path | None = None) -> None:
    """A training that has died at 12, when that was sealed and nothing newer was begun: 11 is in memory, too, and 5
    is on the tier."""
    at = f"{tier}/gemini-81/default"
    more: dict[str, Any] = {**SLOW, "keep": {"5": "five"}, "kept_at_once": at} if tier is not None else {}
    run(job, **more, pause_at=12, **SEALED, die_at=12).wait(codes=(1,))
    if tier is not None:
        assert names.find_training_names(at)["five"][1].version == 5, "a later one, where the tier is slow"


def events(job: RealJob, name: str) -> list[str]:
    logs = "".join(node.log() for node in job.all.values())
    return [line for line in logs.splitlines() if f" event={name} " in line]


def notes(job: RealJob) -> str:
    return job.inspect(job.nodes[0]).trainings[0].note


def test_the_version_before_is_in_memory(real_job: MakeJob, undisturbed: list[str]) -> None:
    """In place, after an optimizer step with what was loaded: parameters, buffers, moments, generators, loader."""
    job = real_job(2, 2)
    left(job)
    job.requeue(["n1", "n2"])
    training = run(job, reject_first=1)
    results = training.wait()
    assert [(r["rejected"], r["start"]) for r in results] == [([12], 11)] * 2
    assert [r["digest"] for r in results] == undisturbed
    assert all(r["report"]["state"] == "protected" and r["report"]["sealed"][1] >= STEPS - 1 for r in results)
    assert "version 12 is rejected: the loss is NaN" in training.stderr[0]
    assert "version 12 was rejected: the loss is NaN" in notes(job)
    assert all(" version=12 " in line for line in events(job, "rejected")) and len(events(job, "rejected")) == 2


def test_then_the_tier(real_job: MakeJob, tier: Path, undisturbed: list[str]) -> None:
    job = real_job(2, 2, tier=tier)
    left(job, tier)
    job.requeue(["n1", "n2"])
    results = run(job, reject_first=2).wait()
    assert [(r["rejected"], r["start"]) for r in results] == [([12, 11], 5)] * 2
    assert [r["digest"] for r in results] == undisturbed


def test_three_are_rejected_and_not_more(real_job: MakeJob, tier: Path, undisturbed: list[str]) -> None:
    """Memory, memory, what was trained from the tier; then the tier serves once more, and nobody else is rejected."""
    job = real_job(2, 2, tier=tier)
    left(job, tier)
    job.requeue(["n1", "n2"])
    run(job, reject_first=2, pause_at=16, **SEALED, die_at=16).wait(codes=(1,))
    job.requeue(["n1", "n2"])
    again = run(job, reject_at=20, sealed_until=20)  # of what stood before 16 nothing is left in memory
    again.wait(codes=(75,))
    assert "version 16 is rejected (the loss is NaN)" in again.stderr[0]
    job.requeue(["n1", "n2"])
    last = run(job, reject_first=1)
    last.wait(codes=(1,))
    assert "3 earlier versions were rejected too, so the fault may lie elsewhere" in last.stderr[0]
    assert "no version is left to resume from" not in last.stderr[1], "one rank says so"
    job.requeue(["n1", "n2"])
    results = run(job).wait()
    starts = {r["start"] for r in results}
    assert starts in ({5}, {6}), "6 is what has been trained before the fourth was refused; it may be sealed"
    assert [r["digest"] for r in results] == undisturbed


def test_after_some_steps_the_next_launch_takes_the_older_one(
    real_job: MakeJob, tier: Path, undisturbed: list[str]
) -> None:
    """What came of the rejected version goes with it, in memory and on the tier; also when all agents die then."""
    job = real_job(2, 2, tier=tier)
    left(job, tier)
    job.requeue(["n1", "n2"])
    run(job, **SLOW, reject_at=18, keep={"15": "bad"}, pause_at=16, pause_kept=f"{tier}/gemini-81/default").wait(
        codes=(75,)
    )
    for node in job.nodes:
        node.die()
        node.start(again=True)
    job.requeue(["n1", "n2"])
    results = run(job).wait()
    assert [r["start"] for r in results] == [5, 5]
    assert [r["digest"] for r in results] == undisturbed
    known = names.find_training_names(f"{tier}/gemini-81/default")
    assert version.is_rejected(f"{tier}/gemini-81/default", known["bad"][1])
    assert not version.is_rejected(f"{tier}/gemini-81/default", known["five"][1])
    assert find(f"{tier}/gemini-81")[1].stamp[1] == 5, "who starts from there passes it over"


def test_a_node_that_knows_is_lost(real_job: MakeJob, undisturbed: list[str]) -> None:
    job = real_job(2, 2)
    left(job)
    job.requeue(["n1", "n2"])
    run(job, reject_first=1, pause_at=14, **SEALED, die_at=14).wait(codes=(1,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = run(job).wait()
    assert [r["start"] for r in results] == [14, 14] and [r["digest"] for r in results] == undisturbed
    assert all("version 12 was rejected" in job.inspect(node).trainings[0].note for node in job.nodes)


def test_all_nodes_are_lost_and_the_tier_knows(real_job: MakeJob, tier: Path, undisturbed: list[str]) -> None:
    job = real_job(2, 2, tier=tier)
    left(job, tier)
    job.requeue(["n1", "n2"])
    run(job, **SLOW, reject_at=18, keep={"15": "bad"}, pause_at=16, pause_kept=f"{tier}/gemini-81/default").wait(
        codes=(75,)
    )
    job.requeue(["n1", "n2"])  # and looks at the tier
    job.requeue(["n3", "n4"])
    results = run(job).wait()
    assert [r["start"] for r in results] == [5, 5]
    assert [r["digest"] for r in results] == undisturbed


def test_nothing_is_left(real_job: MakeJob) -> None:
    """The launch ends, and so does each one after it, until somebody says that it may begin anew."""
    job = real_job(2, 2)
    left(job)
    job.requeue(["n1", "n2"])
    training = run(job, reject_first=2)
    training.wait(codes=(1,))
    said = "no version is left to resume from: version 11 was rejected: the loss is NaN; version 12 was rejected"
    assert said in training.stderr[0] and "Traceback" not in "".join(training.stderr)
    job.requeue(["n1", "n2"])
    training = run(job)
    training.wait(codes=(1,))
    assert said in training.stderr[0]


def test_it_may_begin_anew(real_job: MakeJob, undisturbed: list[str]) -> None:
    job = real_job(2, 2)
    left(job)
    job.requeue(["n1", "n2"])
    training = run(job, reject_first=2, fresh=True)
    training.wait(codes=(75,))
    assert "no version is left, and the training may start over" in training.stderr[0]
    job.requeue(["n1", "n2"])
    results = run(job).wait()
    assert [r["start"] for r in results] == [0, 0]
    assert [r["digest"] for r in results] == undisturbed


def test_one_rank_alone_hears_of_it(real_job: MakeJob) -> None:
    job = real_job(2, 2)
    left(job)
    job.requeue(["n1", "n2"])
    training = run(job, reject_at=15, rejecters=[1], meet_s=1.0)
    training.wait(codes=(1,))
    assert "reject() is collective: rank 0 did not call it within 1 s" in training.stderr[1]
    assert not events(job, "rejected")


@pytest.mark.parametrize("fresh", [False, True])
def test_where_nothing_was_loaded(real_job: MakeJob, fresh: bool) -> None:
    job = real_job(2, 2)
    training = run(job, reject_first=1, fresh=fresh)
    training.wait(codes=(75 if fresh else 1,))
    said = "the training may start over" if fresh else "no version is left to resume from: the loss is NaN; nothing"
    assert said in training.stderr[0]
