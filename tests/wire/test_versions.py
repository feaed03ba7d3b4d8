"""Requirement not-a-failure: two ends agree on a version of the protocol, or one line says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from hello import build_hello

from gemini_hpc.wire import handshake, local, munge, peer, protocol, version
from gemini_hpc.wire.handshake import Caller, HandshakeClient, HandshakeError


@pytest.fixture(autouse=True)
def open_munge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Credentials that anybody can open: it is not about them here."""
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, 7, 0))
    yield


def caller() -> HandshakeClient:
    return HandshakeClient(Caller("c", "n1", "i"), purpose="link", job=1, target="n2", server_uid=7)


def envelope(payload: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(handshake.Envelope(credential=msgspec.msgpack.encode(payload)))


def test_two_of_us_speak_the_newest() -> None:
    client = caller()
    data, theirs = handshake.answer(handshake.receive(client.build_greeting()), host="n2", restart=0, instance="x")
    assert client.finish(data).proto == theirs.proto == version.CURRENT


def test_common_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ends that speak two versions, as all do from the second one on."""
    monkeypatch.setattr(version, "CURRENT", 8)
    monkeypatch.setattr(version, "OLDEST", 7)
    assert version.describe_mismatch(9, 10).startswith("protocol 9 to 10, wanted 7 to 8:")
    for least, most, common in (
        (7, 7, 7),
        (7, 8, 8),
        (8, 8, 8),
        (8, 9, 8),
        (1, 99, 8),
        (9, 10, 0),
        (5, 6, 0),
        (0, 0, 0),
        (8, 7, 0),
        (-1, -1, 0),
    ):
        assert version.find_common(least, most) == common, (least, most)


def test_too_new_is_refused_with_one_line() -> None:
    hello = msgspec.structs.replace(caller()._hello, least=5, most=6)
    greeting = handshake.receive(envelope(hello))
    assert greeting.proto == 0
    with pytest.raises(HandshakeError, match="protocol 5 to 6, wanted 4: install the same"):
        handshake.answer(greeting, host="n2", restart=0, instance="x")


def test_an_answer_in_no_version_of_ours_is_refused() -> None:
    client = caller()
    nonce = client._hello.nonce
    with pytest.raises(HandshakeError, match="protocol 5"):
        client.finish(envelope(handshake.ServerHello(5, nonce, b"s" * 32, "n2", 1, 0, "x")))


def test_fields_of_later_versions_are_skipped() -> None:
    hello = json.loads(local.encode(build_hello(training="d", rank=0, world=1, local_rank=0, step="7.0", pid=1)))
    later = json.dumps({**hello, "colour": ["green"], "most": 5}).encode()
    assert local.request_decoder.decode(later) == local.Hello(4, 5, "d", 0, 1, 0, "7.0", 1)
    packed = msgspec.msgpack.encode({"kind": "go", "round": 3, "step": "7.0", "mood": {"good": True}})
    assert protocol.decoder.decode(packed) == peer.Go(3, "7.0")
