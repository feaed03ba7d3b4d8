"""A pull from the tier: which failures say that a version is bad, and which say nothing about it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.memory import Budget
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.tier import worker_process, workers
from gemini_hpc.agent.transfer.pull import PullFailed
from gemini_hpc.agent.transfer.pull_scheduler import PullScheduler
from gemini_hpc.config import Settings
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import digest_bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from tests.agent.supervising import supervisor

from .contexts import made_context

COPY = Copy("default", 0, 1, 0, 4096, 4096, Stamp(1, 5), digest_bytes(b""))


@pytest.fixture(autouse=True)
def no_supervisor_afterwards() -> Iterator[None]:
    yield
    worker_process._supervisor.clear()


def pull_by(work: Callable[[int], int], tier: Path) -> tuple[set[Any], str]:
    """Return the versions that count as unreadable after a pull by such a worker, and why the pull failed."""
    attach = SimpleNamespace(key="", cluster="dev")
    incarnation: Any = SimpleNamespace(attach=attach, rounds=SimpleNamespace(plan=None))
    choice: Any = SimpleNamespace(directory=str(tier))
    nobody: Any = None
    membership = Membership()
    membership.incarnation = incarnation

    async def run() -> tuple[set[Any], str]:
        store = Store(Budget(Settings()))
        pulls = PullScheduler(made_context(membership), store, nobody, choice, nobody)
        with supervisor(work) as (channel, _), pytest.raises(PullFailed) as failure:
            worker_process.use(channel)
            await pulls._join_pull(COPY, (peer.TIER,), keep=False)
        return pulls.unreadable, str(failure.value)

    return asyncio.run(run())


def test_a_worker_that_dies_says_nothing_about_the_version(tmp_path: Path) -> None:
    unreadable, reason = pull_by(lambda parent: os._exit(1), tmp_path)
    assert reason == "the tier process ended without an answer"
    assert not unreadable, "the next round takes it again"


def test_a_version_that_is_gone_is_left_out(tmp_path: Path) -> None:
    unreadable, reason = pull_by(workers.run_tier_worker, tmp_path)
    assert "no longer has the shard of rank 0 of version 5" in reason
    assert unreadable == {("default", COPY.stamp)}
