"""What the families share: their options, the clusters they measure on and the jobs they run there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.progress import Progress
from gemini_hpc.devcluster.cluster import Cluster

USER = "alice"
USER_UID = 5001
PYTHON = "/opt/gemini-hpc/venv/bin/python"
_PROGRAMS = Path(__file__).with_name("programs")
_BESIDE = ("savers.py",)  # what programs import of each other
_OVER = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
TINY_GB = 0.01
Line = dict[str, Any]
S = TypeVar("S")
T = TypeVar("T")


class MeasureError(Exception):
    """A figure could not be measured; the message says why."""


@dataclass(frozen=True)
class Options:
    """The options of the command line. runs 0: each family's own number. tiny: only show that it runs."""

    runs: int
    gb: float
    progress: Progress
    tiny: bool = False

    def count(self, usual: int) -> int:
        """How often to measure."""
        return self.runs or usual

    def pick(self, usual: T, tiny: T) -> T:
        """Return the full or the tiny value, as this run needs it."""
        return tiny if self.tiny else usual

    def each(self, usual: Iterable[S], tiny: S, run: Callable[[S], T]) -> Iterator[tuple[S, T]]:
        """Return the rows of `run` for each set-up; in a tiny run the rows of one stand for all."""
        shared = [run(tiny)] if self.tiny else []
        for setup in usual:
            yield setup, shared[0] if shared else run(setup)

    @property
    def state_bytes(self) -> int:
        """Training state of one rank."""
        return int(self.gb * 1e9)


@contextmanager
def cluster(nodes: int, **more: Any) -> Iterator[Cluster]:
    """A development cluster of this process's own, down again at the end."""
    with Cluster.bring_up(f"bench{os.getpid()}", nodes=nodes, **more) as up:
        yield up


def directory(on: Cluster, *programs: str) -> Path:
    """A new directory of the user's, with these programs in it; the same path inside the cluster."""
    made = on.locate_home(USER) / f"bench-{time.time_ns()}"
    made.mkdir()
    shutil.chown(made, USER_UID)
    for name in programs:
        shutil.copy(_PROGRAMS / name, made / name)
        (made / name).chmod(0o644)
    return made


def program(timeout_s: float, name: str, *words: object) -> list[Line]:
    """Run a program on this machine, in no cluster, and return the JSON objects that it prints.

    Raises:
        MeasureError: It fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, str(_PROGRAMS / name), *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(_PROGRAMS.parents[1])},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MeasureError(f"{name} has not ended within {timeout_s:g} s") from None
    if done.returncode:
        raise MeasureError(f"{name} failed: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def wait_for(what: str, true: Callable[[], object], timeout_s: float, every_s: float = 0.05) -> None:
    """Poll until `true()` is. Raises MeasureError."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise MeasureError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(every_s)


class TrainingJob:
    """A program that trains, as a batch job."""

    def __init__(
        self,
        on: Cluster,
        nodes: int,
        replicas: int,
        arguments: list[str],
        program: str = "trainer.py",
        *,
        tasks: int = 1,
        exclude: str = "",
        beside: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """replicas 0: an unprotected job. program: one of `programs/`. tasks: ranks on each node. exclude: a node
        that is for something else. beside: programs that it imports. options: of sbatch, besides."""
        self.cluster = on
        self.directory = directory(on, program, *_BESIDE, *beside)
        script = self.directory / "job.sh"
        words = " ".join([PYTHON, f"{self.directory}/{program}", "--out", f"{self.directory}/rank", *arguments])
        script.write_text(f"#!/bin/bash\nsrun {words}\n")
        script.chmod(0o755)
        protect = [f"--gemini-replicas={replicas}"] if replicas else []
        protect += [f"--exclude={exclude}"] if exclude else []
        self.id = on.submit_job(
            [
                "--no-requeue",
                "--exclusive",  # a job's share of the memory for replicas is that of its CPUs
                f"-N{nodes}",
                f"--ntasks-per-node={tasks}",
                f"--output={self.directory}/out",
                *protect,
                *options,
                str(script),
            ],
            user=USER,
        )

    def lines(self, what: str = "") -> list[Line]:
        """What the ranks have written so far, rank by rank."""
        found: list[Line] = []
        for path in sorted(self.directory.glob("rank.*")):
            text = path.read_text()
            found += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in found if not what or line["what"] == what]

    @property
    def state(self) -> str:
        """The job's state in Slurm."""
        return self.cluster.read_job(self.id).get("JobState", "UNKNOWN")

    def hosts(self) -> list[str]:
        """The job's nodes."""
        nodelist = self.cluster.read_job(self.id)["NodeList"]
        return self.cluster.run(["scontrol", "show", "hostnames", nodelist]).stdout.split()

    def check(self) -> str:
        """The job's state. Raises MeasureError with the job's output if it has failed."""
        state = self.state
        if state in _OVER:
            out = self.directory / "out"
            text = out.read_text()[-3000:] if out.exists() else ""
            raise MeasureError(f"job {self.id} ended as {state}\n{text}")
        return state

    def wait_line(self, what: str, ranks: int, timeout_s: float) -> list[Line]:
        """Wait until each of the ranks has written such a line."""

        def there() -> bool:
            self.check()
            return len({line["rank"] for line in self.lines(what)}) >= ranks

        wait_for(f"job {self.id}: {what} on {ranks} ranks", there, timeout_s, 0.1)
        return self.lines(what)

    def finish(self, timeout_s: float, meanwhile: Callable[[], None], every_s: float = 0.3) -> None:
        """Wait for the job's success; `meanwhile` is called every every_s. Each look at the job takes some 30 ms of a
        core: look rarely where iterations are timed. A job that does not succeed is cancelled.
        Raises MeasureError also where a rank was not protected to the end."""

        def over() -> bool:
            meanwhile()
            return self.check() == "COMPLETED"

        try:
            wait_for(f"job {self.id} completes", over, timeout_s, every_s)
        except BaseException:
            self.cancel()
            raise
        unhappy = [line for line in self.lines("report") if line["state"] != "protected"]
        if unhappy:
            raise MeasureError(f"job {self.id} did not stay protected: {unhappy}")

    def cancel(self) -> None:
        """End it."""
        self.cluster.run(["scancel", str(self.id)])
