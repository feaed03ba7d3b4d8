"""Tasks in the background: none dies unnoticed, none is started again without a pause."""

from __future__ import annotations

import asyncio
import errno
import time
from itertools import pairwise

import pytest

from gemini_hpc.controller import probe, tasks
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.probe import ProbeHistory, ProbeResult, RepeatedProbe, Target


def test_a_task_that_dies_is_told_and_started_again_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(tasks, "MAX_PAUSE_S", 0.1)
    starts, told = list[float](), list[str]()

    async def work() -> None:
        starts.append(time.monotonic())
        if len(starts) < 6:
            raise ValueError(f"fault {len(starts)}")

    asyncio.run(tasks.supervise("work", work, told.append))
    assert told == ["work: ValueError"] * 5
    pauses = [b - a for a, b in pairwise(starts)]
    assert all(pause >= least for pause, least in zip(pauses, (0.02, 0.04, 0.08, 0.1, 0.1), strict=True))


def test_a_death_that_cannot_be_told_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.02)
    starts = list[int]()

    async def work() -> None:
        starts.append(1)
        if len(starts) < 4:
            raise ValueError("a fault of ours")

    def full(why: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asyncio.run(tasks.supervise("work", work, full))
    assert len(starts) == 4 and caplog.text.count("event=task-death-not-told detail=work: ValueError") == 3


def test_cancelled_is_not_dead() -> None:
    told = list[str]()

    async def run() -> None:
        task = tasks.start("work", lambda: asyncio.sleep(60), told.append)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not told


def test_a_fault_on_the_way_out_is_no_reason_to_begin_again() -> None:
    told, starts = list[str](), list[int]()

    async def work() -> None:
        starts.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("I/O operation on closed file")

    async def run() -> None:
        task = tasks.start("work", work, told.append)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        assert task.cancelled()

    asyncio.run(run())
    assert not told and len(starts) == 1


def test_probes_that_die_are_told_and_what_nobody_looks_at_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence that grows by itself while nobody probes would fence a node that has come back."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(ProbeHistory, "STALE_S", 0.3)
    calls, told = list[int](), list[str]()

    async def faulty(target: Target) -> ProbeResult:
        calls.append(1)
        if len(calls) > 3:
            raise OSError("a fault of ours")
        return ProbeResult(Port.SILENT, Port.SILENT, Port.SILENT)

    monkeypatch.setattr(probe, "probe_node", faulty)

    async def run() -> tuple[float, float]:
        series = RepeatedProbe(Target("n1", 1, (2,), range(3, 5)), told.append)
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        seen = series.silent_s
        await asyncio.sleep(0.8)
        later = series.silent_s
        series.stop()
        return seen, later

    seen, later = asyncio.run(run())
    assert seen > 0 and later == 0.0 and len(told) >= 2


def test_what_counts_as_a_sign_of_life() -> None:
    for port in (Port.ANSWERS, Port.REFUSES, Port.HANGS):
        seen = ProbeHistory()
        now = time.monotonic()
        seen.add_result(ProbeResult(Port.SILENT, Port.SILENT, Port.SILENT), now - 5)
        assert seen.silent_s >= 5
        seen.add_result(ProbeResult(Port.SILENT, Port.SILENT, port), now)
        assert seen.silent_s == 0.0 and seen.judge_port("kernel") is port
        assert seen.slurmd_silent_s >= 5 and seen.judge_port("slurmd") is Port.SILENT
    assert ProbeHistory().silent_s == 0.0


def test_what_has_been_silent_long_enough_does_not_answer_any_more() -> None:
    """A survivor that has just died is judged by its silence, not by what it said before."""
    seen, now = ProbeHistory(confirm_s=0.05), time.monotonic()
    seen.add_result(ProbeResult(Port.ANSWERS, Port.ANSWERS, Port.ANSWERS), now)
    assert seen.judge_port("slurmd") is Port.ANSWERS
    time.sleep(0.02)
    seen.add_result(ProbeResult(Port.SILENT, Port.SILENT, Port.SILENT), time.monotonic())
    time.sleep(0.06)
    assert seen.silent_s >= 0.05 and {seen.judge_port(what) for what in probe.PORTS} == {Port.SILENT}


def test_a_kernel_refuses_where_nobody_listens() -> None:
    found = asyncio.run(probe.probe_node(Target("127.0.0.1", 61000, (61001,), range(61002, 61064))))
    assert {found.slurmd, found.agent, found.kernel} == {Port.REFUSES}
