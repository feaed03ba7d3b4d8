"""What an agent measures of its own processors, and what it tells its ranks and `inspect`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent import cpu_use
from gemini_hpc.agent.cpu_use import CpuUse, compute_allowed_cores
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.cli import inspect
from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp


class Agent:
    """An agent of one shard of 2 GB; `used_s` is what its process has used."""

    def __init__(self, cores: float = 0.5) -> None:
        self.used_s = 100.0
        self.slots: list[Any] = []
        shard = SimpleNamespace(training="default", pair=SimpleNamespace(slots=self.slots))
        store: Any = SimpleNamespace(list_all=lambda: [shard])
        self.training = Training("default")
        self.use = CpuUse(Settings(agent_cores=cores), store, lambda: self.used_s)

    def seal(self, version: int, taken_s: float, epoch: int = 1) -> tuple[float, float]:
        """Seal a version that has taken so much, and return what the ranks see."""
        self.used_s += taken_s
        stamp = Stamp(epoch, version)
        self.slots[:] = [SimpleNamespace(stamp=stamp, bytes_used=2 * 10**9)]
        self.use.record_seal(self.training, stamp)
        self.use.record_seal(self.training, stamp)  # told twice
        return self.training.page.cpu


@pytest.fixture
def agent() -> Iterator[Agent]:
    """One whose training ends with the test."""
    made = Agent()
    yield made
    made.training.close()


def test_ranks_see_what_a_version_takes_and_may_take(agent: Agent) -> None:
    """The median of the latest ones, once there are some: the first also map memory."""
    assert [agent.seal(version, 9.0) for version in (1, 2, 3)] == [(0.0, 0.0)] * 3
    assert agent.seal(4, 1.0) == (9.0, 0.5)
    for version in range(5, 12):
        seen = agent.seal(version, 1.0 + 10 * (version == 7))
    assert seen == (1.0, 0.5)


def test_a_recovery_is_no_version(agent: Agent) -> None:
    """Count nothing that an incarnation takes before its first seal."""
    for version in range(1, 6):
        agent.seal(version, 1.0)
    assert agent.seal(6, 60.0, epoch=2) == agent.seal(7, 1.0, epoch=2) == (1.0, 0.5)
    assert agent.use.build_state().version_s == 1.0
    assert sum(agent.use._versions["default"].taken_s) == 5.0


def test_inspect_has_the_average_and_the_gigabyte(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Average over the last minute, whatever the agent did in it."""
    now = [1000.0]
    monkeypatch.setattr(cpu_use.clock, "monotonic", lambda: now[0])
    state = agent.use.build_state()
    assert (state.cores, state.version_s, state.gb_s) == (0.0, None, None)
    for _ in range(200):
        agent.use.take_sample(now[0])
        now[0] += 1.0
        agent.used_s += 0.25
    assert agent.use.build_state().cores == pytest.approx(0.25)
    for version in (1, 2, 3):
        agent.seal(version, 3.0)
    state = agent.use.build_state()
    assert (state.version_s, state.gb_s, state.allowed_cores) == (3.0, 1.5, 0.5)


def test_the_bound_is_the_sites_or_a_share_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, share in ((2, 0.5), (8, 0.5), (64, 4.0)):
        monkeypatch.setattr(cpu_use.os, "cpu_count", lambda cores=cores: cores)
        assert compute_allowed_cores(Settings()) == share
    assert compute_allowed_cores(Settings(agent_cores=0.25)) == 0.25


def test_the_process_itself_is_measured() -> None:
    """All of its threads."""
    before_s = cpu_use._measure_core_seconds()
    sum(range(2_000_000))
    assert cpu_use._measure_core_seconds() > before_s


def test_inspect_names_the_busiest_agent() -> None:
    """One sentence; none where no agent tells (an older one)."""
    idle = {"host": "n1", "cpu": {"cores": 0.02, "allowed_cores": 0.5, "version_s": None, "gb_s": None}}
    busy = {"host": "n2", "cpu": {"cores": 0.31, "allowed_cores": 0.5, "version_s": 1.25, "gb_s": 0.42}}
    assert inspect._describe_cpu([{"host": "n0", "cpu": None}, {"host": "n3"}]) == ""
    assert inspect._describe_cpu([idle]) == "processors: the agent on n1 uses 0.02 cores of the 0.5 that it may"
    expected = "on n2 uses 0.31 cores of the 0.5 that it may; 1.2 core-seconds a version, 0.42 a GB of copies"
    assert inspect._describe_cpu([idle, busy]).endswith(expected)
