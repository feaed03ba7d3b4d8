"""torch.distributed.checkpoint over the agents' memory: kills, a lost node, other numbers of ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from tests.train.agents import RealJob
from tests.train.fake_agent import FakeJob
from tests.train.test_host import sealed

from .conftest import Launch

pytestmark = pytest.mark.slow

STEPS, DIED = 14, 9
MakeJob = Callable[..., RealJob]
Train = Callable[..., Any]


@pytest.fixture
def fake_job(tmp_path: Path) -> Iterator[FakeJob]:
    """Of two nodes that keep their own ranks' shards only."""
    (directory := tmp_path / "fake").mkdir()
    job = FakeJob(directory, 2, 1)
    yield job
    job.close()


@pytest.fixture
def train(launch: Launch) -> Train:
    return partial(launch, program="tests.integrations.dcp_program", steps=STEPS)


def goes_on_alike(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for a, b in zip(whole, resumed, strict=True):
        assert b["start"] == DIED
        assert b["losses"] == {step: loss for step, loss in a["losses"].items() if int(step) > DIED}
        assert b["digest"] == a["digest"]


@pytest.mark.parametrize(("kind", "asynchronous"), [("ddp", False), ("fsdp2", True)], ids=["save", "async_save"])
def test_all_trainers_are_killed(make_job: MakeJob, train: Train, kind: str, asynchronous: bool) -> None:
    options = {"kind": kind, "asynchronous": asynchronous, "labels": True}
    whole = train(None, 2, **options).wait()
    job = make_job(2, 2)
    train(job, 2, die_at=DIED, **options).wait(codes=(3,))
    job.requeue(["n1", "n2"])
    run = train(job, 2, seed=5, **options)
    resumed = run.wait()
    goes_on_alike(whole, resumed)
    assert {r["id"] for r in resumed} == {f"step-{DIED}"}
    assert "gemini-hpc" not in "".join(run.stderr), run.stderr
    assert [r["fetched"] for r in resumed] == ([[0], [1]] if kind == "fsdp2" else [[0, 1], [1, 0]])
    if not asynchronous:
        assert [r["saved"] for r in resumed] == [list(range(DIED + 1, STEPS + 1))] * 2


@pytest.mark.witness("torch.distributed.checkpoint keeps its checkpoints in the agents' memory")
def test_a_node_is_lost_with_its_memory(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2, kind="fsdp2").wait()
    job = make_job(2, 2)
    train(job, 2, kind="fsdp2", die_at=DIED).wait(codes=(3,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    goes_on_alike(whole, train(job, 2, kind="fsdp2", seed=5).wait())


@pytest.mark.parametrize(("nodes", "before", "after"), [(1, 2, 1), (1, 1, 2), (2, 4, 2), (2, 2, 3)])
def test_another_number_of_ranks_loads_it(
    make_job: MakeJob, train: Train, nodes: int, before: int, after: int
) -> None:
    """Also from FSDP2 to DDP and back."""
    job = make_job(nodes, nodes)
    kinds = ["fsdp2", "ddp"] if before > after else ["ddp", "fsdp2"]
    saved = train(job, before, kind=kinds[0], die_at=DIED, generators=False).wait(codes=(3,))
    for kind in ("fsdp2", kinds[1]):
        job.requeue([node.name for node in job.nodes])
        loaded = train(job, after, kind=kind, seed=5, generators=False, steps=DIED, die_at=DIED).wait(codes=(3,))
        assert {r["start"] for r in loaded} == {DIED}
        assert {r["loaded"] for r in loaded} == {r["digest"] for r in saved}


def test_all_ranks_ask_anew_where_one_cannot_have_its_part(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2, kind="fsdp2").wait()
    job = make_job(2, 2)
    train(job, 2, kind="fsdp2", die_at=DIED).wait(codes=(3,))
    job.requeue(["n1", "n2"])
    run = train(job, 2, kind="fsdp2", seed=5, fetch_fails=1)
    goes_on_alike(whole, run.wait())
    assert f"version {DIED} cannot be loaded: rank 1: not this time" in run.stderr[1]


def test_the_same_process_reads_what_it_has_saved_and_goes_on(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2, kind="fsdp2", generators=False).wait()
    results = train(make_job(2, 2), 2, kind="fsdp2", read_at=6).wait()
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    assert [r["saved"] for r in results] == [list(range(1, STEPS + 1))] * 2


def test_a_checkpointer_of_another_name_stands_beside_it(make_job: MakeJob, train: Train) -> None:
    whole = train(None, 2, kind="fsdp2").wait()
    results = train(make_job(2, 2), 2, kind="fsdp2", beside=True).wait()
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    assert [(r["saved"], r["beside"]) for r in results] == [(list(range(1, STEPS + 1)), "protected")] * 2


def test_what_is_pickled_outgrows_its_slot(make_job: MakeJob, train: Train) -> None:
    job = make_job(2, 2)
    options = {"kind": "ddp", "growth": 200_000}
    whole = train(None, 2, **options).wait()
    first = train(job, 2, die_at=DIED, **options).wait(codes=(3,))
    assert [r["saved"] for r in first] == [list(range(1, DIED + 1))] * 2
    job.all["n1"].die()
    job.requeue(["n2", "n3"])
    goes_on_alike(whole, train(job, 2, seed=5, **options).wait())


def test_an_agent_is_away_for_a_while(make_job: MakeJob, train: Train, tmp_path: Path) -> None:
    """Saves are skipped meanwhile, each with a line, and the training goes on."""
    job = make_job(2, 2)
    run = train(job, 2, kind="fsdp2", pause_at=4, paused=str(tmp_path), steps=20)
    until(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)), what="both ranks wait")
    job.nodes[1].die()
    (tmp_path / "go").touch()
    until(lambda: "version 5 is not saved: rank 1: " in run.processes[1].read()[1], what="a line")
    job.nodes[1].start(again=True)
    results = run.wait()
    saved = results[0]["saved"]
    assert saved == results[1]["saved"] and saved[:5] == [1, 2, 3, 4, 0] and saved[-1] == 20, saved
    assert "version 5 is not saved" not in run.stderr[0], "one rank says it"
    assert [r["digest"] for r in results] == [r["digest"] for r in train(None, 2, kind="fsdp2", steps=20).wait()]


def test_agents_that_die_get_back_what_they_had(make_job: MakeJob, train: Train, tmp_path: Path) -> None:
    """Also where others' shards have outgrown their slots."""
    options = {"kind": "fsdp2", "growth": 300_000}
    whole = train(None, 2, **options).wait()
    job = make_job(2, 2)
    first = train(job, 2, pause_at=DIED, paused=str(tmp_path), **options)
    until(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)), what="both ranks wait")
    before = [job.held(node, rank) for node in job.nodes for rank in (0, 1)]
    assert all((1, DIED) in stamps for stamps in before), before
    for node in job.nodes:
        node.die()
        node.start(again=True)
    until(lambda: [job.held(node, rank) for node in job.nodes for rank in (0, 1)] == before, what="all is back")
    for process in first.processes:
        process.signal(signal.SIGKILL)
        process.wait(10)
    job.requeue(["n1", "n2"])
    goes_on_alike(whole, train(job, 2, seed=5, **options).wait())


