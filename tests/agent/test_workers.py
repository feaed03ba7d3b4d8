"""Processes that the supervisor forks for an agent: with the right descriptors, out of reach, gone with the agent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini_hpc.agent.tier import worker_process, workers
from gemini_hpc.agent.tier.workers import WORKERS_MAX, NoWorker
from gemini_hpc.tier import orders
from gemini_hpc.tier.errors import TierFailed
from tests.agent.supervising import supervisor


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 10)[0])


def test_descriptors_have_the_numbers_that_were_asked_for() -> None:
    """More than the kernel passes at once, in an order that would overwrite each other."""
    own = [os.memfd_create(f"part {n}") for n in range(450)]
    for n, fd in enumerate(own):
        os.write(fd, str(n).encode())
    out, into = os.pipe()
    numbers = {1: into, **{100 + n: fd for n, fd in enumerate(reversed(own))}}

    def work(_: int) -> int:
        found = [os.pread(100 + n, 10, 0).decode() for n in range(450)]
        others = [n for n in range(3, 2000) if n not in numbers and _is_open(n)]
        os.write(1, f"{found == [str(n) for n in reversed(range(450))]} {others}".encode())
        return 0

    with supervisor(work) as (channel, _):
        pidfd = channel.start(numbers)
        assert ended(pidfd)
        assert os.read(out, 1000) == b"True []"
        os.close(pidfd)
    for fd in (*own, out, into):
        os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_worker_ends_with_its_agent() -> None:
    with supervisor(lambda _: signal.pause() or 0) as (channel, mine):
        pidfds = [channel.start({}) for _ in range(3)]
        assert not select.select(pidfds, [], [], 0.1)[0]
        mine.close()
        assert all(ended(pidfd) for pidfd in pidfds)
        for pidfd in pidfds:
            os.close(pidfd)


@pytest.mark.slow
def test_too_many_at_once_are_refused() -> None:
    with supervisor(lambda _: signal.pause() or 0) as (channel, _):
        pidfds = [channel.start({}) for _ in range(WORKERS_MAX)]
        with pytest.raises(NoWorker, match="already running"):
            channel.start({})
        for pidfd in pidfds:
            os.close(pidfd)


def test_supervisor_that_is_gone_is_said() -> None:
    with supervisor(lambda _: 0) as (channel, mine):
        mine.sock.close()
        with pytest.raises(NoWorker):
            channel.start({})


SHUT = """
import os, sys
from gemini_hpc.node import privileges
from gemini_hpc.agent.tier.workers import Workers, SupervisorChannel
os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
privileges.close_to_owner()
workers = Workers(lambda _: os.write(1, f"traceable={privileges.is_traceable()} {sys.argv[0]}".encode()) and 0)
import threading
threading.Thread(target=workers.serve, daemon=True).start()
pidfd = SupervisorChannel(workers.theirs).start({1: 1})
os.waitpid(-1, 0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_worker_is_as_shut_as_who_forked_it() -> None:
    done = subprocess.run([sys.executable, "-c", SHUT], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("traceable=False"), done


def test_orders_for_the_tier(tmp_path: Path) -> None:
    """From the agent to the worker and back: an answer, a failure, and a worker that is ended while it works."""

    async def run() -> None:
        with supervisor(workers.run_tier_worker) as (channel, mine):
            worker_process.use(channel)
            found = await worker_process.carry_out(orders.Look(str(tmp_path), 5, "", (), begin=True, make=False))
            assert found == orders.Found(())
            with pytest.raises(TierFailed, match="nowhere"):
                await worker_process.carry_out(orders.Look(f"{tmp_path}/nowhere", 5, "", (), begin=False, make=False))
            task = asyncio.ensure_future(worker_process.carry_out(orders.Clean(str(tmp_path / "slow"), 5, "default")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert all(ended(pidfd) for pidfd in mine.list_pidfds())

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    with pytest.raises(TierFailed, match="supervisor"):
        asyncio.run(worker_process.carry_out(orders.Look(str(tmp_path), 5, "", (), begin=False, make=False)))
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture(autouse=True)
def _no_supervisor_afterwards() -> Iterator[None]:
    yield
    worker_process._supervisor.clear()
