"""The checkpointer's traffic in the idle spans of the training's own: profile, plan, frequency, what it changes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from gemini_hpc.wire import local

from .fake_agent import FakeJob
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[[int, int], FakeJob]

# Two ranks, four blocks of 10 ms forward and 20 ms backward; a shard of 1.8 MB, so 20 MB/s leave room and 4 do not.
TRAINING: dict[str, Any] = {
    "kind": "fsdp2",
    "width": 256,
    "compute_s": 0.01,
    "steps": 60,
    "kwargs": {"chunk_bytes": 1 << 17},
}
ROOM, NO_ROOM = 4e7, 6e6
# The optimizer waits for each version, also on a busy machine.
PATIENT: dict[str, Any] = {"armed": True, "kwargs": {**TRAINING["kwargs"], "seal_timeout_s": 20.0}}


def traffic(result: dict[str, Any]) -> dict[str, Any]:
    return dict(result["report"]["traffic"])


def longest_run(job: FakeJob, j: int) -> int:
    """How many sealed versions in a row are j apart."""
    best = run = 0
    for a, b in pairwise(sorted({s.version for s in job.seals})):
        run = run + 1 if b - a == j else 0
        best = max(best, run)
    return best


@pytest.mark.alone
def test_chunks_go_in_idle_spans_and_change_nothing(make_job: MakeJob) -> None:
    # The plan begins at step 27, or 6 later for each iteration that is no clean one. Its first recorded iterations
    # end with its first round, 5 s or 32 steps after it.
    options = {**TRAINING, "steps": 100}
    alone = train(None, 2, **options)
    job = make_job(2, 2)
    kwargs = {**TRAINING["kwargs"], "every": 1, "mu": 0.9}
    results = train(job, 2, rate=ROOM, **{**options, "kwargs": kwargs})
    assert [r["losses"] for r in results] == [r["losses"] for r in alone]
    assert [r["digest"] for r in results] == [r["digest"] for r in alone]
    for result in results:
        seen = traffic(result)
        assert (seen["scheme"], seen["problem"], seen["mu"]) == ("gemini", "", 0.9) and seen["history"]
        assert seen["collectives"] == 15 and seen["idle_s"] > 0.1
        assert seen["j"] == seen["s"] == 1
        assert seen["overlap"], f"no iteration was recorded under a plan: {seen['history']}"
        # of what was recorded under the plan, hardly anything was beside the training's collectives
        assert seen["overlap"]["chunks"] >= 4, "each is what goes in one window"
        assert seen["overlap"]["beside_s"] < 0.2 * seen["overlap"]["chunks_s"]
    assert [s.version for s in job.seals][-1] == 100


def test_a_dtensor_that_changes_before_its_copy_voids_the_version(make_job: MakeJob) -> None:
    """Its own counter tells, that of the local tensor within does not."""
    job = make_job(2, 2)
    job.delay["BeginVersion"] = 0.05  # the copy does not begin before
    options = {**TRAINING, "steps": 20}
    results = train(job, 2, touch_at=12, **options)
    assert [r["digest"] for r in results] == [r["digest"] for r in train(None, 2, **options)]
    for result in results:
        assert result["report"]["versions"]["void"] == 1, result["report"]
        assert "model.blocks.0.weight" in result["report"]["captured"]["eager"]
    versions = [s.version for s in job.seals]
    assert 11 not in versions and versions[-1] == 20 and not job.corrupt, versions


def test_every_version_is_sealed_while_it_is_profiled(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    results = train(job, 2, rate=ROOM, **{**TRAINING, **PATIENT, "steps": 12})
    sealed = {s.version for s in job.seals}
    assert sealed >= set(range(min(sealed), 13)) and min(sealed) <= 8
    assert traffic(results[0])["stage"] == "profile"


@pytest.mark.alone
def test_too_little_idle_time_lowers_the_frequency(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    options = {**TRAINING, "steps": 80, "kwargs": {**TRAINING["kwargs"], "every": 0}}
    results = train(job, 2, rate=NO_ROOM, **options)
    seen = [traffic(r) for r in results]
    assert all(s["problem"] == "" for s in seen)
    assert seen[0]["history"] == seen[1]["history"]
    _, j, s = seen[0]["history"][0]
    assert j > 1 and 1 <= s <= j
    assert longest_run(job, j) >= 3
    assert not any("degraded" in finding for r in results for finding in r["report"]["findings"])


@pytest.mark.alone
def test_another_pattern_is_profiled_again(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    run = Run(job, 2, {**TRAINING, "rate": ROOM, "steps": 150, "more_from": 50})
    results = run.wait()
    seen = traffic(results[0])
    assert job.saw("profiled_again")
    assert "profil" not in run.stderr[0] + run.stderr[1], "nothing of it concerns the user"
    assert seen["collectives"] == 16 and len(seen["history"]) >= 2


@pytest.mark.alone
def test_an_evaluation_now_and_then_is_not_another_pattern(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    run = Run(job, 2, {**TRAINING, "rate": ROOM, "evaluate_every": 7, "steps": 70})
    results = run.wait()
    assert "collectives" not in run.stderr[0] + run.stderr[1]  # no other reason for a new profile than noise
    assert traffic(results[0])["history"] and traffic(results[0])["collectives"] == 15


def test_scheme_none_saves_nothing(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    train(job, 2, **{**TRAINING, "steps": 12, "kwargs": {"scheme": "none"}})
    assert not job.seals


@pytest.mark.alone
def test_schemes_can_be_switched(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    schemes = {36: "none", 40: "gemini", 46: "blocking", 52: "gemini"}
    kwargs = {"chunk_bytes": 1 << 17, "overhead": 0.9}  # no other profile for a busy machine's slow iterations
    results = train(job, 2, rate=ROOM, schemes=schemes, **{**TRAINING, "kwargs": kwargs})
    versions = {s.version for s in job.seals}
    assert not versions & {37, 38, 39} and versions >= {36, 41, 44, 47, 50, 53, 60}, sorted(versions)
    assert traffic(results[0])["stage"] == "steady"


@pytest.mark.alone
def test_the_profile_outlives_the_incarnation(make_job: MakeJob) -> None:
    """Also where a node is replaced, which has no profile: here all ranks have the same pattern."""
    job = make_job(2, 2)
    Run(job, 2, {**TRAINING, "rate": ROOM, "die_at": 45}).wait(codes=(1,))
    stamp = job.requeue((1,))
    assert stamp is not None and stamp.version >= 44
    results = train(job, 2, rate=ROOM, **{**TRAINING, "steps": 60})
    for result in results:
        seen = traffic(result)
        assert seen["history"] and seen["history"][0][0] <= stamp.version + 12  # not after 20 more iterations
        assert (seen["collectives"], seen["problem"]) == (15, "")
    told = {m.rank: m.state for m in job.told if isinstance(m, local.Traffic)}
    assert {state.stage for state in told.values()} <= {"agree", "steady"} and set(told) == {0, 1}


@pytest.mark.alone
def test_a_stopped_peer_is_not_waited_for(make_job: MakeJob, tmp_path: Path) -> None:
    """Our own waits are bounded by 1.5 s; the training's collectives wait for as long as they do without us."""
    job = make_job(2, 2)
    log = tmp_path / "log"
    run = Run(job, 2, {**TRAINING, "rate": NO_ROOM, "steps": 45, "log": str(log), "kwargs": {"every": 1}})
    path = tmp_path / "log.0"
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= 32, every_s=0.01, what="32 steps")
    run.processes[1].signal(signal.SIGSTOP)
    time.sleep(5.0)
    run.processes[1].signal(signal.SIGCONT)
    results = run.wait()
    times = results[0]["report"]["times"]
    assert times["worst_hook_s"] < 2.0, times  # 1.5 s and what a busy machine adds
    assert [s.version for s in job.seals][-1] >= 40, "and versions are sealed again"


