"""Calls that some ranks come to late, and trainings on a part of the world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from waiting import until

from gemini_hpc.train import arguments, meeting

from .agents import RealJob
from .fake_agent import FakeJob
from .launch import Run

MakeJob = Callable[[int, int], FakeJob]
TRAINS = [1, 2]  # of four


def run(directory: Path, job: Any, world: int, **options: Any) -> Run:
    directory.mkdir(exist_ok=True)
    for left in directory.iterdir():
        left.unlink()
    given = {"program": "tests.train.part_program", "trains": None, "tell_s": 60.0, "steps": 4}
    return Run(job, world, {**given, "directory": str(directory), **options})


def finish(training: Run, directory: Path) -> list[dict[str, Any]]:
    """Let the ranks go, once those that train have ended."""
    ranks = TRAINS if len(training.processes) == 4 else range(len(training.processes))
    files = [directory / f"ended.{rank}" for rank in ranks]
    until(lambda: all(file.exists() for file in files), 60, what="the ranks that train have ended")
    (directory / "over").touch()
    return training.wait()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["Checkpointer()", "resume()", "step()"])
def test_ranks_that_wait_for_another_say_so(tmp_path: Path, make_job: MakeJob, call: str) -> None:
    directory = tmp_path / "run"
    training = run(directory, make_job(3, 1), 3, late={call: 1}, tell_s=0.5)

    def said() -> str:
        return "".join(process.read()[1] for process in training.processes)

    line = f"ranks 0, 2 have waited 0.5 s in {call} for rank 1: the training stands still until all ranks"
    until(lambda: line in said(), 60, what="the line")
    (directory / "go").touch()
    results = finish(training, directory)
    assert said().count("have waited") == 1, "one rank says it for all"
    assert said().count(f"all ranks are in {call} now") == 1
    assert {r["report"]["state"] for r in results} == {"protected"}


@pytest.mark.slow
def test_without_an_agent_too(tmp_path: Path) -> None:
    """It is the same mistake, and found where the script is tried out."""
    directory = tmp_path / "run"
    training = run(directory, None, 2, late={"Checkpointer()": 1}, tell_s=0.5)
    until(lambda: "rank 0 has waited" in training.processes[0].read()[1], 60, what="the line")
    (directory / "go").touch()
    finish(training, directory)


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, True])
def test_a_part_of_the_world_trains(
    tmp_path: Path, make_job: MakeJob, real_job: Callable[[int, int], RealJob], real: bool
) -> None:
    """The others call nothing, for as long as the training lasts. It is killed, loses a node, and goes on."""
    directory = tmp_path / "run"
    undisturbed = finish(run(directory, None, 4, trains=TRAINS, steps=9), directory)
    job: Any = real_job(2, 2) if real else make_job(2, 2)
    first = run(directory, job, 4, trains=TRAINS, steps=9, die_at=6)
    until(lambda: first.processes[1].poll() is not None and first.processes[2].poll() is not None, 60, what="death")
    (directory / "over").touch()
    first.wait(codes=(0, 1))
    if real:
        job.requeue(["n1", "n9"])
    else:
        job.requeue(lost=(1,))
    again = finish(run(directory, job, 4, trains=TRAINS, steps=9, seed=5), directory)
    for rank in TRAINS:
        told = again[rank]
        assert (told["start"], told["peeked"]) == (6, 6)
        assert (told["report"]["rank"], told["report"]["world"]) == (TRAINS.index(rank), 2)
        assert told["report"]["state"] == "protected" and told["report"]["sealed"][1] == 9
        assert told["digest"] == undisturbed[rank]["digest"]


@pytest.mark.slow
def test_a_part_of_the_world_with_one_replica(tmp_path: Path, make_job: MakeJob) -> None:
    directory = tmp_path / "run"
    results = finish(run(directory, make_job(2, 1), 4, trains=TRAINS), directory)
    assert {results[rank]["report"]["state"] for rank in TRAINS} == {"protected"}


def test_a_group_of_others_is_refused() -> None:
    with pytest.raises(ValueError, match="one that this rank is not in: make the Checkpointer only on"):
        arguments.build_ranks(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(TypeError, match=r"process_group is a list, wanted a torch\.distributed\.ProcessGroup"):
        arguments.build_ranks([0, 1])
    with pytest.raises(ValueError, match=r"unknown to torch\.distributed: make it with"):
        arguments.build_ranks(dist.ProcessGroup(HashStore(), 0, 1))


def test_many_ranks_in_words() -> None:
    assert meeting._name_ranks([3]) == "rank 3"
    assert meeting._name_ranks(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
