"""One user's traffic and another's: turns at the gate to Slurm, budgets, log lines."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from gemini_hpc import clock
from gemini_hpc.logs import OneLine
from gemini_hpc.slurm.fair_queue import BEHALF, FairGate, PerUser


def test_users_take_turns() -> None:
    """A thousand calls of one user's are in the queue; another's single one is next but one."""

    async def run() -> list[tuple[int | None, int]]:
        gate, done = FairGate(2), []

        async def call(user: int | None, number: int) -> None:
            BEHALF.set(user)
            async with gate:
                await asyncio.sleep(0)
                done.append((user, number))

        flood = [asyncio.ensure_future(call(5001, n)) for n in range(1000)]
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(call(user, 0)) for user in (5002, None)]
        await asyncio.gather(*flood, *others)
        return done

    done = asyncio.run(run())
    assert {user for user, _ in done[:12]} == {5001, 5002, None}
    assert [n for user, n in done if user == 5001] == list(range(1000)), "in order for each of them"


def test_gate_keeps_its_number_whoever_gives_up() -> None:
    async def run() -> None:
        gate, inside, most = FairGate(3), 0, 0

        async def call(user: int) -> None:
            nonlocal inside, most
            BEHALF.set(user)
            async with gate:
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(0.001)
                finally:
                    inside -= 1

        for wave in range(5):
            tasks = [asyncio.ensure_future(call(n % 4)) for n in range(40)]
            await asyncio.sleep(0.002)
            for task in tasks[wave::3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 3 and inside == 0
        async with asyncio.timeout(1):
            await asyncio.gather(*(call(n) for n in range(3)))

    asyncio.run(run())


def test_tasks_work_on_behalf_of_who_started_them() -> None:
    async def run() -> list[int | None]:
        seen: list[int | None] = []

        async def look() -> None:
            seen.append(BEHALF.get())

        async def connection(user: int) -> None:
            BEHALF.set(user)
            await asyncio.ensure_future(look())
            asyncio.get_running_loop().call_later(0, lambda: seen.append(BEHALF.get()))

        await asyncio.gather(connection(1), connection(2))
        await look()
        await asyncio.sleep(0.01)
        return seen

    assert sorted(asyncio.run(run()), key=str) == [1, 1, 2, 2, None]


def test_budgets_are_per_user_and_forgotten_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    budget = PerUser(per_s=1.0, burst=10.0)
    assert [budget.take_tokens(1, 4) for _ in range(4)] == [True, True, False, False]
    assert budget.take_tokens(2, 10) and not budget.take_tokens(2)
    now += 5
    assert budget.take_tokens(1, 7) and not budget.take_tokens(1)
    now += 100
    for uid in range(5000):
        assert budget.take_tokens(uid)
        now += 1
    assert len(budget._buckets) <= 1100


def test_what_users_say_makes_no_lines_of_its_own() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(OneLine())
    log = logging.Logger("test")
    log.addHandler(handler)
    log.info("event=refused host=%s", "n1\n2026-11-21 event=down host=n2\x1b[2J\u202e\r\0")
    (line,) = out.getvalue().splitlines()
    assert line.isprintable() and r"n1\n2026" in line and r"\x1b[2J" in line
    try:
        raise ValueError("x\ny")
    except ValueError:
        log.exception("failed")
    assert "Traceback" in out.getvalue()


def test_caller_that_gives_up_at_the_moment_of_its_turn() -> None:
    async def run() -> None:
        gate = FairGate(1)

        async def call() -> None:
            async with gate:
                pass

        await gate.__aenter__()
        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        await gate.__aexit__()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        async with asyncio.timeout(1):
            await call()

    asyncio.run(run())
