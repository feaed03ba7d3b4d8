"""Hugging Face's Trainer on two ranks: killed in mid-epoch, it goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .recovery import OWN, Recovery, Start

pytestmark = pytest.mark.slow

STEPS = 24  # an epoch has 9
HF: dict[str, Any] = {"stack": "huggingface", "steps": STEPS}


@pytest.mark.witness("Hugging Face's Trainer goes on in mid-epoch as if nothing had been")
def test_a_node_is_lost(recovery: Recovery) -> None:
    """Logs, evaluations, a callback's state and the final loss included."""
    recovery.comes_back(13, lose=["n2"], **HF)


@pytest.mark.long
@pytest.mark.parametrize("step", [8, 9, 10, 17, 18])
def test_around_the_end_of_an_epoch(recovery: Recovery, step: int) -> None:
    recovery.comes_back(step, **HF)


def test_lora(recovery: Recovery) -> None:
    recovery.comes_back(13, lose=["n2"], peft=True, **HF)


def test_another_batch_size_is_named(recovery: Recovery) -> None:
    """Trainer counts batches."""
    recovery.killed_at(5, **HF)
    run = recovery.start(recovery.job, **recovery._own({**HF, "batch": 4, "steps": 12}), seed=9)
    run.wait()
    assert "the loader was captured with batch_size 4, now 8" in run.stderr[0]


@pytest.mark.long
@pytest.mark.parametrize("order", [{"sampling": "group_by_length"}, {"unseeded": True}], ids=["lengths", "unseeded"])
def test_an_order_that_only_a_generator_knows(recovery: Recovery, order: dict[str, Any]) -> None:
    """It is drawn when the epoch begins, from a generator that goes on from epoch to epoch."""
    recovery.comes_back(13, **order, **HF)


@pytest.mark.long
def test_workers_read(recovery: Recovery) -> None:
    """What they draw begins anew, so the data must not be random: see the docs."""
    recovery.comes_back(13, workers=1, still=True, **HF)


@pytest.mark.long
def test_memory_goes_before_an_older_checkpoint_on_disk(recovery: Recovery) -> None:
    recovery.comes_back(13, from_disk=True, save="steps", **HF)


@pytest.mark.long
def test_a_checkpoint_on_disk_where_memory_has_nothing(start: Start, tmp_path: Path) -> None:
    """By Trainer's own rules, at its own place in the epoch."""
    options = {**HF, "still": True, "save": "steps", "from_disk": True, "directory": str(tmp_path / "d")}
    start(None, **{**options, "steps": 13}).wait()
    plain = start(None, **{**options, "directory": str(tmp_path / "e"), "without": True, "steps": 13}).wait()
    assert plain[0]["start"] == 0
    ours = start(None, **options).wait()
    plain = start(None, **{**options, "directory": str(tmp_path / "e"), "without": True}).wait()
    assert [r["start"] for r in [*ours, *plain]] == [13] * 4
    assert [r["losses"] for r in ours] == [r["losses"] for r in plain]


def test_without_an_agent_it_is_the_plain_trainer(start: Start, tmp_path: Path) -> None:
    """One line on stderr; the same batches in the same order, the same losses."""
    options = {**HF, "still": True}
    plain = start(None, **options, without=True, directory=str(tmp_path / "a")).wait()
    run = start(None, **options, directory=str(tmp_path / "b"))
    ours = run.wait()
    for a, b in zip(plain, ours, strict=True):
        assert a["losses"] == b["losses"]
        assert {k: a[k] for k in a.keys() - OWN} == {k: b[k] for k in b.keys() - OWN}
        assert b["report"]["state"] == "unprotected"
    said = [line for err in run.stderr for line in err.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: no agent here" in said[0], said


def test_a_missing_package_is_named(start: Start) -> None:
    run = start(None, world=1, missing=["transformers"], **HF)
    with pytest.raises(AssertionError, match="ended with 1"):
        run.wait()
    assert "needs transformers and accelerate: pip install transformers accelerate" in run.stderr[0]


def test_a_training_that_is_not_the_same_again_is_told_of(recovery: Recovery) -> None:
    run = recovery.start(recovery.job, auto=True, directory=str(recovery.directory), **{**HF, "steps": 4})
    assert all("report" not in told and len(told["losses"]) == 4 for told in run.wait())
    said = [line for err in run.stderr for line in err.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: with auto_find_batch_size" in said[0], said


def test_a_mixin_behind_trainer_is_refused(start: Start, tmp_path: Path) -> None:
    run = start(None, world=1, behind=True, directory=str(tmp_path), **HF)
    with pytest.raises(AssertionError, match="ended with 1"):
        run.wait()
    assert "TypeError: GeminiMixin has to come before Trainer: class Wrong(GeminiMixin, Trainer)" in run.stderr[0]
