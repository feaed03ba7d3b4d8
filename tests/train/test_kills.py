"""Kills at random moments while the copies travel in the idle spans: nothing is lost, at most one step is repeated,
and the losses are those of the uninterrupted training, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from .fake_agent import FakeJob
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[[int, int], FakeJob]

# An iteration of some 60 ms, half of it idle; the copies need a good part of that.
TRAINING: dict[str, Any] = {"kind": "fsdp2", "width": 128, "compute_s": 0.003, "rate": 2e7}
# A busy machine must not make the optimizer go on without a seal: then more than one step would be repeated.
KWARGS = {"chunk_bytes": 1 << 15, "every": 1, "seal_timeout_s": 20.0}
STEPS_BETWEEN = (3, 14)


def lines(log: Path) -> list[tuple[int, int, str]]:
    """(resumed from, step, loss) of each completed step() of a rank, over all incarnations."""
    if not log.exists():
        return []
    text = log.read_text()
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(int(start), int(step), loss) for start, step, loss in rows]


def newest(logs: list[Path]) -> int:
    """The last step that a rank has completed."""
    return max((step for log in logs for _, step, _ in lines(log)), default=0)


def reach(run: Run, logs: list[Path], step: int) -> None:
    """Wait until the training is there."""

    def there() -> bool:
        assert all(p.poll() is None for p in run.processes), [p.read() for p in run.processes]
        return newest(logs) >= step

    until(there, every_s=0.01, what=f"step {step}")


def campaign(job: FakeJob, tmp_path: Path, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    logs = [tmp_path / f"log.{rank}" for rank in range(2)]
    options = {**TRAINING, "kwargs": KWARGS, "log": str(tmp_path / "log")}
    for number in range(kills):
        run = Run(job, 2, {**options, "steps": 100_000})
        first = dice.randrange(2)
        try:
            before = newest(logs)
            # the first incarnation has to make its profile first; the later ones find it
            reach(run, logs, before + (60 if number == 0 else dice.randint(*STEPS_BETWEEN)))
            time.sleep(dice.random() * 0.12)  # anywhere in an iteration
            run.processes[first].signal(signal.SIGKILL)
            time.sleep(dice.choice([0.0, 0.0, dice.random() * 0.05]))
        finally:
            for process in run.processes:
                process.signal(signal.SIGKILL)
                process.wait(10.0)
        lost = dice.choice([(), (first,), (1 - first,)])
        stamp = job.requeue(lost)
        completed = newest(logs)
        assert stamp is not None, f"kill {number}: nothing is left, {completed} steps were complete, lost {lost}"
        assert completed - stamp.version <= 1, f"kill {number}: back to {stamp} from {completed}, lost {lost}"
    last = newest(logs) + 5
    results = train(job, 2, **{**options, "steps": last})
    reference = train(None, 2, **{**TRAINING, "compute_s": 0.0, "steps": last})
    for rank, log in enumerate(logs):
        for start, step, loss in lines(log):
            assert loss == reference[rank]["losses"][str(step)], f"rank {rank}, resumed from {start}, step {step}"
    assert [r["digest"] for r in results] == [r["digest"] for r in reference]


@pytest.mark.alone
def test_five_kills(make_job: MakeJob, tmp_path: Path) -> None:
    campaign(make_job(2, 2), tmp_path, kills=5, seed=int(os.environ.get("GEMINI_SEED", "1")))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_kills(make_job: MakeJob, tmp_path: Path, seed: int) -> None:
    campaign(make_job(2, 2), tmp_path, kills=100, seed=seed)
