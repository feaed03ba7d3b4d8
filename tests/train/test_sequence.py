"""Trainings of one name, one after the other in a job: each begins at 0, and a new start finds each in its place."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from gemini_hpc.client.session import RankSession
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.inspect_schema import HeldSlot

from .agents import RealJob
from .launch import Process, environments

pytestmark = pytest.mark.slow

MakeJob = Callable[..., RealJob]
STEPS, DIED = 6, [-signal.SIGKILL] * 2


class Steps:
    """Steps of a job of two ranks on two nodes; without a job they are undisturbed."""

    def __init__(self, job: RealJob | None, directory: Path) -> None:
        self.job, self.log = job, directory / "log"
        self.errors: list[str] = []
        directory.mkdir()

    def begin(self, step: str, *seeds: int, launcher: bool = False, series: str = "", **more: Any) -> list[Process]:
        """Start the ranks of one step."""
        options = json.dumps({"log": str(self.log), "seeds": seeds, "steps": STEPS, **more})
        found = []
        for rank, place in enumerate(environments(2)):
            env = dict(place)
            if self.job is not None:
                env |= {"GEMINI_SOCKET": self.job.nodes[rank].path, "GEMINI_STEP": step}
                env |= {"GEMINI_RESTARTS_STEP": series} if series else {}
            module, words = "tests.train.seeds", [options]
            if launcher:
                module, words = "gemini_hpc.launch", ["-m", module, options]
            found.append(Process(env, module=module, arguments=words))
        return found

    def run(self, step: str, *seeds: int, gone: Sequence[str] = (), **more: Any) -> list[int | None]:
        """Run one step to its end, and return the exit statuses. gone: sets without a copy when ranks die."""
        go = self.log.parent / f"go {step}"
        before = len(self.lines("begins"))
        processes = self.begin(step, *seeds, **more, **({"dies_with": str(go)} if gone else {}))
        try:
            if gone:
                until(lambda: len(self.lines("begins")) == before + len(seeds), 60, what="the last one has begun")
            until(lambda: not any(self.held(name) for name in gone), 60, what=f"{gone} have gone")
            go.touch()
            return [process.wait(60.0) for process in processes]
        finally:
            for process in processes:
                process.signal(signal.SIGKILL)
                process.wait(10.0)
            self.errors += [process.read()[1] for process in processes]

    def lines(self, what: str) -> list[dict[str, Any]]:
        """Return what rank 0 has noted."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line for line in found if line["what"] == what and line["rank"] == 0]

    def held(self, name: str) -> list[HeldSlot]:
        """The slots of a set, on all nodes."""
        assert self.job is not None
        return [slot for node in self.job.nodes for slot in self.job.inspect(node).held if slot.training == name]

    @property
    def begun(self) -> list[tuple[str, int]]:
        """Each training that has begun: its set, and the step at which it did."""
        return [(line["training"], line["step"]) for line in self.lines("begins")]

    @property
    def digests(self) -> list[str]:
        """The final weights of each training that has ended."""
        assert all(line["state"] != "unprotected" for line in self.lines("ends")), self.errors
        return [line["digest"] for line in self.lines("ends")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The final weights with each of three seeds, without agents."""
    steps = Steps(None, tmp_path_factory.mktemp("undisturbed") / "steps")
    assert steps.run("", 1, 2, 3, pause_s=0) == [0, 0], steps.errors
    return [line["digest"] for line in steps.lines("ends")]


@pytest.fixture
def steps(make_agents: MakeJob, tmp_path: Path) -> Steps:
    return Steps(make_agents(2, 2, heartbeat_s=1.0), tmp_path / "steps")


def test_folds_of_one_process(steps: Steps, undisturbed: list[str]) -> None:
    assert steps.run("81.0", 1, 2, 3) == [0, 0], steps.errors
    assert steps.begun == [("default", 0), ("default+1.2", 0), ("default+1.3", 0)]
    assert steps.digests == undisturbed


def test_the_launcher_starts_a_step_again(steps: Steps, undisturbed: list[str]) -> None:
    """It dies between its trainings: the first one has its end, with its weights, and the second begins."""
    assert steps.run("81.0", 1, 2, launcher=True, dies=[1, 0, 0]) == [0, 0], steps.errors
    assert steps.begun == [("default", 0), ("default", STEPS), ("default+1.2", 0)], steps.errors
    assert steps.digests == [undisturbed[0], *undisturbed[:2]]
    told = f"training default was closed at version {STEPS} by an earlier start, and resumes at version {STEPS}"
    assert steps.errors[0].count(told) == 1 and told not in steps.errors[1], steps.errors


@pytest.mark.parametrize("at", [0, 3, -1])
def test_gemini_hpc_run_starts_a_step_again(steps: Steps, undisturbed: list[str], at: int) -> None:
    """The first training of a job is killed, or has just been closed; the next step of the script is another one."""
    assert steps.run("81.0", 1, series="run-1", dies=[0, at, 0]) == DIED, steps.errors
    assert steps.run("81.1", 1, series="run-1") == [0, 0], steps.errors
    assert steps.run("81.2", 2, series="run-2") == [0, 0], steps.errors
    first, again, second = steps.begun if at else [("default", 0), *steps.begun]
    assert first == ("default", 0) and again[0] == "default" and second == ("default+2.1", 0), steps.errors
    assert again[1] == {0: 0, -1: STEPS}.get(at, again[1]) and (at <= 0 or again[1] in (at - 1, at)), steps.errors
    assert steps.digests[-2:] == undisturbed[:2]


def test_requeued_between_two_steps(steps: Steps, undisturbed: list[str]) -> None:
    """A loop over seeds in the batch script: the first step has its end, with its weights, on other nodes, too."""
    assert steps.run("81.0", 1) == [0, 0], steps.errors
    assert steps.run("81.1", 2, dies=[0, 0, 0]) == DIED, steps.errors
    assert steps.job is not None
    steps.job.requeue(["n1", "n7"], "0:15")
    assert steps.run("81.0", 1) == [0, 0], steps.errors
    assert steps.run("81.1", 2) == [0, 0], steps.errors
    assert steps.begun == [("default", 0), ("default", STEPS), ("default+2.1", 0)], steps.errors
    assert steps.digests == [undisturbed[0], *undisturbed[:2]]


def test_requeued_in_the_middle_of_the_second_step(steps: Steps, undisturbed: list[str]) -> None:
    """Nothing is left of the first training: its step ends with success, and the second one goes on."""
    assert steps.run("81.0", 1) == [0, 0], steps.errors
    assert steps.run("81.1", 2, dies=[0, 4, 0], gone=["default"]) == DIED, steps.errors
    assert steps.job is not None
    steps.job.requeue(["n1", "n7"], "0:15")
    assert steps.run("81.0", 1) == [0, 0], steps.errors
    assert f"training default was closed at version {STEPS}, and that version is gone" in steps.errors[-2]
    assert "Ending this step with success" in steps.errors[-2] and "gone" not in steps.errors[-1], steps.errors
    assert steps.run("81.1", 2) == [0, 0], steps.errors
    assert [name for name, _ in steps.begun] == ["default", "default+2.1", "default+2.1"], steps.errors
    assert steps.begun[-1][1] in (3, 4) and steps.digests == undisturbed[:2], (steps.begun, steps.errors)


def test_the_same_with_a_tier(make_agents: MakeJob, tmp_path: Path, undisturbed: list[str]) -> None:
    """What memory has given up is on the tier: the first step has its end, with its weights."""
    (tmp_path / "tier").mkdir()
    steps = Steps(make_agents(2, 2, heartbeat_s=1.0, tier=tmp_path / "tier"), tmp_path / "steps")
    assert steps.job is not None
    assert steps.run("81.0", 1) == [0, 0], steps.errors
    assert steps.run("81.1", 2, dies=[0, 4, 0], gone=["default"]) == DIED, steps.errors
    steps.job.requeue(["n1", "n7"], "0:15")
    assert steps.run("81.0", 1) == [0, 0], steps.errors
    assert steps.begun[0] == ("default", 0) and steps.begun[-1] == ("default", STEPS), (steps.begun, steps.errors)
    assert steps.digests == [undisturbed[0]] * 2, steps.errors
    assert f"resumed at version {STEPS} from the tier" in steps.errors[-2]
    assert steps.run("81.1", 2) == [0, 0], steps.errors
    assert steps.begun[-1][0] == "default+2.1" and steps.begun[-1][1] in (3, 4), (steps.begun, steps.errors)


@pytest.mark.parametrize("names", [[], ["a", "b", "c"]])
def test_what_a_closed_training_keeps(steps: Steps, names: list[str]) -> None:
    """Its last sealed version, once a shard, until the next one has sealed something."""
    one, two, three = names or ["default", "default+1.2", "default+1.3"]
    go = steps.log.parent / "go"
    ranks = steps.begin("81.0", 1, 2, 3, waits=str(go), **({"names": names} if names else {}))
    try:
        until(lambda: steps.log.exists() and len(steps.lines("ends")) == 3, 60, what="all are closed")
        until(lambda: not steps.held(one) and not steps.held(two), 20, what="two have gone")
        until(lambda: len(steps.held(three)) == 4, 20, what="one slot a shard and holder")
        assert steps.job is not None
        assert {slot.stamp for slot in steps.held(three)} == {Stamp(1, STEPS)}
        for node in steps.job.nodes:
            part = steps.job.inspect(node)
            assert part.memory_bytes == sum(slot.bytes for slot in part.held)
            assert node.process is not None
            files = set[str]()
            for file in Path(f"/proc/{node.process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    files.add(os.readlink(file))
            slots = {name: [f for f in files if f.startswith(f"/memfd:gemini:{name}:")] for name in (one, two, three)}
            assert [len(slots[name]) for name in (one, two, three)] == [0, 0, 2], files
    finally:
        go.touch()
        assert [rank.wait(20.0) for rank in ranks] == [0, 0]


def test_a_closed_training_goes_on(steps: Steps, undisturbed: list[str]) -> None:
    """Its step is started again for more iterations: it has two slots a shard again, also when it has died."""
    assert steps.run("81.0", 1, series="run-1") == [0, 0], steps.errors
    until(lambda: len(steps.held("default")) == 4, 20, what="one slot a shard and holder")
    assert steps.run("81.1", 1, series="run-1", steps=STEPS + 4, dies=[0, STEPS + 3, 0]) == DIED, steps.errors
    time.sleep(1.0)  # the agents look a few times a second whether a closed training can be trimmed
    assert steps.begun[-1] == ("default", STEPS) and len(steps.held("default")) == 8, steps.errors
    assert steps.run("81.2", 1, series="run-1", steps=STEPS + 4) == [0, 0], steps.errors
    assert steps.begun[-1][1] in (STEPS + 2, STEPS + 3), (steps.begun, steps.errors)
    assert steps.errors[0].count("gemini-hpc") == 1 and "protected since step" in steps.errors[0], steps.errors
    assert steps.digests[0] == undisturbed[0]


@pytest.mark.parametrize(("version", "end"), [(6, "resumes at version 6"), (5, "resumes at version 5")])
def test_a_resume_says_whether_it_has_the_end(version: int, end: str) -> None:
    """The last version may have had no time to be sealed before close()."""
    said: list[str] = []
    session: Any = SimpleNamespace(
        welcome=SimpleNamespace(closed=6), version=version, _subject="training", name="default", say_once=said.append
    )
    RankSession.report_closed(session)
    assert len(said) == 1 and f"was closed at version 6 by an earlier start, and {end}. If the script" in said[0]


def test_what_has_gone_is_never_begun_anew(steps: Steps) -> None:
    """Three folds in one process without a tier: the launcher can do nothing for the third."""
    gone = ["default", "default+1.2"]
    assert steps.run("81.0", 1, 2, 3, launcher=True, dies=[2, 4, 0], gone=gone) == [1, 1], steps.errors
    assert [name for name, _ in steps.begun] == ["default", "default+1.2", "default+1.3"], steps.errors
    told = f"training default was closed at version {STEPS}, and that version is gone"
    assert (
        told in steps.errors[0] and "Ending this step with status 1: it would begin untrained" in steps.errors[0]
    ), steps.errors


def test_a_step_that_was_not_closed_is_tried_again(steps: Steps, undisturbed: list[str]) -> None:
    """`until srun train.py` in the batch script: nobody says that it is the same step."""
    assert steps.run("81.0", 1, dies=[0, 4, 0]) == DIED, steps.errors
    assert steps.run("81.1", 1) == [0, 0], steps.errors
    assert [name for name, _ in steps.begun] == ["default"] * 2 and steps.begun[1][1] in (3, 4), steps.errors
    assert steps.digests == undisturbed[:1]


def test_closed_on_one_rank_only(steps: Steps) -> None:
    """The next training begins at 0 all the same, without protection, and a line says why."""
    assert steps.run("81.0", 1, 2, closes=[0]) == [0, 0], steps.errors
    assert [step for _, step in steps.begun] == [0, 0] and steps.lines("begins")[1]["state"] == "unprotected"
    assert "rank 1 did not call close() on the training before this one, other ranks did" in steps.errors[0]


def test_resume_forgotten(steps: Steps, undisturbed: list[str]) -> None:
    """What is in memory stays as it is, until a start that calls `resume()`."""
    assert steps.run("81.0", 1, dies=[0, 5, 0]) == DIED, steps.errors
    assert steps.run("81.1", 1, dies=[0, 4, 0], resumes=False) == DIED, steps.errors
    told = "resume() was not called before the first step(), but there is version"
    assert [error.count(told) for error in steps.errors[2:]] == [1, 0], steps.errors
    assert [step for _, step in steps.begun] == [0, 0]
    assert steps.run("81.2", 1) == [0, 0], steps.errors
    assert steps.begun[-1][1] in (4, 5) and steps.digests == undisturbed[:1], steps.errors


def test_another_name_in_each_start(steps: Steps) -> None:
    """A name from the clock: what the last start has left is named."""
    assert steps.run("81.0", 1, names=["at-1001"], dies=[0, 4, 0]) == DIED, steps.errors
    assert steps.run("81.1", 1, 2, names=["at-1002", "at-1001"]) == [0, 0], steps.errors
    assert [name for name, _ in steps.begun] == ["at-1001", "at-1002", "at-1001"] and steps.begun[1][1] == 0
    told = "training at-1002 begins anew, but the job has version "
    assert [error.count(told) for error in steps.errors[2:]] == [1, 0], steps.errors
    assert "of training at-1001: to resume that, pass the same name= at each start" in steps.errors[2]
    assert steps.begun[2][1] in (3, 4) and "begins anew" not in steps.errors[2].replace(told, ""), steps.errors


def test_a_last_version_that_is_never_sealed_does_not_stay(steps: Steps) -> None:
    """One rank saves no last version, so nobody needs what the others have of it."""
    go = steps.log.parent / "go"
    ranks = steps.begin("81.0", 1, lags=1, waits=str(go))
    try:
        until(lambda: steps.log.exists() and len(steps.lines("ends")) == 1, 60, what="it is closed")
        until(lambda: len(steps.held("default")) == 4, 20, what="one slot a shard and holder")
        (stamp,) = {slot.stamp for slot in steps.held("default")}
        assert stamp is not None and stamp.version < STEPS
    finally:
        go.touch()
        assert [rank.wait(20.0) for rank in ranks] == [0, 0]
