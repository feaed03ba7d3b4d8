"""One rank's plan: what of an idle span it uses."""

from __future__ import annotations

import pytest

from gemini_hpc.core import spans
from gemini_hpc.core.spans import Op, Profile, Trace
from gemini_hpc.train.arguments import Choices
from gemini_hpc.train.link import LinkMeter
from gemini_hpc.train.planner import Planner
from gemini_hpc.train.teller import Kept
from gemini_hpc.train.timetable import PAUSE_S, REACTION_S, Route, settled

B, ALPHA = 1e8, 1e-4


def profile(idle_s: float = 0.05) -> Profile:
    """Ten collectives of 50 ms, each followed by so long without."""
    ops = tuple(Op(7, 1000, (0.05 + idle_s) * k, (0.05 + idle_s) * k + 0.05) for k in range(10))
    length_s = 10 * (0.05 + idle_s)
    trace = Trace(0.0, length_s, length_s - 0.01, ops)
    return spans.summarize([trace] * 3)


def planned(
    shard_bytes: int, *, on_host: bool = True, every: int = 0, idle_s: float = 0.05
) -> tuple[Route, tuple[int, int]]:
    """What a planner that has remembered this profile plans for, and the j and s that it wants."""
    choices = Choices("t", 1, 1.5, 0, "split", 60.0, 1 << 20, 4, "gemini", every, 0.01)
    kept = Kept(profile(idle_s), [(profile(idle_s), 0.0)], B, ALPHA)
    planner = Planner(choices, 0, (1,), shard_bytes, LinkMeter(), kept, on_host=on_host)
    assert planner.remember([planner.kept(), planner.kept()])
    wanted = planner.want(1, fresh=True)
    found = planner.route("gemini")
    assert found is not None
    return found, wanted


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
    one, other = settled([short, late], 1 / 8)
    assert (one.delay_s, one.length_s) == (0.001, 0.007)
    assert (other.delay_s, other.length_s) == (PAUSE_S, pytest.approx(0.1 - (PAUSE_S - 0.003)))
    assert settled([late._replace(delay_s=0.01)], 1 / 4) == (late._replace(delay_s=0.01),)


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
