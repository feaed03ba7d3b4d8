"""MPI programs of NumPy arrays under Open MPI and MPICH: what is saved, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gemini_hpc.query.summary_line import build_summary_line
from gemini_hpc.wire import local
from gemini_hpc.wire.inspect_schema import EventRecord
from tests.train.fake_agent import FakeJob

from .jobs import MPICH, OPENMPI, Mpi, MpiRun, lacking

pytestmark = pytest.mark.slow

STEPS = 30
MakeJob = Callable[[int, int], FakeJob]


@pytest.fixture
def start() -> Iterator[Callable[..., MpiRun]]:
    runs: list[MpiRun] = []

    def make(*args: Any, **kwargs: Any) -> MpiRun:
        runs.append(MpiRun(*args, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture(params=[MPICH], ids=lambda mpi: mpi.name)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    if what := lacking(request.param):
        pytest.fail(what, pytrace=False)
    found: Mpi = request.param
    return found


def ran(run: MpiRun, ranks: int) -> list[dict[str, Any]]:
    assert run.wait() == 0, run.said()
    return [run.result(rank) for rank in range(ranks)]


def told(results: list[dict[str, Any]]) -> Any:
    """What must not depend on whether it was interrupted."""
    return [{k: v for k, v in r.items() if k != "start"} for r in sorted(results, key=lambda r: r["rank"])]


@pytest.mark.parametrize(
    ("mpi", "level"),
    [
        pytest.param(
            *(OPENMPI, "funneled"),
            marks=pytest.mark.witness("an MPI program without torch is protected, and goes on alike"),
            id="openmpi, funneled",
        ),
        pytest.param(MPICH, "multiple", id="mpich, multiple"),
    ],
    indirect=["mpi"],
)
def test_every_version_is_sealed_and_a_requeued_run_ends_alike(
    mpi: Mpi,
    make_job: MakeJob,
    start: Callable[..., MpiRun],
    level: str,
) -> None:
    kwargs = {"seal_timeout_s": 20.0, "chunk_bytes": 4096}
    options = {"steps": STEPS, "kwargs": kwargs, "n": 900, "hashes_not": True}
    job = make_job(2, 2)
    job.stop_after(17)
    whole = ran(start(mpi, job, {**options, "mpi": {"level": level}}), 2)
    assert not job.corrupt
    assert [s.version for s in job.seals] == list(range(1, 18))
    assert job.requeue(lost=(1,)) is not None
    job.reached = 19
    again = ran(start(mpi, job, {**options, "seed": 9, "mpi": {"level": level}}), 2)
    assert [r["start"] for r in again] == [17, 17]
    assert told(again) == told(whole)
    assert job.sealed is not None and job.sealed.version == STEPS and job.finished == {0, 1}
    log = [EventRecord(e.t, e.name, f"n{node}", 1, e.version, e.detail) for node, e in job.events]
    found = sorted((json.loads(e.detail) for e in log if e.name == "resumed"), key=lambda detail: detail["rank"])
    assert [(d["rank"], d["shards"], d["repeated"]) for d in found] == [(0, 1, 2), (1, 1, 2)]
    assert all(d["began"] <= d["fetched"] <= d["loaded"] for d in found)
    assert [e.version for e in log if e.name == "first_iteration"] == [18, 18]
    assert build_summary_line(log, 2, 0, 2).endswith("; last saved step 17; 2 steps repeated")


def test_parts_are_loaded_by_another_number_of_ranks(
    mpi: Mpi,
    make_job: MakeJob,
    start: Callable[..., MpiRun],
) -> None:
    options = {"steps": 9, "private": False, "kwargs": {"seal_timeout_s": 20.0}}
    job = make_job(2, 2)
    before = ran(start(mpi, job, options), 2)
    assert job.requeue() is not None
    sockets = [job.nodes[rank % 2].path for rank in range(3)]
    after = ran(start(mpi, job, {**options, "seed": 9, "ranks": 3, "mpi": {"sockets": sockets}}), 3)
    assert [r["start"] for r in after] == [9, 9, 9]
    fields = [r["field"] for r in (*before, *after) if "field" in r]
    assert fields[0] == fields[1] and after[0]["count"] == 9


def test_without_an_agent_it_says_so_and_runs(mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun]) -> None:
    job = make_job(2, 2)
    run = start(mpi, job, {"steps": 5, "mpi": {"sockets": ["", ""]}})
    ran(run, 2)
    said = [run.words("err", rank) for rank in (0, 1)]
    assert sum(text.count("this program is not protected: no agent here") for text in said) == 1


def test_arrays_of_another_size_are_refused(mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun]) -> None:
    job = make_job(2, 2)
    options = {"steps": 4, "kwargs": {"seal_timeout_s": 20.0}}
    ran(start(mpi, job, options), 2)
    assert job.requeue() is not None
    run = start(mpi, job, {**options, "n": 80})
    assert run.wait() not in (0, None)
    assert "does not fit this program" in run.said() and "was saved as (60, 7)" in run.said()


@pytest.mark.parametrize("mpi", [OPENMPI, MPICH], indirect=True, ids=lambda mpi: mpi.name)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_left_out_on_one_rank(mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun], rank: int) -> None:
    """The ranks do not talk to each other: nothing shows it before one is in `close()`, the other in `step()`."""
    run = start(mpi, make_job(2, 2), {"steps": 9, "apart": True, "skips": [rank, 4]})
    ran(run, 2)
    (line,) = [line for line in run.said().splitlines() if "is void" in line]
    assert "version 9 is void, and versions before it may mix iterations: " in line
    assert f"rank {rank} is in close(), with 8 step() calls made" in line
    assert f"rank {1 - rank} is in step(), with 9 step() calls made" in line


def test_resume_left_out_on_one_rank(mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun]) -> None:
    """The version to resume from stays as it is."""
    job = make_job(2, 2)
    ran(start(mpi, job, {"steps": 5}), 2)
    assert job.requeue() is not None
    run = start(mpi, job, {"steps": 5, "apart": True, "resumes_not": 1})
    assert run.wait() not in (0, None), run.said()
    assert "RuntimeError: resume() is collective: rank 0 is in resume(); rank 1 is in step()" in run.said()
    assert job.sealed is not None and job.sealed.version == 5


def test_ranks_that_save_at_different_steps_are_refused(
    mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun]
) -> None:
    run = start(mpi, make_job(2, 2), {"steps": 5, "kwargs_of": [{"every": 2}, {"every": 3}]})
    assert run.wait() not in (0, None)
    assert run.said().count("ValueError: wanted the same every on all ranks, found [2, 3]") >= 1


@pytest.mark.parametrize("level", ["multiple", "funneled"])
def test_short_steps_are_saved_rarely(mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun], level: str) -> None:
    """The agents need a tenth of a second for each request: far more than 1 % of such steps."""
    job = make_job(2, 2)
    job.delay = {"BeginVersion": 0.1}
    options = {"steps": 200, "work_s": 0.002, "mpi": {"level": level}, "kwargs": {"every": 0, "seal_timeout_s": 20.0}}
    run = start(mpi, job, options)
    ran(run, 2)
    assert not job.corrupt and 3 <= len(job.seals) <= 20
    assert [s.version for s in job.seals][:3] == [1, 2, 3]
    (line,) = [line for line in run.said().splitlines() if "saving one version in" in line]
    assert "to capture the state in iterations of" in line and "a failure repeats at most" in line
    newest = {m.rank: m.state for m in job.told if isinstance(m, local.Traffic)}
    assert [newest[rank].transport for rank in (0, 1)] == ["mpi", "mpi"]
    assert newest[0].j == newest[1].j > 1
    helps = "fewer bytes a rank" if level == "multiple" else "MPI_THREAD_MULTIPLE"
    (reason,) = [state.reason for state in newest.values() if state.reason]
    assert f"what helps: {helps}" in reason


def test_long_steps_are_all_saved(mpi: Mpi, make_job: MakeJob, start: Callable[..., MpiRun]) -> None:
    job = make_job(2, 2)
    kwargs = {"every": 0, "overhead": 0.5, "seal_timeout_s": 20.0}
    run = start(mpi, job, {"steps": 12, "work_s": 0.5, "kwargs": kwargs})
    ran(run, 2)
    assert [s.version for s in job.seals] == list(range(1, 13))
    assert "saving one version in" not in run.said()
