"""The pace of a training whose reports have waited for an agent."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc import clock
from gemini_hpc.agent.rank_requests import RankRequests
from gemini_hpc.agent.replicas.pace import VersionGaps
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.wire import local
from gemini_hpc.wire.inspect_schema import PaceState


class Host:
    """The clocks of a host."""

    def __init__(self) -> None:
        self.s = 5000

    def monotonic_ns(self) -> int:
        return self.s * 10**9

    def time(self) -> float:
        return 1.7e9 + self.s

    def sleep(self, seconds: float) -> None:
        self.s += int(seconds)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    clock.use(made)
    yield made
    clock.use(None)


def test_reports_that_come_together_are_as_far_apart_as_their_versions(host: Host) -> None:
    """Report ten iterations of 10 s at once, to an agent that has begun after 100 s."""
    training, client = Training("default"), object()
    training.present[0] = client  # type: ignore[assignment]
    requests: Any = SimpleNamespace(
        _sessions=SimpleNamespace(find_rank=lambda _: (training, 0)), _keepers={}, _leave_out=lambda *_: None
    )
    try:
        for name, version in [("void", 11), *(("skipped", version) for version in range(12, 21))]:
            event = local.Event(name, version, host.time() - 10.0 * (21 - version))
            RankRequests._on_event(requests, client, event)  # type: ignore[arg-type]
        assert training.pace.build_state() == PaceState(10.0, 10.0, 10.0)
    finally:
        training.close()


@pytest.mark.parametrize("age_s", [-1.0, -1e9, 25.0, 1e9])
def test_an_impossible_age_makes_no_gap(host: Host, age_s: float) -> None:
    """Report a time in the future, or one before the version that was begun 20 s ago."""
    pace = VersionGaps()
    pace.record_version(1)
    host.s += 10
    pace.record_version(2)
    host.s += 20
    pace.record_version(3, age_s)
    assert pace.build_state() == PaceState(0.0, 10.0, 10.0)
    host.s += 12
    pace.record_version(4)
    assert pace.build_state() == PaceState(0.0, 11.0, 12.0)


@pytest.mark.parametrize("age_s", [-1.0, 3601.0, 1.7e9])
def test_a_first_version_of_an_impossible_age_is_begun_now(host: Host, age_s: float) -> None:
    pace = VersionGaps()
    pace.record_version(1, age_s)
    host.s += 10
    pace.record_version(2)
    assert pace.build_state() == PaceState(0.0, 10.0, 10.0)
