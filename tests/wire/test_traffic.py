"""What ranks tell of their traffic: every number in bounds, every list too, and both ways across versions."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from refusals import refusal

from gemini_hpc.wire import inspect_schema, local, protocol
from gemini_hpc.wire.traffic import (
    MAX_CHUNKS,
    MAX_COPIES,
    MAX_OPS,
    MAX_PER_SPAN,
    MAX_SPANS,
    MAX_WAITS,
    Chunk,
    CopyTime,
    Operation,
    Stretch,
    TimelineState,
    TrafficState,
)

STATE = TrafficState(
    1.0, "gemini", "gloo", "steady", "", 2, 2, 3, 3.1, 1.21, 17, 200, 0.041, 119e6, 4e-4, 12, 8 << 20, 60, 50, 10,
    0.1, 0.003, 0.0, 16 << 20, (3, 4, 5),
)  # fmt: skip
TIMELINE = TimelineState(
    7, 3.1, 3.0,
    (Operation("all_reduce", 0.1, 0.2, 100),), (Chunk(0.3, 0.4, 50, 0),), (CopyTime(0.0, 0.1, 60),),
    (Stretch(2.9, 3.0),), (Stretch(0.2, 0.6),),
)  # fmt: skip
BAD = [math.nan, math.inf, -math.inf, -2.0, 1e300, 1 << 63, -(1 << 63), "1", [], {}, True]


def traffic(state: list[Any]) -> bytes:
    return json.dumps({"op": "traffic", "training": "s", "rank": 0, "state": state}).encode()


def timeline(state: list[Any]) -> bytes:
    return json.dumps({"op": "timeline", "training": "s", "rank": 0, "timeline": state}).encode()


def part(state: list[Any]) -> bytes:
    made = inspect_schema.InspectPart(
        "n1", 7, 1, 0, 1, 1, 1, "live", ("n1",), {"n1": 0}, "", "", 1, 1, 1,
        (inspect_schema.TrainingState("s", 1, None, "arming", (0,)),), (), (), (), (),
    )  # fmt: skip
    plain = msgspec.to_builtins(made)
    plain["trainings"][0]["traffic"] = [[0, state]]
    return msgspec.msgpack.encode(plain)


def recorded(state: list[Any]) -> bytes:
    plain = msgspec.msgpack.decode(part(msgspec.to_builtins(STATE)))
    plain["record"] = {"training": "s", "rank": 0, "timeline": state, "series": []}
    return msgspec.msgpack.encode(plain)


def test_both_ways() -> None:
    plain = msgspec.to_builtins(STATE)
    assert len(plain) == len(STATE.__struct_fields__)
    request = local.request_decoder.decode(traffic(plain))
    assert isinstance(request, local.Traffic) and request.state == STATE
    answer = protocol.decoder.decode(part(plain))
    assert isinstance(answer, inspect_schema.InspectPart) and answer.trainings[0].traffic == ((0, STATE),)
    answer = protocol.decoder.decode(recorded(msgspec.to_builtins(TIMELINE)))
    assert isinstance(answer, inspect_schema.InspectPart) and answer.record is not None
    assert answer.record.timeline == TIMELINE


def test_a_summary_holds_no_number_out_of_bounds() -> None:
    for field in TrafficState.__struct_fields__:
        at = TrafficState.__struct_fields__.index(field)
        good = msgspec.to_builtins(STATE)
        bad: list[Any] = ["x" * 301, 5] if isinstance(good[at], str) else BAD
        if field == "chunks_per_span":
            bad = [[-1], [1.5], [math.nan], [1 << 40], [0] * (MAX_PER_SPAN + 1), "1", 5]
        for value in bad:
            state = [*good[:at], value, *good[at + 1 :]]
            assert refusal(msgspec.MsgspecError, local.request_decoder.decode, traffic(state)), field
            if not (isinstance(value, int) and abs(value) >= 1 << 63):
                assert refusal(msgspec.MsgspecError, protocol.decoder.decode, part(state)), field


def test_a_timeline_holds_no_number_out_of_bounds() -> None:
    most = {"ops": MAX_OPS, "chunks": MAX_CHUNKS, "copies": MAX_COPIES, "waits": MAX_WAITS, "spans": MAX_SPANS}
    for field in TimelineState.__struct_fields__:
        at = TimelineState.__struct_fields__.index(field)
        good = msgspec.to_builtins(TIMELINE)
        if isinstance(good[at], tuple):
            item = good[at][0]
            numbers = [i for i, value in enumerate(item) if not isinstance(value, str)]
            bad: list[Any] = [[[*item[:i], value, *item[i + 1 :]]] for i in numbers for value in BAD]
            bad += [good[at] * (most[field] + 1), [[]], [item[:-1]], 5]
            full = [*good[:at], good[at] * most[field], *good[at + 1 :]]
            assert isinstance(local.request_decoder.decode(timeline(full)), local.Timeline), field
        else:
            bad = list(BAD)
        for value in bad:
            state = [*good[:at], value, *good[at + 1 :]]
            assert refusal(msgspec.MsgspecError, local.request_decoder.decode, timeline(state)), field


def test_keys() -> None:
    for key in ("", "0", "0" * 65, "x" * 32, "0" * 31 + "\n", "A" * 32, "../" * 8, 5, None):
        for request in ({"op": "cache", "data": "eA=="}, {"op": "fetch-cached"}):
            data = json.dumps({"training": "s", "rank": 0, "key": key, **request}).encode()
            assert refusal(msgspec.MsgspecError, local.request_decoder.decode, data), (key, request)


def test_what_is_kept_has_a_size() -> None:
    most = local.CacheBytes("s", 0, "0" * 32, b"\xff" * local.MAX_KEPT_BYTES)
    assert len(local.encode(most)) < local.MAX_PACKET_BYTES
    assert local.request_decoder.decode(local.encode(most)) == most
    with pytest.raises(msgspec.MsgspecError):
        local.request_decoder.decode(local.encode(local.CacheBytes("s", 0, "0" * 32, most.data + b"x")))
    with pytest.raises(msgspec.MsgspecError):
        local.request_decoder.decode(b'{"op":"cache","training":"s","rank":0,"key":"00000000","data":"not base64!"}')


def test_earlier_ends_are_understood_and_understand() -> None:
    """As the protocol was before ranks told of their traffic: its messages have none of the fields."""
    ask = protocol.decoder.decode(msgspec.msgpack.encode({"kind": "inspect?", "request": 3}))
    assert ask == inspect_schema.InspectAsk(3)
    old = msgspec.msgpack.decode(part([]))
    del old["trainings"][0]["traffic"], old["record"]
    answer = protocol.decoder.decode(msgspec.msgpack.encode(old))
    assert (
        isinstance(answer, inspect_schema.InspectPart) and answer.record is None and answer.trainings[0].traffic == ()
    )

    class InspectAskBefore(msgspec.Struct, tag_field="kind", tag="inspect?"):
        request: int = 0

    now = protocol.encode(inspect_schema.InspectAsk(3, inspect_schema.RecordAsk("s", 0)))
    assert msgspec.msgpack.decode(now, type=InspectAskBefore).request == 3


def test_later_fields_are_skipped() -> None:
    state = [*msgspec.to_builtins(STATE), "of a later version"]
    request = local.request_decoder.decode(traffic(state))
    assert isinstance(request, local.Traffic) and request.state == STATE
