"""The least cost of a version, and its time to the seal."""

from __future__ import annotations

from gemini_hpc.core.seal_latency import SealLatency, VersionTimes
from gemini_hpc.core.version_cost import VersionCost


def test_three_versions_make_a_cost_known() -> None:
    cost = VersionCost()
    for seconds in (0.003, 0.001):
        cost.add_capture(seconds)
        cost.add_wait(seconds)
        assert not cost.known and cost.whole_s == 0.0
    cost.add_capture(0.2)
    assert cost.known and (cost.seconds, cost.held_s) == (0.001, 0.0)
    cost.add_wait(0.3)
    assert cost.whole_s == 0.002
    for _ in range(3):
        cost.add_capture(0.5)
    assert cost.seconds == 0.5, "it has grown"


def test_a_short_one_is_negligible_where_it_may_be_noise() -> None:
    cost = VersionCost(0.002)
    for _ in range(3):
        cost.add_capture(0.001)
        cost.add_wait(0.004)
    assert cost.known and (cost.seconds, cost.held_s, cost.usual_s) == (0.0, 0.004, 0.0)


def test_a_version_without_a_seal_counts_as_it_is_so_far_where_that_is_asked_for() -> None:
    seal = [(1, 6), 9.0]
    latency = SealLatency(lambda: (seal[0], seal[1]))  # type: ignore[arg-type,return-value]
    latency.poll(10.0)
    latency.begin_version(VersionTimes(7, taken_at=10.0))
    latency.poll()
    assert latency.whole_s == 0.0
    latency.poll(10.5)
    assert latency.whole_s == 0.5
    seal[:] = [(1, 7), 10.75]
    for _ in range(2):
        latency.poll(11.0)
    assert latency.whole_s == 0.75, "once, by its seal"
    seal[:] = [(1, 9), 12.0]
    latency.begin_version(VersionTimes(8, taken_at=11.0))
    latency.poll(12.5)
    assert latency.whole_s == 0.75, "a newer one is sealed: this one never will be"
