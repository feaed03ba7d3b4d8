"""Trainings that are MPI jobs: `transport="mpi"` end to end, under Open MPI and MPICH, and where it cannot be had."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from waiting import until

from gemini_hpc.wire import local

from .agents import RealJob
from .fake_agent import FakeJob
from .launch import Run, train
from .transport_teams import MPICH, OPENMPI, Mpi, end, lacking

pytestmark = pytest.mark.slow

STEPS = 40
TRAINING: dict[str, Any] = {"kind": "ddp", "steps": STEPS}
# Longer than any pause of a busy machine: no version is given up here.
KWARGS: dict[str, Any] = {"transport": "mpi", "every": 1, "seal_timeout_s": 20.0}
START_S, END_S = 90.0, 60.0
MakeJob = Callable[[int, int], FakeJob]


class MpiRun:
    """Two ranks started by mpiexec, one on each node of the job."""

    program = "tests.train.mpi_job"
    kwargs: ClassVar = KWARGS

    def __init__(self, mpi: Mpi, job: FakeJob, options: dict[str, Any], mpiexec: Sequence[str] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mpi-"))
        how = {
            "level": "multiple",
            "directory": str(self.directory),
            "sockets": [node.path for node in job.nodes],
            "step": f"1.{job.restart}",
            **options.get("mpi", {}),
        }
        packed = json.dumps({**TRAINING, "kwargs": self.kwargs, **options, "mpi": how})
        with (self.directory / "mpiexec").open("wb") as out:
            self._process = mpi.launch(
                self.directory, options.get("ranks", len(job.nodes)), [self.program, packed], out, mpiexec
            )

    def pid(self, rank: int) -> int:
        path = self.directory / f"pid.{rank}"
        return int(until(lambda: path.exists() and path.read_text(), START_S))

    def wait(self, timeout_s: float = START_S + END_S) -> int | None:
        """mpiexec's exit code; None where it has not ended."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def words(self, name: str, rank: int | None = None) -> str:
        path = self.directory / (name if rank is None else f"{name}.{rank}")
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self) -> str:
        return "\n".join(self.words(p.name) for p in sorted(self.directory.glob("[eom]*")) if p.is_file())

    def result(self, rank: int) -> dict[str, Any]:
        out = self.words("out", rank)
        at = out.rfind('{"rank"')
        assert at >= 0, self.said()
        found: dict[str, Any] = json.JSONDecoder().raw_decode(out[at:])[0]
        return found

    def close(self) -> None:
        end(self._process)
        for path in self.directory.glob("pid.*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def start() -> Iterator[Callable[..., MpiRun]]:
    runs: list[MpiRun] = []

    def make(*args: Any, **kwargs: Any) -> MpiRun:
        runs.append(MpiRun(*args, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture(params=[OPENMPI, MPICH], ids=lambda mpi: mpi.name)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    if what := lacking(request.param.name):
        pytest.fail(what, pytrace=False)
    found: Mpi = request.param
    return found


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    return train(None, 2, **TRAINING)


def transports(job: FakeJob) -> set[str]:
    """Over what the copies travel, as the agents were told."""
    return {m.state.transport for m in job.told if isinstance(m, local.Traffic)}


def copies(job: FakeJob, rank: int) -> list[bytes]:
    """The newest sealed version of a shard, as each node has it."""
    assert job.sealed is not None
    found = []
    for node in job.nodes:
        held = node.held[rank]
        index = held.pair.find(job.sealed)
        assert index is not None
        found.append(os.pread(held.fds[index], held.pair.slots[index].bytes_used, 0))
    return found


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_version_travels_over_mpi_and_changes_nothing(
    mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun], undisturbed: list[dict[str, Any]]
) -> None:
    job = make_job(2, 2)
    run = start(mpi, job, {"sleep_s": 0.02})  # an epoch begins while steps go on
    assert run.wait() == 0, run.said()
    results = [run.result(rank) for rank in (0, 1)]
    for key in ("losses", "digest"):
        assert [r[key] for r in results] == [r[key] for r in undisturbed]
    versions = [s.version for s in job.seals]
    assert len(versions) > 1 and versions == list(range(versions[0], STEPS + 1)), versions
    for r in results:
        report = r["report"]
        assert report["state"] == "protected" and not report["unsaved"] and not report["findings"], report
        assert report["traffic"]["transport"] == "mpi", report["traffic"]
    assert transports(job) == {"mpi"}
    for rank in (0, 1):
        one, other = copies(job, rank)
        assert one == other and len(one) > 10_000
    assert not job.corrupt and job.finished == {0, 1}


def test_the_job_ends_with_a_killed_rank_and_comes_back(
    mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun], undisturbed: list[dict[str, Any]]
) -> None:
    """Both launchers end all ranks at once. The agents keep what they have; here one node is lost too."""
    job = make_job(2, 2)
    run = start(mpi, job, {"steps": 100_000, "sleep_s": 0.02})
    until(lambda: job.sealed is not None and job.sealed.version >= 8, START_S)
    pids = [run.pid(rank) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait(END_S) not in (0, None), run.said()
    until(lambda: all(map(gone, pids)), END_S)
    chosen = job.requeue(lost=(1,))
    assert chosen is not None and 8 <= chosen.version < STEPS, chosen
    again = start(mpi, job, {})
    assert again.wait() == 0, again.said()
    results = [again.result(rank) for rank in (0, 1)]
    assert [r["start"] for r in results] == [chosen.version] * 2
    assert [r["digest"] for r in results] == [r["digest"] for r in undisturbed]
    assert transports(job) == {"mpi"}


# Who has waited says it one way or another: which comes first is a matter of moments.
UNSEALED = (
    r"was not sealed within 1\.5 s|no version was sealed from \d+ on was sealed"
    r"|was not sealed when the training had to go on"
)


@pytest.mark.parametrize(
    ("mpi", "number", "mpiexec", "said"),
    [
        (
            OPENMPI,
            signal.SIGKILL,
            ["--with-ft", "ulfm"],
            r"the link (to|from) rank 1 broke: MPI, rank 1: MPI_ERR_PROC_FAILED",
        ),
        (OPENMPI, signal.SIGSTOP, [], UNSEALED),
        (MPICH, signal.SIGSTOP, [], UNSEALED),
    ],
    ids=["openmpi-killed", "openmpi-silent", "mpich-silent"],
    indirect=["mpi"],
)
def test_a_survivor_hardly_waits_for_a_peer_that_is_gone(
    mpi: Mpi,
    make_job: MakeJob,
    start: Callable[..., MpiRun],
    number: signal.Signals,
    mpiexec: list[str],
    said: str,
) -> None:
    """A training in which ranks do not need each other: what waits is ours. Silent: a power cut as MPI sees it."""
    job = make_job(2, 2)
    steps = 300
    options = {
        "kind": "plain",
        "steps": 100_000,
        "report_at": steps,
        "sleep_s": 0.01,
        "kwargs": {**KWARGS, "seal_timeout_s": 1.5},
        "mpi": {"alone": True},
    }
    run = start(mpi, job, options, mpiexec)
    until(lambda: job.sealed is not None and job.sealed.version >= 8, START_S)
    os.kill(run.pid(1), number)
    until(lambda: run.words("out", 0), END_S)
    report = run.result(0)["report"]
    assert report["version"] == steps and report["state"] == "degraded", report
    assert re.search(said, run.words("err", 0)), run.words("err", 0)
    times = report["times"]
    # one wait for the seal and one for the ranks' round, each with its own bound; the rest is a busy machine's
    assert times["worst_hook_s"] < 3.0 and times["worst_step_s"] < 3.0, times
    assert times["hook_s"] + times["step_s"] < 8.0, times


HERE = OPENMPI.environment("")["MPI4PY_LIBMPI"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({}, "rank 0: MPI is not initialised: `from mpi4py import MPI` before the Checkpointer is made"),
        ({"level": "multiple", "library": HERE, "missing_on": 1}, "rank 1: no MPI for Python"),
        ({"level": "multiple", "library": HERE}, "torch.distributed has 2 ranks, MPI's communicator 1"),
        ({"level": "funneled", "library": HERE}, "rank 0: MPI was initialised without MPI_THREAD_MULTIPLE"),
    ],
    ids=["not-initialised", "missing", "not-one-job", "threads"],
)
def test_without_a_usable_mpi_the_agents_bring_the_copies_and_it_is_said_once(
    make_agents: Callable[..., RealJob], undisturbed: list[dict[str, Any]], how: dict[str, Any], why: str
) -> None:
    if what := lacking("openmpi"):
        pytest.fail(what, pytrace=False)
    job = make_agents(2, 2)
    with tempfile.TemporaryDirectory() as scratch:  # Open MPI leaves things there
        run = Run(job, 2, {**TRAINING, "kwargs": KWARGS, "mpi": {**how, "scratch": scratch}})
        results = run.wait()
    assert [r["digest"] for r in results] == [r["digest"] for r in undisturbed]
    sentence = f'transport="mpi" cannot be used, the copies travel over host: {why}'
    assert [err.count(sentence) for err in run.stderr] == [1, 0], run.stderr
    for r in results:
        report = r["report"]
        assert report["state"] == "protected" and report["traffic"]["transport"] == "host", report
        assert [f.startswith(sentence) for f in report["findings"]] == [True], report["findings"]
        assert report["sealed"][1] >= STEPS - 1, report  # the last one's seal may come after the report
