"""One rank's plan: what of an idle span it uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemini_hpc.core import spans
from gemini_hpc.core.spans import Op, Profile, Trace
from gemini_hpc.train.schedule.chunk_schedule import PAUSE_S, REACTION_S, Route, cut_beginnings
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.planner import Planner
from gemini_hpc.train.schedule.stats_reporter import CachedProfile
from gemini_hpc.train.schedule.traffic import Traffic

B, ALPHA = 1e8, 1e-4
TRAFFIC = Traffic(chunk_bytes=1 << 20)
MB, GBIT = 1 << 20, 1e9 / 8


def profile(idle_s: float = 0.05) -> Profile:
    """Ten collectives of 50 ms, each followed by so long without."""
    ops = tuple(Op(7, 1000, (0.05 + idle_s) * k, (0.05 + idle_s) * k + 0.05) for k in range(10))
    length_s = 10 * (0.05 + idle_s)
    trace = Trace(0.0, length_s, length_s - 0.01, ops)
    return spans.summarize_traces([trace] * 3)


def planned(
    shard_bytes: int, *, on_host: bool = True, every: int = 0, idle_s: float = 0.05
) -> tuple[Route, tuple[int, int]]:
    """What a planner that has remembered this profile plans for, and the j and s that it wants."""
    planner = remembering(TRAFFIC, shard_bytes, B, on_host=on_host, every=every, idle_s=idle_s)
    wanted = planner.choose_interval(1, fresh=True)
    found = planner.build_route("gemini")
    assert found is not None
    return found, wanted


def remembering(
    traffic: Traffic, shard_bytes: int, B: float, *, every: int = 0, idle_s: float = 0.05, **more: bool
) -> Planner:
    """One that has an earlier incarnation's profile, and its link."""
    traffic = replace(traffic, every=every)
    kept = CachedProfile(profile(idle_s), [(profile(idle_s), 0.0)], B, ALPHA)
    planner = Planner(traffic, 0, (1,), shard_bytes, LinkMeter(), kept, **more)
    assert planner.remember([planner.encode_kept(), planner.encode_kept()])
    return planner


def route(shard_bytes: int, *, on_host: bool = True, every: int = 0, idle_s: float = 0.05) -> Route:
    """The first of these."""
    return planned(shard_bytes, on_host=on_host, every=every, idle_s=idle_s)[0]


def test_the_beginning_of_a_span_is_left_to_a_host_that_computes() -> None:
    windows = route(int(0.2 * B)).windows
    assert sum(w.length_s >= 0.035 for w in windows) >= 9
    assert all(w.delay_s == PAUSE_S for w in windows if w.length_s >= 0.035)


def test_not_of_a_device_that_computes() -> None:
    assert all(w.delay_s == 0.0 for w in route(int(0.2 * B), on_host=False).windows)


@pytest.mark.parametrize(("used", "every"), [(0.38, 0), (0.38, 1), (0.43, 0), (0.43, 1), (0.9, 1), (1.55, 4)])
def test_not_where_it_would_cost_protection_or_a_wait(used: float, every: int) -> None:
    """Nor where it would only just not cost one: what is relied on must hold a tenth more than a copy."""
    assert all(w.delay_s == 0.0 for w in route(int(used * B), every=every).windows)


def test_short_spans_keep_most_of_their_length_and_late_ones_begin_as_late() -> None:
    short, late = spans.Window(0, 1, True, 0.0, 0.008), spans.Window(1, 2, True, 0.003, 0.1)
    one, other = cut_beginnings([short, late], 1 / 8)
    assert (one.delay_s, one.length_s) == (0.001, 0.007)
    assert (other.delay_s, other.length_s) == (PAUSE_S, pytest.approx(0.1 - (PAUSE_S - 0.003)))
    assert cut_beginnings([late._replace(delay_s=0.01)], 1 / 4) == (late._replace(delay_s=0.01),)


@pytest.mark.parametrize(("used", "share"), [(0.08, 1 / 4), (0.1, 1 / 5), (0.105, 1 / 6), (0.11, 1 / 8), (0.12, 0.0)])
def test_as_much_is_left_out_as_there_is_time_to_spare(used: float, share: float) -> None:
    """Ten spans of 16 ms, one of them up to the optimizer's step."""
    windows = route(int(used * B), idle_s=0.016).windows
    pauses = [w.delay_s for w in windows if w.length_s >= 0.01]
    assert pauses == [pytest.approx(share * 0.016)] * len(pauses)
    assert len(pauses) >= 9