def test_a_device_that_can_pin_no_memory_is_told_of_once(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    lagging = {"collective_s": 0.001, "unpinned": 1}
    run = Run(job, 2, {**TRAINING, **PATIENT, "steps": 16, "lagging": lagging, "grow_at": 8})
    results = run.wait()
    assert [r["report"]["gpu"]["pinned"] for r in results] == [0, 0]
    # of the rank that can: its own slots, those that it keeps for the other, and the larger ones in their place
    assert [r["report"]["gpu"]["pins"] for r in results] == [8, 0]
    said = "copies from the device are slow, because they pass through other memory: the test locks no memory"
    assert [text.count(said) for text in run.stderr] == [0, 1]
    assert [s.version for s in job.seals][-1] == 16 and not job.corrupt


def test_what_was_copied_from_a_device_is_resumed_bit_for_bit(make_job: MakeJob) -> None:
    """Also where a rank dies while its host is ahead of its device: a version that is sealed has left it."""
    alone = train(None, 2, **{**TRAINING, "steps": 30, "compute_s": 0.0})
    job = make_job(2, 2)
    options = {**TRAINING, "steps": 30, "lagging": {"collective_s": 0.001}}
    Run(job, 2, {**options, "die_at": 15}).wait(codes=(1,))
    stamp = job.requeue((1,))
    assert stamp is not None and stamp.version >= 14
    results = train(job, 2, **options)
    assert {r["start"] for r in results} == {stamp.version}
    assert [r["digest"] for r in results] == [r["digest"] for r in alone]
    assert all(r["report"]["gpu"]["pinned"] == 0 for r in results) and not job.corrupt
