"""The checkpointer over NCCL, in real training processes with real gloo collectives; only the GPU is a fake one."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.wire import local

from .fake_agent import FakeJob
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[[int, int], FakeJob]
KWARGS: dict[str, Any] = {"chunk_bytes": 1 << 17, "transport": "nccl", "every": 1}
# Two ranks, a shard of 1.7 MB, 15 collectives in an iteration.
TRAINING: dict[str, Any] = {"kind": "fsdp2", "width": 256, "compute_s": 0.003, "steps": 40, "gpu": {}}
SMALL: dict[str, Any] = {"kind": "ddp", "width": 64, "steps": 30, "gpu": {}, "sleep_s": 0.01}
ALONE: dict[str, list[str]] = {}


def start(job: FakeJob, training: dict[str, Any], world: int = 2, **options: Any) -> Run:
    kwargs = {**KWARGS, **options.pop("kwargs", {})}
    return Run(job, world, {**training, "kwargs": kwargs, **options})


def traffic(result: dict[str, Any]) -> dict[str, Any]:
    return dict(result["report"]["traffic"])


def undisturbed(training: dict[str, Any], world: int = 2) -> list[str]:
    """Digests of the final state of the same training without us."""
    options = {k: v for k, v in training.items() if k != "gpu"}
    key = f"{sorted(options.items())} {world}"
    if key not in ALONE:
        ALONE[key] = [r["digest"] for r in train(None, world, **options)]
    return ALONE[key]


def skipped(results: list[dict[str, Any]]) -> int:
    """Versions that some rank had no slot for in time, or no thread, as happens on a busy machine."""
    return sum(r["report"]["unsaved"].get(name, 0) for r in results for name in ("skipped", "refused"))


def sealed(job: FakeJob) -> list[int]:
    return [s.version for s in job.seals]


def exchanged(result: dict[str, Any]) -> int:
    return int(result["report"]["gpu"]["exchanges"])


def in_order(results: list[dict[str, Any]], job: FakeJob) -> None:
    """Nothing that has been written was wrong, and no memory stayed pinned."""
    assert not job.corrupt
    assert all(r["report"]["gpu"]["pinned"] == 0 for r in results)


def test_versions_go_over_it_from_the_first_on_and_change_nothing(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    run = start(job, TRAINING)
    results = run.wait()
    assert [r["digest"] for r in results] == undisturbed(TRAINING)
    versions = sealed(job)
    assert versions == list(range(versions[0], 41)) and versions[0] <= 8
    for result in results:
        seen = traffic(result)
        assert (seen["scheme"], seen["stage"], seen["problem"]) == ("gemini", "steady", "")
        assert seen["transport"] == "nccl" and seen["j"] == seen["s"] == 1
        assert seen["chunks"] >= 13 and seen["B"] > 1e6  # 1.7 MB in chunks of 128 KiB
        assert not result["report"]["unsaved"]
    assert exchanged(results[0]) == exchanged(results[1]) >= 13 * len(versions)
    told = {m.rank: m.state for m in job.told if isinstance(m, local.Traffic)}
    assert {state.transport for state in told.values()} == {"nccl"} and set(told) == {0, 1}
    in_order(results, job)


def test_a_plan_uses_the_spans_and_not_only_the_gate(make_job: MakeJob, tmp_path: Path) -> None:
    """What was enqueued where, by each rank's log of launches: the same, and before most of the collectives."""
    job = make_job(2, 2)
    results = start(job, TRAINING, launches=True).wait()
    logs = [[tuple(launch) for launch in r["launches"]] for r in results]
    assert logs[0] == logs[1] and len(logs[0]) > 300
    newest = max(launch[0] for launch in logs[0])
    places = {launch[1:4] for launch in logs[0] if launch[0] == newest}
    assert len(places) >= 3 and any(not past_gate and launched > 0 for _, past_gate, launched in places), places
    first = min(launch[0] for launch in logs[0])
    assert {launch[1:3] for launch in logs[0] if launch[0] == first} == {(0, True)}  # profiled


def test_three_ranks_two_copies(make_job: MakeJob) -> None:
    job = make_job(3, 3)
    training = {**SMALL, "gpu": {"seed": 1}}
    results = start(job, training, 3).wait()
    assert [r["digest"] for r in results] == undisturbed(training, 3)
    assert sealed(job)[-1] >= 30 - skipped(results) and all(traffic(r)["transport"] == "nccl" for r in results)
    in_order(results, job)


def test_one_version_in_three(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    results = start(job, TRAINING, steps=50, kwargs={"every": 3}).wait()
    assert all({tuple(h[1:]) for h in traffic(r)["history"]} == {(3, 1)} for r in results)
    assert [b - a for a, b in pairwise(sealed(job))][-4:] == [3, 3, 3, 3]
    in_order(results, job)


# ---- all ranks, or none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [({"refuse": 1}, "rank 1: the test refuses"), ({"no_connection": 1}, "rank 0: a rank is not there")],
)
def test_where_one_rank_cannot_all_take_host(make_job: MakeJob, gpu: dict[str, Any], reason: str) -> None:
    job = make_job(2, 2)
    run = start(job, SMALL, steps=12, gpu=gpu)
    results = run.wait()
    assert (run.stderr[0] + run.stderr[1]).count(f"copies go over host, not over NCCL: {reason}") == 1
    assert sealed(job)[-1] == 12
    assert all(traffic(r)["transport"] == "host" and exchanged(r) == 0 for r in results)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gpu": {"unpinned": 1}}, "locks no memory"),
        ({"stray_at": 10}, "have enqueued between"),
        ({"alone_on": 1}, "at the same places of the training"),
        ({"pass_on": True}, "point to point"),
    ],
)
def test_what_cannot_be_followed_ends_it_on_all_ranks(
    make_job: MakeJob, options: dict[str, Any], reason: str
) -> None:
    job = make_job(2, 2)
    training = {**SMALL, **options, "steps": 50}
    run = start(job, training)
    results = run.wait()
    said = run.stderr[0] + run.stderr[1]
    assert reason in said and 1 <= said.count("not over NCCL") <= 2, said
    assert [r["digest"] for r in results] == undisturbed(training)
    for result in results:
        assert traffic(result)["transport"] == "gloo" and traffic(result)["problem"] == ""
        assert result["report"]["state"] == "protected"
    assert sealed(job)[-1] == 50
    in_order(results, job)


