"""Requirement not-a-failure: the protocol speaks N-1. Version 1 stands here as it was, frozen: its structs, its
rules, its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest

from gemini_hpc.wire import controller, handshake, local, munge, peer, protocol, version
from gemini_hpc.wire.handshake import Client, HandshakeError
from gemini_hpc.wire.message import Message


class HelloV1(msgspec.Struct, frozen=True):
    """ClientHello of version 1."""

    proto: int
    purpose: str
    cluster: str
    job: int
    restart: int
    source: str
    target: str
    instance: str
    nonce: bytes
    share: bytes


class AnswerV1(msgspec.Struct, frozen=True):
    """ServerHello of version 1."""

    proto: int
    nonce: bytes
    share: bytes
    host: str
    job: int
    restart: int
    instance: str


@pytest.fixture(autouse=True)
def open_munge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Credentials that anybody can open: it is not about them here."""
    monkeypatch.setattr(munge, "encode", lambda payload, *, for_uid: payload)
    monkeypatch.setattr(munge, "decode", lambda credential: (credential, 7))
    yield


def caller() -> Client:
    return Client(purpose="link", cluster="c", job=1, restart=0, source="n1", target="n2", instance="i", server_uid=7)


def envelope(payload: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(handshake.Envelope(credential=msgspec.msgpack.encode(payload)))


def inside(data: bytes, kind: type) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.decode(data, type=handshake.Envelope).credential, type=kind)


def test_our_greeting_is_one_that_version_1_takes() -> None:
    hello = inside(caller().greeting(), HelloV1)
    assert isinstance(hello, HelloV1) and hello.proto == 1


def test_version_1_answers_and_we_speak_1() -> None:
    client = caller()
    hello = handshake.receive(client.greeting()).hello
    session = client.finish(envelope(AnswerV1(1, hello.nonce, b"s" * 32, "n2", 1, 0, "x")))
    assert session.proto == 1


def test_version_1_calls_and_we_answer_as_1() -> None:
    greeting = handshake.receive(envelope(HelloV1(1, "link", "c", 1, 0, "n1", "n2", "i", b"n" * 16, b"s" * 32)))
    data, session = handshake.answer(greeting, host="n2", restart=0, instance="x")
    answer = inside(data, AnswerV1)
    assert session.proto == 1 and isinstance(answer, AnswerV1) and answer.proto == 1, "it compares for equality"


def test_two_of_us_speak_the_newest() -> None:
    client = caller()
    data, theirs = handshake.answer(handshake.receive(client.greeting()), host="n2", restart=0, instance="x")
    assert client.finish(data).proto == theirs.proto == version.CURRENT == version.OLDEST + 1


@pytest.mark.parametrize(
    ("least", "most", "common"),
    [(1, 0, 1), (1, 2, 2), (2, 2, 2), (2, 3, 2), (1, 99, 2), (3, 4, 0), (3, 0, 0), (0, 0, 0), (-1, -1, 0), (2, 1, 0)],
)
def test_common_version(least: int, most: int, common: int) -> None:
    assert version.common(least, most) == common


def test_too_new_is_refused_with_one_line() -> None:
    hello = msgspec.structs.replace(caller()._hello, proto=3, most=4)
    greeting = handshake.receive(envelope(hello))
    assert greeting.proto == 0
    with pytest.raises(HandshakeError, match="protocol 3 to 4, wanted 1 to 2: install the same"):
        handshake.answer(greeting, host="n2", restart=0, instance="x")


def test_an_answer_in_no_version_of_ours_is_refused() -> None:
    client = caller()
    nonce = client._hello.nonce
    with pytest.raises(HandshakeError, match="protocol 3"):
        client.finish(envelope(handshake.ServerHello(1, nonce, b"s" * 32, "n2", 1, 0, "x", chosen=3)))


def test_what_version_1_lacks_is_absent_on_the_wire() -> None:
    """Each kind of message is in the union of version 1, or is kept from it."""
    first = {
        *("Ping", "ProbeAsk", "ProbeAnswer", "Liveness", "Collect", "InventoryUp", "PlanDown", "PlanAck", "Go"),
        *("NeedRound", "RoundLost", "VoteUp", "DecisionDown", "PullAsk", "PullHead", "InspectAsk", "InspectPart"),
        *("Registration", "Report", "EventsUp", "Release", "HoldersAsk", "Holders", "JobAsk", "JobAnswer"),
    }
    later = {kind.__name__ for kind in protocol.SINCE}
    assert {kind.__name__ for kind in Message.__subclasses__()} == first | later and not first & later
    assert not protocol.known(peer.Wake(1, "n1", 2), 1) and protocol.known(peer.Wake(1, "n1", 2), 2)
    assert protocol.known(peer.Ping(), 1)


def test_messages_of_version_1_are_understood() -> None:
    """Bytes as version 1 wrote them: nothing that came later is needed."""
    for text, kind in [
        (
            '{"op":"hello","proto":1,"set":"default","rank":0,"world":2,"local_rank":0,"step":"7.0","pid":5}',
            local.Hello,
        ),
        ('{"op":"attach","job":7,"restart":0,"nodelist":"n1","node":"n1","replicas":1}', local.Attach),
        ('{"op":"register","set":"default","rank":0,"world":2,"home":0,"bytes":4096}', local.Register),
        ('{"op":"epilog","job":7,"restart":0,"exit_code":"0"}', local.Epilog),
    ]:
        assert isinstance(local.request_decoder.decode(text.encode()), kind)
    welcome = b'{"op":"welcome","job":7,"restart":0,"epoch":1,"node_rank":0,"nodes":2,"replicas":2}'
    reply = local.reply_decoder.decode(welcome)
    assert isinstance(reply, local.Welcome) and reply.proto == 1
    registration = {"kind": "register", "job": 7, "restart": 0, "host": "n1", "hosts": ["n1"], "replicas": 1}
    packed = msgspec.msgpack.encode({**registration, "port": 1, "instance": "i", "state": "attached"})
    assert isinstance(protocol.decoder.decode(packed), controller.Registration)


def test_fields_of_version_3_are_skipped() -> None:
    hello = json.loads(local.encode(local.hello(set="d", rank=0, world=1, local_rank=0, step="7.0", pid=1)))
    later = json.dumps({**hello, "colour": ["green"], "most": 3}).encode()
    assert local.request_decoder.decode(later) == local.Hello(1, "d", 0, 1, 0, "7.0", 1, most=3)
    packed = msgspec.msgpack.encode({"kind": "go", "round": 3, "step": "7.0", "mood": {"good": True}})
    assert protocol.decoder.decode(packed) == peer.Go(3, "7.0")