def test_a_state_that_no_slot_can_have_is_skipped(make_job: MakeJob, train: Train) -> None:
    run = train(make_job(2, 2), 2, kind="ddp", odd_at=8)
    results = run.wait()
    assert [r["saved"] for r in results] == [[0 if step == 8 else step for step in range(1, STEPS + 1)]] * 2
    said = [line for err in run.stderr for line in err.splitlines() if line.startswith("gemini-hpc: ")]
    assert len(said) == 1 and "version 8 is not saved: rank " in said[0] and "qint8" in said[0], said


def test_one_rank_has_no_room_for_a_while(fake_job: FakeJob, train: Train, tmp_path: Path) -> None:
    fake_job.refuse_register, fake_job.refuse_register_on = "no room for 1 MiB", (1,)
    run = train(fake_job, 2, kind="fsdp2", pause_at=3, paused=str(tmp_path))
    until(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)), what="both ranks wait")
    fake_job.refuse_register = ""
    (tmp_path / "go").touch()
    assert [r["saved"] for r in run.wait()] == [[0, 0, 0, *range(4, STEPS + 1)]] * 2
    assert [err.count(" is not saved: rank 1: no room for 1 MiB") for err in run.stderr] == [0, 3], run.stderr


def test_without_an_agent_one_line(train: Train) -> None:
    run = train(None, 2, kind="ddp")
    assert [r["saved"] for r in run.wait()] == [[0] * STEPS] * 2
    assert "".join(run.stderr).count("gemini-hpc: ") == 1
    assert "this training is not protected: no agent here" in run.stderr[0]


@pytest.mark.parametrize(("nodes", "after"), [(2, 2), (1, 1)])
def test_what_a_checkpointer_saved_is_loaded_by_its_names(
    make_job: MakeJob, launch: Launch, nodes: int, after: int
) -> None:
    """Parameters, buffers, moments, and the groups with their learning rate; tied and frozen parameters too."""
    options = {"kind": "fsdp2", "norm": "batch"}
    job = make_job(nodes, nodes)
    saving = launch(job, 2, **options, steps=100_000, sleep_s=0.02, kwargs={"seal_timeout_s": 10.0})
    until(lambda: sealed(job, job.nodes[0]) >= DIED, what="sealed versions")
    for process in saving.processes:
        process.signal(signal.SIGKILL)
        process.wait(10)
    found = []
    for kind in ("fsdp2", "plain"):
        job.requeue([node.name for node in job.nodes])
        found += launch(job, after, program="tests.integrations.names_program", kind=kind).wait(codes=(3,))
    (version,) = {r["version"] for r in found}
    whole = launch(None, 2, **options, steps=version).wait()
    assert {r["digest"] for r in found} == {whole[0]["digest"]}, "buffers are rank 0's, as in an export"
    assert (0.5).hex() not in {r["lr"] for r in found}