# ---- failures ------------------------------------------------------------------------------------------


# the last one is steady by then, and its ranks meet a hundred iterations later
@pytest.mark.parametrize(("mute_after", "steps"), [(0, 60), (10, 60), (30, 140)])
def test_a_rank_that_enqueues_nothing_hangs_ours_and_not_the_training(
    make_job: MakeJob, mute_after: int, steps: int
) -> None:
    job = make_job(2, 2)
    training = {**SMALL, "steps": steps, "sleep_s": 0.02, "gpu": {"mute": 1, "mute_after": mute_after}}
    run = start(job, training)
    results = run.wait()
    assert [r["digest"] for r in results] == undisturbed(training)
    assert "the training waited" in run.stderr[0]
    assert all(traffic(r)["transport"] == "gloo" for r in results)
    assert sealed(job)[-1] == steps and all(r["report"]["state"] == "protected" for r in results)
    # one wait, of the version that hung, and then the ranks find together: some versions are lost, no time
    assert len(sealed(job)) >= steps - 15, sealed(job)
    assert all(r["report"]["times"]["hook_s"] < 8.0 for r in results), [r["report"]["times"] for r in results]
    assert all(r["report"]["times"]["worst_hook_s"] < 3.0 for r in results)
    # the mute one takes for landed what never came: its agent does not
    assert {m.rank for m in job.corrupt} <= {0}


def test_agents_die_and_are_given_back_what_came_over_it(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(2, 2)
    run = start(job, SMALL, steps=60, log=str(tmp_path / "log"), sleep_s=0.05)
    deadline = time.monotonic() + 60
    while len(sealed(job)) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.nodes[1].die()
    time.sleep(0.3)
    with job.lock:
        job.nodes[1].start()
    results = run.wait()
    assert [r["digest"] for r in results] == undisturbed({**SMALL, "steps": 60})
    back = job.nodes[1].handed_back
    assert {(m.rank, m.slot) for m in back} == {(0, 0), (0, 1), (1, 0), (1, 1)} and any(m.digest for m in back)
    assert sealed(job)[-1] == 60
    assert "protected again" in run.stderr[1]
    assert all(traffic(r)["transport"] == "nccl" for r in results)
    in_order(results, job)


def test_an_agent_that_is_slow_costs_versions_and_no_time(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.delay["BeginVersion"] = 0.4
    results = start(job, SMALL, steps=40).wait()
    times = results[0]["report"]["times"]
    assert times["worst_step_s"] < 1.0 and times["worst_hook_s"] < 2.5, times
    assert [r["digest"] for r in results] == undisturbed({**SMALL, "steps": 40})
    in_order(results, job)


def test_what_was_saved_over_it_is_resumed_bit_for_bit(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    start(job, SMALL, die_at=21).wait(codes=(1,))
    stamp = job.requeue((1,))
    assert stamp is not None and stamp.version >= 20
    results = start(job, SMALL).wait()
    assert {r["start"] for r in results} == {stamp.version}
    assert [r["digest"] for r in results] == undisturbed(SMALL)
    assert all(traffic(r)["transport"] == "nccl" for r in results)
    in_order(results, job)


# ---- what the training may do --------------------------------------------------------------------------


def test_small_state_that_outgrows_its_place(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    # larger slots are made meanwhile: without the pause a short training can be over before they are
    run = start(job, SMALL, grow_at=12, pause_at=13, pause_s=2.0)
    results = run.wait()
    assert sealed(job)[-1] >= 30 - skipped(results), sealed(job)
    assert len([v for v in sealed(job) if v > 12]) >= min(14, 18 - skipped(results)), sealed(job)
    assert all(traffic(r)["transport"] == "nccl" for r in results)
    in_order(results, job)


def test_what_changes_behind_our_back_voids_the_version(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    results = start(job, SMALL, tamper_at=15, kwargs={"audit": 1}).wait()
    # Where protection is degraded (a busy machine) the host copies at once, before the change, and 14 is right.
    assert 14 not in sealed(job) or (job.saw("degraded") and job.saw("changed"))
    assert sealed(job)[-1] >= 30 - skipped(results)
    assert any("model.blocks.0.weight" in r["report"]["captured"]["eager"] for r in results)
    in_order(results, job)


def test_a_fence_lets_the_tensors_go(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    training = {**SMALL, "fence_at": 15}
    results = start(job, training).wait()
    assert (15 in sealed(job) or skipped(results)) and sealed(job)[-1] >= 30 - skipped(results)
    assert all(r["report"]["versions"]["void"] == 0 for r in results)
    in_order(results, job)


def test_steps_without_an_optimizer_in_between(make_job: MakeJob) -> None:
    """As a scaler makes them that found infinite gradients: no hook fires, the version is saved all the same."""
    job = make_job(2, 2)
    results = start(job, SMALL, scaler=True, inf_at=12).wait()
    lacking = set(range(8, 31)) - {12} - set(sealed(job))
    assert len(lacking) <= skipped(results), (lacking, sealed(job))
    in_order(results, job)