@pytest.mark.parametrize(
    ("used", "every", "wanted", "share"),
    [
        (0.37, 0, (3, 3), 0.0),  # saved every third iteration, with nothing to spare: not every fourth
        (0.5, 0, (5, 5), 1 / 4),  # every fifth instead of every fourth
        (0.5, 4, (4, 4), 0.0),  # but not where every fourth is asked for
        (0.45, 0, (4, 4), 1 / 8),  # nor where enough can be left out so
    ],
)
def test_versions_that_are_saved_rarely_are_so_one_iteration_more_rarely_to_leave_beginnings_out(
    used: float, every: int, wanted: tuple[int, int], share: float
) -> None:
    found, js = planned(int(used * B), every=every, idle_s=0.016)
    assert js == wanted
    pauses = [w.delay_s for w in found.windows if w.length_s >= 0.01]
    assert len(pauses) >= 9 and pauses == [pytest.approx(share * 0.016)] * len(pauses)


def test_who_begins_later_anyway_loses_nothing_to_the_reaction() -> None:
    found = route(int(0.2 * B))
    for window, usable in zip(found.windows, found.usable, strict=True):
        lost_s = max(0.0, REACTION_S - window.delay_s) + found.alpha - found.start_s
        assert usable.length_s == pytest.approx(max(0.0, window.length_s - lost_s))
    assert any(w.delay_s > REACTION_S for w in found.windows)


def cut(
    rate: float, *, chunk_bytes: int = 0, buffers: int = 4, shard_bytes: int = 1 << 33, **more: bool
) -> tuple[int, int]:
    """Bytes of a chunk, and how many at a time, on a link of so many bytes per second."""
    traffic = replace(TRAFFIC, chunk_bytes=chunk_bytes, buffers=buffers)
    return remembering(traffic, shard_bytes, rate, **more).cut


@pytest.mark.parametrize(("gbit", "chunk"), [(1, 1), (10, 2), (25, 4), (100, 16), (400, 32)])
def test_a_chunk_follows_the_link(gbit: int, chunk: int) -> None:
    """Its start costs some 0.3 ms of processors; it takes several times as long, but where R is at its bound."""
    size, p = cut(gbit * GBIT, whole=True)
    assert (size, p) == (chunk * MB, 4)
    assert size / (gbit * GBIT) > 0.0006
    assert size * p <= 128 * MB


def test_a_slow_link_has_smaller_chunks_in_the_same_memory() -> None:
    assert cut(0.1 * GBIT, shard_bytes=1 << 30) == (MB // 16, 64)
    assert cut(0.1 * GBIT, whole=True) == (MB, 4), "each is cut to what is left of its span"


def test_a_chunk_that_the_user_has_chosen_is_never_larger() -> None:
    assert cut(400 * GBIT, chunk_bytes=3 * MB, whole=True) == (3 * MB, 4)
    assert cut(0.1 * GBIT, chunk_bytes=3 * MB)[0] < 3 * MB


@pytest.mark.parametrize("buffers", [1, 2, 3, 16, 1000])
def test_the_memory_of_chunks_is_bounded(buffers: int) -> None:
    size, p = cut(400 * GBIT, buffers=buffers)
    assert p == buffers and (size * p <= 128 * MB or size == MB)


def test_a_small_shard_is_still_sent_in_several_chunks() -> None:
    assert cut(400 * GBIT, shard_bytes=40 * MB)[0] == 4 * MB


def test_mu_is_the_share_of_a_span_that_is_planned_with() -> None:
    fitting = {}
    for mu in (0.5, 1.0):
        planner = remembering(replace(TRAFFIC, mu=mu), int(B), B, every=1)
        planner.choose_interval(1, fresh=True)
        found = planner.build_route("gemini")
        assert found is not None and found.mu == mu
        fitting[mu] = found.plan(1).fitting_bytes
    assert fitting[0.5] == pytest.approx(0.5 * fitting[1.0], rel=0.02)


@pytest.mark.parametrize(("name", "value"), [("mu", 0.0), ("mu", 1.01), ("chunk_bytes", 4095), ("chunk_bytes", -1)])
def test_what_cannot_be_chosen(name: str, value: float) -> None:
    changed: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        replace(TRAFFIC, **changed)
