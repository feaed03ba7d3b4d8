"""Decoding of what others sent: one kind of error for whatever is wrong, and no number that cannot be used."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from hello import build_hello
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.standstill import HangStanding, Place
from gemini_hpc.wire import local, peer, protocol
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.control_page import pack_seal, unpack_seal
from gemini_hpc.wire.sanitize import sanitize
from gemini_hpc.wire.traffic import Operation, TimelineState, TrafficState


def packed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def refused(decoder: Strict[Any], data: bytes) -> bool:
    """Return whether what somebody sent is no message."""
    return bool(refusal(msgspec.MsgspecError, decoder.decode, data))


def vote(raw: bytes) -> bytes:
    fields = {"round": 1, "training": "s", "pairs": 1, "world": 1, "degraded": False, "kinds": 2}
    return packed(kind="vote", **fields, vote=msgspec.Raw(raw))


REQUESTS: list[local.Message] = [
    local.Attach(7, 0, "n[1-2]", "n1", 2),
    local.Epilog(7, 0),
    local.Attach(7, 0, "n[1-2]", "n1", 2, hang=0, after=6),
    local.VerdictRequest(),
    local.LaunchRequest("7.0", 1, "rank 0 ended with SIGKILL", False, "", 20.0),
    build_hello(training="default", rank=0, world=2, local_rank=0, step="7.0", pid=99, nth=2, series="run-1"),
    local.Register("default", 0, 2, 0, 4096),
    local.TakeOver("default", 0, 8, 1, 7, "0" * 32),
    local.BeginVersion("default", 0, 1),
    local.Landed("default", 0, 1, 0, 10, "x"),
    local.Abort("default", 0, 1, 0),
    local.Fetch("default", 0),
    local.Event("resumed", 1, 1.7e9),
    local.Finished("default", 0),
    local.Reject("default", 0, 7, "the loss is NaN", True),
    local.KeepVersion("default", 0, 7, "best"),
    local.HandBack("default", 0, 2, 0, 4096, 0, 0, 0, 0, ""),
    local.Traffic("default", 0, TrafficState(1.0, "gemini", "gloo", "steady", chunks_per_span=(1, 2))),
    local.Timeline("default", 0, TimelineState(1, 2.0, 1.5, (Operation("all_reduce", 0.0, 0.5, 10),))),
    local.CacheBytes("default", 0, "0123456789abcdef", b"\x00\xff"),
    local.FetchCached("default", 0, "0123456789abcdef"),
]


def test_requests_survive_the_way() -> None:
    for message in REQUESTS:
        assert local.request_decoder.decode(local.encode(message)) == message, message


def test_every_number_is_bounded() -> None:
    for message in REQUESTS:
        fields = json.loads(local.encode(message))
        numbers = {k for k, v in fields.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for key in numbers - {"least", "most", "proto", "pid", "slot", "attempt"}:
            for bad in (-1, 10**30, 1 << 63):
                assert refusal(
                    msgspec.MsgspecError, local.request_decoder.decode, json.dumps(fields | {key: bad}).encode()
                ), (message, key, bad)


def test_times() -> None:
    for time in ("NaN", "Infinity", "-Infinity", "1e999", "-1", "1e300", "null", '"1"'):
        data = f'{{"op":"event","name":"a","version":1,"t":{time}}}'.encode()
        assert refusal(msgspec.MsgspecError, local.request_decoder.decode, data), time


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_kind_of_error(data: bytes) -> None:
    for decoder in (local.request_decoder, local.reply_decoder, protocol.decoder):
        try:
            decoder.decode(data)
        except msgspec.MsgspecError as exc:
            assert len(str(exc)) < 1000


DEEP = [
    b'{"op":"verdict?","x":' + b"[" * 30000 + b"]" * 30000 + b"}",
    b'{"op":"event","name":"\xff\xfe","version":1,"t":1}',
]
DEEP_PACKED = [
    b"\x82\xa4kind\xa4ping\xa1x" + b"\x91" * 100000,
    b"\x82\xa4kind\xa6round?\xa4step\xa2\xff\xfe",
    b"\x82\xa4kind\xa9inventory\xa7records\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x82\xa4kind\xa6round?\xa4step\xc7\x02\x05ab",
    b"",
]


def test_nested_huge_and_foreign() -> None:
    for data in DEEP:
        assert refused(local.request_decoder, data), data[:40]
    for data in DEEP_PACKED:
        assert refused(protocol.decoder, data), data[:40]
    assert refused(protocol.decoder, vote(b"\x94" + b"\x91" * 50000)), "a nested vote"


def test_numbers_of_peers() -> None:
    for number in (-1, 1 << 63, (1 << 64) - 1, 1 << 50):
        for fields in (
            {"kind": "round?", "after_round": 0, "step": "", "again": True},
            {"kind": "collect", "round": 0, "step": ""},
            {"kind": "liveness", "host": "n1", "alive": True, "restart": 0},
            {"kind": "launch", "step": "7.0", "attempt": 1, "reason": "", "over": "", "done": False},
            {"kind": "release", "job": 1, "reason": ""},
            {"kind": "job?", "job": 1},
        ):
            protocol.decoder.decode(packed(**fields))
            for key in [k for k, v in fields.items() if type(v) is int]:
                assert refused(protocol.decoder, packed(**(fields | {key: number}))), (fields, key, number)


def test_stamps_of_peers() -> None:
    newest = Stamp((1 << 23) - 1, (1 << 40) - 1)
    good = msgspec.to_builtins(
        peer.DecisionDown(round=1, training="s", sealed=newest, abandoned=(newest,), degraded=False)
    )
    word = protocol.decoder.decode(packed(**good))
    assert isinstance(word, peer.DecisionDown) and word.sealed is not None
    assert unpack_seal(pack_seal(*word.sealed)) == word.sealed < (1 << 63, 0)
    protocol.decoder.decode(vote(msgspec.msgpack.encode([[newest], [], None, []])))
    for stamp in ([-1, 1], [1, 1 << 40], [1 << 23, 1], [1], [1, 2, 3], ["1", 2], [1.5, 2]):
        assert refused(protocol.decoder, packed(**(good | {"sealed": stamp}))), stamp
        assert refused(protocol.decoder, packed(**(good | {"abandoned": [stamp]}))), stamp
        assert refused(protocol.decoder, vote(msgspec.msgpack.encode([[stamp], [], None, []]))), stamp


def test_times_of_peers() -> None:
    for time in (math.nan, math.inf, -math.inf, -1.0, 1e300):
        report = packed(kind="report", job=1, restart=0, host="n1", witnesses=[], t=time)
        assert refused(protocol.decoder, report), time


def test_standings_of_peers() -> None:
    place = Place(7, 3, 5, 1, "n2", "allreduce_")
    good = msgspec.to_builtins(HangStanding(2, 1, 9.0, 0.5, 9.0, 0.5, place, place, True))
    for kind in ("standing", "hung"):
        protocol.decoder.decode(packed(kind=kind, round=1, training="s", standing=good))
        bad: dict[str, Any]
        for bad in ({"silent_s": math.nan}, {"awake_s": -1.0}, {"ranks": 1 << 21}, {"least": {}}):
            word = packed(kind=kind, round=1, training="s", standing=good | bad)
            assert refused(protocol.decoder, word), (kind, bad)


def test_text_of_every_container_becomes_printable() -> None:
    """`msgspec.to_builtins` leaves tuples as they are."""
    clean = sanitize({"a\x1b": ("b\x1b[2J", ["c\n"]), "n": 7})
    assert not any(c in str(clean) for c in ("\\x1b", "\\n")) and clean["n"] == 7
