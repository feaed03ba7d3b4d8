"""What a rank tells: whatever the numbers are, the agent takes it and it fits a packet; thinning hides no traffic."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.client import stats_messages
from gemini_hpc.wire import local
from gemini_hpc.wire.traffic import MAX_CHUNKS, MAX_OPS, MAX_PER_SPAN, MAX_SPANS, Operation, TrafficState

strange = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-(1 << 70), 1 << 70), st.sampled_from([0, 1, 0.5])
)
whole = st.integers(-(1 << 70), 1 << 70)
words = st.text(max_size=80)


def taken(message: local.Message) -> local.Message:
    packet = local.encode(message)
    assert len(packet) <= local.MAX_PACKET_BYTES, len(packet)
    return local.request_decoder.decode(packet)


@given(st.data())
def test_any_summary_is_taken(data: st.DataObject) -> None:
    maybe = st.none() | strange
    numbers: dict[str, Any] = {
        name: data.draw(maybe)
        for name in ("iteration_s", "idle_s", "deviation", "bytes_per_s", "alpha_s", "overhead")
    }
    counts = {name: data.draw(whole) for name in ("j", "s", "spans", "collectives", "spilled_bytes", "buffer_bytes")}
    spans = data.draw(st.lists(st.integers(-5, 5000), max_size=50))
    state = TrafficState(
        data.draw(strange),
        data.draw(words),
        "gloo",
        data.draw(words),
        problem=data.draw(st.text(max_size=1000)),
        late_s=data.draw(strange),
        chunks_per_span=stats_messages.count_chunks_per_span(spans, data.draw(st.integers(0, 5000))),
        **numbers,
        **counts,
    )
    state = stats_messages.bound_traffic(state)
    assert taken(local.Traffic("s", 0, state)) == local.Traffic("s", 0, state)


@given(
    st.lists(st.tuples(words, strange, strange, whole), max_size=20),
    st.lists(st.tuples(strange, strange, whole, whole), max_size=20),
    st.lists(st.tuples(strange, strange), max_size=20),
    strange,
    strange,
    whole,
)
def test_any_timeline_is_taken(
    ops: list[Any], chunks: list[Any], stretches: list[Any], iteration_s: float, gate_s: float, version: int
) -> None:
    copies = [(*stretch, 5) for stretch in stretches]
    timeline = stats_messages.build_timeline(
        version=version,
        iteration_s=iteration_s,
        gate_s=gate_s,
        ops=ops,
        chunks=chunks,
        copies=copies,
        waits=stretches,
        spans=stretches,
    )
    assert taken(local.Timeline("s", 0, timeline)) == local.Timeline("s", 0, timeline)
    for items in (timeline.ops, timeline.chunks, timeline.copies, timeline.waits, timeline.spans):
        assert all(0 <= i.start_s <= i.end_s <= timeline.iteration_s for i in items)


def test_the_longest_timeline_fits_a_packet() -> None:
    def at(n: int) -> tuple[float, float]:
        return 86400.123456 + n * 1e-3, 86400.223456 + n * 1e-3

    timeline = stats_messages.build_timeline(
        version=(1 << 40) - 1,
        iteration_s=99999.123456,
        gate_s=99998.123456,
        ops=[("_reduce_scatter_tensor_coalesced_", *at(n), (1 << 49) + n) for n in range(5000)],
        chunks=[(*at(n), (1 << 49) + n, n % 3) for n in range(5000)],
        copies=[(*at(n), (1 << 49) + n) for n in range(5000)],
        waits=[at(n) for n in range(5000)],
        spans=[at(n) for n in range(5000)],
    )
    assert len(timeline.ops) == MAX_OPS and len(timeline.chunks) == MAX_CHUNKS and len(timeline.spans) == MAX_SPANS
    message = local.Timeline("x" * 64, (1 << 20) - 1, timeline)
    assert taken(message) == message
    assert len(local.encode(message)) > 40_000, "a smaller bound would do"


def busy(ops: Any) -> set[int]:
    """Milliseconds in which something is on its way."""
    return {ms for op in ops for ms in range(round(op.start_s * 1000), round(op.end_s * 1000))}


def test_thinning_keeps_the_traffic_and_the_long_pauses() -> None:
    ops = []
    for n in range(1000):  # bursts of ten, with a pause of 100 ms after each, 1 ms between two
        start = n * 0.004 + (n // 10) * 0.1
        ops.append(("a" if n % 10 < 5 else "b", start, start + 0.003, 7))
    timeline = stats_messages.build_timeline(version=1, iteration_s=100.0, gate_s=99.0, ops=ops)
    assert len(timeline.ops) == MAX_OPS
    assert sum(op.bytes for op in timeline.ops) == 7000
    whole = stats_messages.build_timeline(version=1, iteration_s=100.0, gate_s=99.0, ops=ops[:400]).ops
    assert busy(whole) <= busy(timeline.ops)
    pauses = [b.start_s - a.end_s for a, b in zip(timeline.ops, timeline.ops[1:], strict=False)]
    assert sum(p > 0.09 for p in pauses) == 99, "what is merged lies within a burst"
    assert {op.name for op in timeline.ops} <= {"a", "b", stats_messages.SEVERAL}


def test_chunks_of_different_holders_are_not_merged() -> None:
    chunks = [(n * 0.01, n * 0.01 + 0.01, 10, n % 2) for n in range(1000)]
    found = stats_messages.build_timeline(version=1, iteration_s=10.0, gate_s=9.0, chunks=chunks).chunks
    assert len(found) == MAX_CHUNKS
    for replica in (0, 1):
        assert sum(c.bytes for c in found if c.replica == replica) == 5000


def test_little_is_not_thinned() -> None:
    ops = [Operation("a", n * 1.0, n + 0.5, 1) for n in range(5)]
    assert stats_messages.merge_neighbours(ops, 5) == tuple(ops)


def test_chunks_per_span() -> None:
    assert stats_messages.count_chunks_per_span([0, 0, 2, 4], 5) == (2, 0, 1, 0, 1)
    assert stats_messages.count_chunks_per_span([], 0) == ()
    many = stats_messages.count_chunks_per_span(range(1000), 1000)
    assert len(many) <= MAX_PER_SPAN and sum(many) == 1000
    assert stats_messages.count_chunks_per_span(range(65), 65) == (2,) * 32 + (1,)


def test_what_is_not_known_stays_so() -> None:
    state = stats_messages.bound_traffic(TrafficState(1.7e9, "gemini", "gloo", "profile", overhead=math.nan))
    assert state == TrafficState(1.7e9, "gemini", "gloo", "profile")


def test_keys_of_profiles() -> None:
    key = stats_messages.build_profile_key("a model", ["n1", "n2"])
    assert key == stats_messages.build_profile_key("a model", ("n1", "n2"))
    others = [("a model", ["n2", "n1"]), ("a model", ["n1n2"]), ("a", [" model", "n1", "n2"]), ("a model", ["n1"])]
    assert len({key, *(stats_messages.build_profile_key(*other) for other in others)}) == 5
    kept = stats_messages.build_cache_bytes("s", 0, key, b"x" * local.MAX_KEPT_BYTES)
    assert kept is not None and taken(kept) == kept
    assert stats_messages.build_cache_bytes("s", 0, key, b"x" * (local.MAX_KEPT_BYTES + 1)) is None
