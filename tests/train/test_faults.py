"""Whatever breaks around it, the training goes on; and it says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from gemini_hpc.wire import local

from .conftest import Pause
from .fake_agent import FakeJob
from .launch import Run, train

pytestmark = pytest.mark.slow

MakeJob = Callable[[int, int], FakeJob]


def sealed_version(job: FakeJob) -> int:
    return job.sealed.version if job.sealed else 0


def test_agent_dies_and_comes_back(make_job: MakeJob, pause: Pause) -> None:
    job = make_job(2, 2)
    options = {"kind": "ddp", "steps": 24, "armed": True, "kwargs": {"seal_timeout_s": 1.0}}
    run = Run(job, 2, {**options, **pause.at(6, 12, 20)})
    pause.wait(6)
    until(lambda: sealed_version(job) >= 4, what="the first seals")
    job.nodes[1].die()
    before = sealed_version(job)
    pause.end(6)
    pause.wait(12)
    with job.lock:
        assert sealed_version(job) <= before + 1, "nothing can be sealed without an agent"
        job.nodes[1].start()
    until(lambda: len(job.nodes[1].handed_back) == 4, what="the hand-back")
    pause.end(12)
    pause.wait(20)
    until(lambda: sealed_version(job) > before + 2, what="seals after the hand-back")
    pause.end(20)
    results = run.wait()
    back = job.nodes[1].handed_back
    assert {(m.rank, m.slot) for m in back} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert any(m.digest and m.version >= before - 1 for m in back)
    assert job.nodes[1].hellos[-1].rejoin
    assert all(r["report"]["version"] == 24 and r["report"]["state"] == "protected" for r in results)
    # The transfer may break before the rank's own connection does: then rank 0's copies are named first.
    assert "protection is degraded: " in run.stderr[1], run.stderr[1]
    assert "the agent of this node is gone" in run.stderr[1], run.stderr[1]
    assert "protected again" in run.stderr[1]
    assert not job.corrupt


def test_a_cut_connection_is_not_a_dead_agent(make_job: MakeJob, pause: Pause) -> None:
    job = make_job(2, 2)
    options = {"kind": "ddp", "steps": 24, "armed": True, "kwargs": {"seal_timeout_s": 1.0}}
    run = Run(job, 2, {**options, **pause.at(6, 20)})
    pause.wait(6)
    until(lambda: sealed_version(job) >= 4, what="the first seals")
    memory = {h.rank: os.fstat(h.fds[0]).st_ino for h in job.nodes[1].held.values()}
    before, greeted = sealed_version(job), len(job.nodes[1].hellos)
    job.nodes[1].cut()
    until(lambda: len(job.nodes[1].hellos) > greeted, what="the reconnection")
    pause.end(6)
    pause.wait(20)
    until(lambda: sealed_version(job) > before + 2, what="seals after the reconnection")
    pause.end(20)
    assert all(r["report"]["state"] == "protected" for r in run.wait())
    assert memory == {h.rank: os.fstat(h.fds[0]).st_ino for h in job.nodes[1].held.values()}


def test_agent_of_another_incarnation_is_not_joined(make_job: MakeJob, pause: Pause) -> None:
    job = make_job(1, 1)
    run = Run(job, 1, {"steps": 6, "armed": True, **pause.at(4)})
    pause.wait(4, world=1)
    until(lambda: sealed_version(job) >= 3, what="the first seals")
    job.nodes[0].die()
    job.epoch += 1
    job.nodes[0].start()
    said = "no longer protected: the agent came back at epoch 2"
    until(lambda: said in run.processes[0].read()[1], what=said)
    pause.end(4)
    assert run.wait()[0]["report"]["state"] == "unprotected"
    assert not job.nodes[0].handed_back


def test_refused_begin_skips_one_save(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.refuse_begin = lambda node, m: "busy draining" if (node, m.rank, m.version) == (0, 0, 6) else ""
    run = Run(job, 2, {"kind": "ddp", "steps": 12, "sleep_s": 0.05, "kwargs": {"seal_timeout_s": 0.5}})
    results = run.wait()
    assert results[0]["report"]["versions"]["reasons"] == {"busy draining": 1}
    versions = [s.version for s in job.seals]
    assert 6 not in versions and {7, 12} <= set(versions)
    assert any("busy draining" in e.detail and e.version == 6 for e in job.saw("skipped"))
    assert "version 6 skipped: busy draining" in run.stderr[0]


@pytest.mark.parametrize("max_repeated", [1, 2])
def test_a_training_of_which_nothing_is_saved_says_so(make_job: MakeJob, max_repeated: int) -> None:
    """Each version is given up at once, so nobody ever waits for one."""
    job = make_job(2, 2)
    job.refuse_begin = lambda node, m: "busy draining" if (node, m.rank) == (1, 1) and 6 <= m.version < 60 else ""
    kwargs = {"every": 1, "seal_timeout_s": 0.4, "max_repeated": max_repeated}
    run = Run(job, 2, {"kind": "ddp", "steps": 80, "sleep_s": 0.03, "kwargs": kwargs})
    results = run.wait()
    assert not {s.version for s in job.seals} & set(range(6, 60)) and sealed_version(job) == 80
    for err in run.stderr:
        degraded, again = err.find("protection is degraded"), err.find("protected again")
        assert 0 <= degraded < again and err.count("protection is degraded") == 1, err
    assert "no version was sealed from version 6 on" in run.stderr[1]
    assert job.saw("degraded")
    assert all(r["report"]["state"] == "protected" for r in results)


def test_a_version_that_a_holder_refuses_is_not_waited_for_ever(make_job: MakeJob) -> None:
    """Nobody but the owner can know that the holder will never have it; were it kept, no later one could begin."""
    job = make_job(2, 2)
    job.refuse_begin = lambda node, m: "busy draining" if (node, m.rank, m.version) == (1, 0, 6) else ""
    run = Run(job, 2, {"kind": "ddp", "steps": 30, "sleep_s": 0.05, "kwargs": {"seal_timeout_s": 0.5}})
    results = run.wait()
    versions = [s.version for s in job.seals]
    assert 6 not in versions and 30 in versions and len(versions) >= 15
    assert "version 6 refused: rank 1 could not take this version" in run.stderr[0]
    assert all(r["report"]["state"] == "protected" for r in results)


def test_refused_memory_means_unprotected_everywhere(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.refuse_register = "not enough memory for the replicas: wanted 9 MiB, the node's cap is 5 MiB"
    run = Run(job, 2, {"kind": "ddp", "steps": 8, "sleep_s": 0.02})
    results = run.wait()
    assert all(r["report"]["state"] == "unprotected" for r in results)
    counts = [err.count("wanted 9 MiB, the node's cap is 5 MiB") for err in run.stderr]
    assert max(counts) == 1, run.stderr  # a rank that another one's refusal reaches first says nothing


def test_one_rank_without_memory_ends_protection_on_all(make_job: MakeJob) -> None:
    """It goes on with the others into the collective in which they wait for its word."""
    job = make_job(3, 2)
    job.refuse_register, job.refuse_register_on = "not enough memory for the replicas", (1,)
    run = Run(job, 3, {"kind": "ddp", "steps": 12, "sleep_s": 0.05})
    results = run.wait(timeout_s=60)
    assert [r["report"]["state"] for r in results] == ["unprotected"] * 3
    assert [err.count("no longer protected: not enough memory") for err in run.stderr] == [0, 1, 0]
    assert "rank 1 could not reserve its memory" in results[0]["report"]["findings"]
    assert not job.landed


def test_an_agent_dies_while_memory_is_reserved(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.delay["Register"] = 1.0
    run = Run(job, 2, {"kind": "ddp", "steps": 60, "sleep_s": 0.05})
    until(lambda: local.Register in job.nodes[1].asked, what="a registration")
    job.nodes[1].die()
    job.nodes[1].start()
    results = run.wait(timeout_s=60)
    assert [r["report"]["state"] for r in results] == ["unprotected"] * 2
    assert run.stderr[1].count("no longer protected") == 1


def test_one_rank_that_cannot_plan_ends_protection_on_all(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    run = Run(job, 2, {"kind": "ddp", "steps": 6, "no_manifest_on": 1})
    results = run.wait(timeout_s=60)
    assert [r["report"]["state"] for r in results] == ["unprotected"] * 2
    assert all("pop from empty list" in err for err in run.stderr)


@pytest.mark.parametrize(
    ("delay_s", "options"),
    [(0.3, {}), (1.5, {"close_s": 0.2}), (0.0, {"close_s": 0.2, "populates_s": 1.5})],
    ids=["waited for", "the agent is slow", "at work in torch"],
)
def test_close_while_memory_is_reserved(make_job: MakeJob, delay_s: float, options: dict[str, Any]) -> None:
    """A thread that waits for other ranks, or is at work in torch, would abort the process at its exit."""
    job = make_job(2, 2)
    job.delay["Register"] = delay_s
    run = Run(job, 2, {"kind": "ddp", "steps": 2, **options})
    run.wait(timeout_s=60)
    assert job.finished == {0, 1}
    assert not any("link" in err or "no longer protected" in err for err in run.stderr)


def test_without_an_agent_one_line(make_job: MakeJob) -> None:
    run = Run(None, 2, {"kind": "ddp", "steps": 3})
    results = run.wait()
    lines = [line for err in run.stderr for line in err.splitlines() if line.startswith("gemini-hpc:")]
    assert lines == [
        "gemini-hpc: this training is not protected: no agent here (GEMINI_SOCKET is not set: see --gemini-replicas)"
    ]
    assert results[0]["losses"].keys() == {"1", "2", "3"}


def test_an_agent_on_some_nodes_only(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.nodes[1].die()
    run = Run(job, 2, {"kind": "ddp", "steps": 3})
    assert all(r["report"]["state"] == "unprotected" for r in run.wait())
    assert run.stderr[0].count("not protected: no agent at") == 1


def test_more_replicas_than_nodes(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    run = Run(job, 1, {"steps": 3})
    run.wait()
    assert "2 replicas asked for, but the training runs on 1 node" in run.stderr[0]


def test_an_agent_of_another_protocol_is_one_line(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.speaks = 0
    run = Run(job, 2, {"kind": "ddp", "steps": 3})
    results = run.wait()
    assert all(r["report"]["state"] == "unprotected" and len(r["losses"]) == 3 for r in results)
    lines = [line for err in run.stderr for line in err.splitlines() if line.startswith("gemini-hpc:")]
    assert len(lines) == 1 and "not protected: the training process speaks protocol 4, wanted 4" in lines[0], lines


def test_broken_links(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    run = Run(
        job, 2, {"kind": "ddp", "steps": 12, "interrupt_at": 6, "sleep_s": 0.05, "kwargs": {"seal_timeout_s": 0.5}}
    )
    results = run.wait()
    assert all(r["report"]["state"] == "degraded" for r in results)
    assert all("degraded: the link" in err for err in run.stderr)
    assert job.saw("degraded")
    assert {r["report"]["version"] for r in results} == {12}


def test_a_seal_that_never_comes_is_waited_for_once(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.seal_until = 4
    run = Run(job, 1, {"steps": 10, "sleep_s": 0.02, "kwargs": {"seal_timeout_s": 0.3}})
    result = run.wait()[0]
    assert "version 5 was not sealed within 0.3 s" in run.stderr[0]
    assert result["report"]["times"]["seal_wait_s"] < 2 * 0.3 + 0.5
    assert result["report"]["state"] == "degraded"


def test_a_slow_agent_slows_nothing_for_good(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.delay["BeginVersion"] = 0.4
    run = Run(job, 1, {"steps": 20, "sleep_s": 0.02, "kwargs": {"seal_timeout_s": 0.1}})
    result = run.wait()[0]
    assert result["report"]["version"] == 20
    assert result["report"]["unsaved"]["skipped"] > 0


def test_events_never_wait_for_the_agent(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.delay["BeginVersion"] = 2.0
    run = Run(job, 1, {"steps": 60, "sleep_s": 0.05, "kwargs": {"seal_timeout_s": 0.1}})
    report = run.wait()[0]["report"]
    assert report["unsaved"]["skipped"] > 20
    assert report["times"]["worst_step_s"] < 0.5
    assert job.saw("skipped")


def test_step_without_optimizer_step_is_warned_of_once(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    run = Run(job, 1, {"steps": 8, "twice_at": 5, "sleep_s": 0.05})
    result = run.wait()[0]
    assert result["report"]["version"] == 9
    assert run.stderr[0].count("without an optimizer step since the last one") == 1
    assert 6 not in [s.version for s in job.seals] and sealed_version(job) == 9


def test_a_parameter_changed_behind_our_back(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.stop_after(9)
    options = {"kind": "ddp", "steps": 12, "tamper_at": 6, "kwargs": {"audit": 1}}
    run = Run(job, 2, options)
    whole = run.wait()
    eager = set().union(*(r["report"]["captured"]["eager"] for r in whole))
    assert eager == {"model.blocks.0.weight"}
    assert any("model.blocks.0.weight" in e.detail for e in job.saw("changed"))
    chosen = job.requeue(lost=(1,))
    assert chosen is not None and chosen.version == 9
    resumed = train(job, 2, seed=3, **options)
    assert [r["digest"] for r in resumed] == [r["digest"] for r in whole]


@pytest.mark.parametrize("how", ["leave_at", "raise_at", "die_at"])
def test_ending_without_close(make_job: MakeJob, how: str) -> None:
    """Python must not abort over threads that wait for other ranks; and nothing says that the training succeeded."""
    job = make_job(2, 2)
    job.verdict = local.Verdict(alive=("a", "b"))
    run = Run(job, 2, {"kind": "ddp", "steps": 20, how: 6, "sleep_s": 0.02, "kwargs": {"hold_s": 0.5}})
    run.wait(codes={"leave_at": (0,), "raise_at": (1,), "die_at": (1,)}[how])
    assert not job.finished
    assert sealed_version(job) >= 4


def test_held_while_a_node_is_dead(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    job.verdict = local.Verdict(dead=("n2",), alive=("n1",))
    run = Run(job, 1, {"steps": 20, "raise_at": 3, "kwargs": {"hold_s": 30.0}})
    until(lambda: "node n2 is dead: waiting up to 30 s" in run.processes[0].read()[1], what="the hold")
    time.sleep(2.0)
    assert run.processes[0].poll() is None, "held: Slurm is to end it"
    run.processes[0].signal(signal.SIGKILL)
    run.wait(codes=(-9,))


def test_let_go_when_all_nodes_live(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    run = Run(job, 1, {"steps": 20, "raise_at": 3, "kwargs": {"hold_s": 60.0}})
    run.wait(timeout_s=40, codes=(1,))
    assert "Connection closed by peer" in run.stderr[0]
