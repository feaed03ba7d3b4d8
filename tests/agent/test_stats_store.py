"""What ranks tell of their traffic and give to keep: bounded, shown, and there after recovery rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import pytest

from gemini_hpc.agent import stats_store
from gemini_hpc.agent.stats_store import OverheadSeries, StatsStore
from gemini_hpc.wire import local
from gemini_hpc.wire.inspect_schema import RecordAsk
from gemini_hpc.wire.traffic import MAX_CHUNKS, MAX_OPS, Chunk, Operation, TimelineState, TrafficState

from .conftest import JOB, AgentProcess

KEY, OTHER = "0" * 32, "1" * 32
Make = Callable[..., AgentProcess]
STATE = TrafficState(1.0, "gemini", "gloo", "steady", overhead=0.01)
LARGEST = TimelineState(
    1,
    1.0,
    1.0,
    tuple(Operation("n" * 32, 0.1, 0.2, 1 << 49) for _ in range(MAX_OPS)),
    tuple(Chunk(0.1, 0.2, 1 << 49, 1) for _ in range(MAX_CHUNKS)),
)


def told(t: float = 1.0, overhead: float | None = 0.01, j: int = 1) -> TrafficState:
    return msgspec.structs.replace(STATE, t=t, overhead=overhead, j=j)


def test_the_newest_is_shown_and_every_overhead_joins_the_series() -> None:
    kept = StatsStore()
    for t, overhead, j in ((1.0, None, 1), (2.0, 0.5, 1), (3.0, 0.1, 4)):
        kept.store_traffic("a", 3, told(t, overhead, j))
    kept.store_traffic("a", 1, told(9.0, 0.2), saved=12)
    kept.store_traffic("b", 3, told(9.0, 0.9))
    assert kept.list_summaries("a", {3, 1, 7}) == ((1, told(9.0, 0.2)), (3, told(3.0, 0.1, 4)))
    record = kept.build_record(RecordAsk("a", 3))
    assert record is not None and record.timeline is None
    assert [(p.t, p.overhead, p.j) for p in record.series] == [(2.0, 0.5, 1), (3.0, 0.1, 4)]
    other = kept.build_record(RecordAsk("a", 1))
    assert other is not None and [p.saved for p in other.series] == [12]
    assert kept.build_record(RecordAsk("a", 2)) is None


def test_a_new_process_of_a_rank_begins_without_a_summary_but_with_what_was_kept() -> None:
    kept = StatsStore()
    kept.store_traffic("a", 0, told())
    kept.store_data("a", 0, KEY, b"profile")
    kept.drop_summary("a", 0)
    kept.drop_summary("a", 5)
    assert kept.list_summaries("a", {0}) == ()
    assert kept.recall("a", 0, KEY) == b"profile"
    record = kept.build_record(RecordAsk("a", 0))
    assert record is not None and len(record.series) == 1


def test_another_key_drops_what_was_kept() -> None:
    kept = StatsStore()
    assert kept.recall("a", 0, KEY) is None
    kept.store_data("a", 0, KEY, b"profile")
    assert kept.recall("a", 1, KEY) is None and kept.recall("b", 0, KEY) is None
    assert kept.recall("a", 0, KEY) == b"profile" == kept.recall("a", 0, KEY)
    assert kept.recall("a", 0, OTHER) is None
    assert kept.recall("a", 0, KEY) is None, "for another model or other hosts: it is of no use any more"
    kept.store_data("a", 0, KEY, b"1")
    kept.store_data("a", 0, OTHER, b"2")
    assert kept.recall("a", 0, OTHER) == b"2" and kept.recall("a", 0, KEY) is None


def test_the_series_is_bounded_and_keeps_its_ends() -> None:
    series = OverheadSeries()
    for n in range(100_000):
        series.add(float(n), 0.1, 1, n)
        assert len(series) <= stats_store.MAX_POINTS
    times = [p.t for p in series.list_points()]
    assert times[0] == 0.0 and times[-1] == 99_999.0 and times == sorted(times)
    assert len(times) > stats_store.MAX_POINTS // 2
    assert times[-100:] == [float(n) for n in range(99_900, 100_000)], "the newest are all there"


def test_all_together_are_bounded_and_the_longest_silent_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_store, "MAX_TOTAL_BYTES", 1 << 20)
    kept = StatsStore()
    for rank in range(200):
        kept.store_data("a", rank, KEY, b"x" * local.MAX_KEPT_BYTES)
        kept.store_traffic("a", 0, told(float(rank)))
        assert kept._bytes == sum(r.size_bytes for r in kept._ranks.values()) <= 1 << 20
    assert kept.recall("a", 0, KEY) is not None, "it told something all the time"
    assert kept.recall("a", 1, KEY) is None and kept.recall("a", 199, KEY) is not None


def test_a_rank_has_a_size() -> None:
    kept = StatsStore()
    kept.store_data("a", 0, KEY, b"x" * local.MAX_KEPT_BYTES)
    kept.store_timeline("a", 0, LARGEST)
    for n in range(1000):
        kept.store_traffic("a", 0, told(float(n)))
    assert kept._bytes == kept._ranks["a", 0].size_bytes < 128 << 10
    record = kept.build_record(RecordAsk("a", 0))
    assert record is not None and record.timeline == LARGEST


def test_a_picture_has_a_size() -> None:
    kept = StatsStore()
    ranks = range(2 * stats_store.MAX_SHOWN)
    for rank in ranks:
        kept.store_traffic("a", rank, msgspec.structs.replace(told(), problem="\U0001f600" * 300))
    states = kept.list_summaries("a", ranks)
    assert len(states) == stats_store.MAX_SHOWN and states[0][0] == 0
    assert len(msgspec.msgpack.encode(states)) < 3 << 20


# ---- by the agent itself -------------------------------------------------------------------------------


def test_kept_across_rounds_and_requeues_until_the_agent_dies(make_agent: Make) -> None:
    agent = make_agent()
    first = agent.caller()
    assert isinstance(first.hello(), local.Welcome)
    assert first.ask(local.FetchCached("default", 0, KEY)) == local.CachedBytes(None)
    assert first.ask(local.CacheBytes("default", 0, KEY, b"\x00\xff profile")) == local.Ok()
    first.close()

    launched = agent.caller()  # a new step in the same incarnation: a recovery round
    welcome = launched.hello(step="77.1")
    assert isinstance(welcome, local.Welcome)
    assert launched.ask(local.FetchCached("default", 0, KEY)) == local.CachedBytes(b"\x00\xff profile")
    launched.close()

    assert agent.caller().ask(local.Epilog(JOB, 0, "1")) == local.Ok("detached")
    assert agent.caller().ask(local.Attach(JOB, 1, "n1", "n1", 1)) == local.Ready("mapped")
    requeued = agent.caller()
    later = requeued.hello(step="77.0")
    assert isinstance(later, local.Welcome) and later.epoch > welcome.epoch
    assert requeued.ask(local.FetchCached("default", 0, KEY)) == local.CachedBytes(b"\x00\xff profile")
    assert requeued.ask(local.FetchCached("default", 0, OTHER)) == local.CachedBytes(None)
    assert requeued.ask(local.FetchCached("default", 0, KEY)) == local.CachedBytes(None)
    requeued.ask(local.CacheBytes("default", 0, KEY, b"x"))
    requeued.close()

    agent.kill()
    agent.start(again=True)
    again = agent.caller()
    assert isinstance(again.hello(step="77.2"), local.Welcome), agent.log()
    assert again.ask(local.FetchCached("default", 0, KEY)) == local.CachedBytes(None)


def test_a_rank_speaks_for_itself_only(make_agent: Make) -> None:
    agent = make_agent()
    first, second = agent.caller(), agent.caller()
    assert isinstance(first.hello(0, 2), local.Welcome)
    assert isinstance(second.hello(1, 2), local.Welcome)
    assert first.ask(local.CacheBytes("default", 0, KEY, b"mine")) == local.Ok()
    for request in (
        local.CacheBytes("default", 0, KEY, b"yours"),
        local.FetchCached("default", 0, KEY),
        local.Traffic("default", 0, STATE),
        local.Timeline("default", 0, LARGEST),
    ):
        reply = second.ask(request)
        assert isinstance(reply, local.Error) and "does not belong to this process" in reply.error
    assert first.ask(local.FetchCached("default", 0, KEY)) == local.CachedBytes(b"mine")


def test_a_flood_costs_the_agent_little(make_agent: Make) -> None:
    agent = make_agent()
    trainer = agent.trainer()
    trainer.step()
    caller = agent.caller()
    assert isinstance(caller.hello(name="other"), local.Welcome)
    before = agent.rss_bytes()
    began = time.monotonic()
    for n in range(300):
        assert caller.ask(local.Traffic("other", 0, told(float(n)))) == local.Ok()
        assert caller.ask(local.Timeline("other", 0, LARGEST)) == local.Ok()
        assert caller.ask(local.CacheBytes("other", 0, KEY, os.urandom(local.MAX_KEPT_BYTES))) == local.Ok()
    assert time.monotonic() - began < 60
    trainer.step()
    assert agent.rss_bytes() - before < 8 << 20
