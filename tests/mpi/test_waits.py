"""The cost of the waits in an MPI program's `step()`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc import clock
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.core.seal_latency import VersionTimes
from gemini_hpc.core.wait_budget import FIRST_S
from gemini_hpc.mpi.checkpointer import Checkpointer
from gemini_hpc.mpi.interval import Need, SaveInterval


class Cluster:
    """A clock that goes on while something waits. A node is missing until `back_s`; then the exchange and the seal of
    version 1 take 0.1 s each."""

    def __init__(self, back_s: float) -> None:
        self.now_s, self._back_s = 0.0, back_s
        self.page = SimpleNamespace(sealed=(0, 0), abandoned=(0, 0), is_stuck=back_s > 0)
        self.exchange: Any = SimpleNamespace(over=False, advance=lambda: True)

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.page.is_stuck = self.now_s < self._back_s
        self.exchange.over = self.now_s >= self._back_s + 0.1
        self.page.sealed = (3, 1) if self.now_s >= self._back_s + 0.2 else (0, 0)


@pytest.fixture(params=[0.0, 8.0])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    found = Cluster(request.param)
    clock.use(found)
    yield found
    clock.use(None)


class Program:
    """A rank in the `step()` after that of version 1."""

    def __init__(self, cluster: Cluster, exchange: Any) -> None:
        nothing = lambda *_: None  # noqa: E731
        self.costs: list[float] = []
        self.interval = SaveInterval(0, 0.01, 0, nothing, lambda: (cluster.page.sealed, cluster.now_s))
        self.interval.record_cost = self.costs.append  # type: ignore[method-assign]
        self.interval.latency.begin_version(VersionTimes(1, taken_at=0.0))
        met = SimpleNamespace(ready=True, lost="", need=Need())
        ckpt: Any = Checkpointer.__new__(Checkpointer)
        ckpt._interval, ckpt._exchange, ckpt._last, ckpt._resumed, ckpt._lost = self.interval, exchange, 1, True, ""
        ckpt._waited_s = ckpt._cost_s = 0.0
        ckpt._kept, ckpt._lock = {0: None}, threading.RLock()
        ckpt._slots = {0: SimpleNamespace(begin=lambda version: 0)}
        ckpt._calls = SimpleNamespace(meet=lambda *_, **__: [met], report_difference=lambda calls: False)
        ckpt._save = nothing
        ckpt._session = SimpleNamespace(
            version=2,
            protected=True,
            gate=SealGate(lambda: cluster.page, lambda: False, 3, 60.0, nothing, nothing),
            seal_timeout_s=1.5,
            count_step=nothing,
            report_first_iteration=nothing,
            report_first_seal=nothing,
            end_protection=pytest.fail,
        )
        self.step = ckpt._step


@pytest.mark.parametrize("during", ["exchange", "seal"])
def test_seconds_in_which_a_node_is_missing_are_no_cost_of_a_version(cluster: Cluster, during: str) -> None:
    """They neither use up the program's patience nor make versions rarer. The exchange ends the wait nevertheless."""
    program = Program(cluster, cluster.exchange if during == "exchange" else SimpleNamespace(over=True))
    is_missing = cluster.page.is_stuck
    program.step()
    own_s = 0.0 if is_missing and during == "exchange" else 0.2
    assert cluster.page.sealed == ((3, 1) if own_s else (0, 0))
    assert own_s or cluster.now_s == pytest.approx(FIRST_S, abs=0.1)
    assert program.interval.patience_s == pytest.approx(FIRST_S - own_s, abs=0.01)
    assert program.costs == ([pytest.approx(own_s, abs=0.01)] if own_s else [])  # nothing was begun


def test_a_version_is_not_late_while_a_node_is_missing(cluster: Cluster) -> None:
    program = Program(cluster, SimpleNamespace(over=False, advance=lambda: False))
    program.step()
    late_s = 0.0 if cluster.page.is_stuck else cluster.now_s
    assert program.interval.latency.whole_s == pytest.approx(late_s)
