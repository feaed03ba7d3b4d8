"""PyTorch Lightning on two ranks: killed in mid-epoch, `fit()` goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .recovery import OWN, Recovery, Start

pytestmark = pytest.mark.slow

STEPS = 24  # an epoch has 17 batches, which are 9 steps; validation after each fourth batch
PL: dict[str, Any] = {"stack": "lightning", "steps": STEPS}


def test_a_node_is_lost(recovery: Recovery) -> None:
    """No hook of a callback is called twice or left out, validation included."""
    recovery.comes_back(13, lose=["n2"], **PL)


@pytest.mark.long
@pytest.mark.parametrize("step", [8, 9, 10, 12, 14, 18])
def test_around_a_validation_and_the_end_of_an_epoch(recovery: Recovery, step: int) -> None:
    recovery.comes_back(step, **PL)


@pytest.mark.long
def test_a_scheduler_that_waits_for_validation(recovery: Recovery) -> None:
    """ReduceLROnPlateau by steps: it moves after the validation that a restored loop must not do twice."""
    recovery.comes_back(14, plateau=True, **PL)


@pytest.mark.long
def test_epochs_instead_of_steps(recovery: Recovery) -> None:
    recovery.comes_back(13, lose=["n2"], epochs=3, **{**PL, "steps": 27})


@pytest.mark.long
def test_workers_read(recovery: Recovery) -> None:
    """What they draw begins anew, so the data must not be random: see the docs."""
    recovery.comes_back(13, workers=1, still=True, **PL)


@pytest.mark.long
def test_memory_goes_before_an_older_checkpoint_on_disk(recovery: Recovery) -> None:
    """The script passes ckpt_path where there is a file, as scripts that are requeued do."""
    recovery.comes_back(14, save=True, **PL)


def test_without_an_agent_it_is_the_plain_fit(start: Start, tmp_path: Path) -> None:
    plain = start(None, **PL, without=True, directory=str(tmp_path / "a")).wait()
    run = start(None, **PL, directory=str(tmp_path / "b"))
    ours = run.wait()
    for a, b in zip(plain, ours, strict=True):
        assert a["losses"] == b["losses"]
        assert {k: a[k] for k in a.keys() - OWN} == {k: b[k] for k in b.keys() - OWN}
        assert b["report"]["state"] == "unprotected"
    said = [line for err in run.stderr for line in err.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "not protected: no agent here" in said[0], said


def test_what_a_module_adds_to_a_checkpoint_is_named(recovery: Recovery) -> None:
    run = recovery.start(recovery.job, adds=True, directory=str(recovery.directory), **{**PL, "steps": 4})
    run.wait()
    assert run.stderr[0].count("what Adding.on_save_checkpoint adds is not captured") == 1


def test_another_batch_size_in_mid_epoch_is_told(recovery: Recovery) -> None:
    """The loader counts samples, the loops of Lightning batches."""
    recovery.killed_at(5, **PL)
    run = recovery.start(recovery.job, **recovery._own({**PL, "batch": 1, "steps": 12}), seed=9)
    run.wait()
    assert run.stderr[0].count("Lightning counts batches") == 1


def test_a_loader_without_a_position_is_named(recovery: Recovery) -> None:
    run = recovery.start(recovery.job, loader="torch", directory=str(recovery.directory), **{**PL, "steps": 4})
    assert [r["report"]["versions"] for r in run.wait()] == [{}, {}]
    said = [line for err in run.stderr for line in err.splitlines() if "gemini-hpc" in line]
    assert len(said) == 1 and "its loader is a DataLoader" in said[0] and "StatefulLoader" in said[0], said


def test_a_missing_package_is_named(start: Start) -> None:
    run = start(None, world=1, missing=["lightning.pytorch"], **PL)
    with pytest.raises(AssertionError, match="ended with 1"):
        run.wait()
    assert "needs lightning: pip install lightning" in run.stderr[0]
