"""The handshake with a MUNGE of our own that knows who may open what, who made it, and what was opened before."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refusal

from gemini_hpc.wire import handshake, munge, version
from gemini_hpc.wire.frames import LENGTH_BYTES, FrameError, Sealer
from gemini_hpc.wire.handshake import HandshakeError, LinkSession

from .fake_munge import ALICE, BOB, ROOT, FakeMunge, client


def serve(data: bytes, host: str = "n2") -> tuple[bytes, LinkSession]:
    return handshake.answer(handshake.receive(data), host=host, restart=1, instance="i2")


def test_both_ends_agree(fake: FakeMunge) -> None:
    caller = client()
    reply, theirs = serve(caller.build_greeting())
    ours = caller.finish(reply)
    assert (ours.send_key, ours.receive_key) == (theirs.receive_key, theirs.send_key)
    assert ours.send_key != ours.receive_key
    assert (ours.peer_uid, ours.peer_host, ours.peer_instance, ours.peer_restart) == (ALICE, "n2", "i2", 1)
    assert (theirs.peer_uid, theirs.peer_host, theirs.peer_instance, theirs.purpose) == (ALICE, "n1", "i1", "link")
    frame = Sealer(ours.send_key).seal(b"x")[LENGTH_BYTES:]
    assert Sealer(theirs.receive_key).open(frame) == b"x"
    with pytest.raises(FrameError):
        Sealer(ours.receive_key).open(frame)


def test_two_sessions_share_no_key(fake: FakeMunge) -> None:
    sessions = [serve(client().build_greeting())[1] for _ in range(2)]
    assert len({k for s in sessions for k in (s.send_key, s.receive_key)}) == 4


def test_the_server_learns_who_calls_from_munge_alone(fake: FakeMunge) -> None:
    with fake.as_(BOB):
        greeting = client().build_greeting()
    assert handshake.receive(greeting).uid == BOB


def test_nobody_else_can_open_the_greeting(fake: FakeMunge) -> None:
    greeting = client().build_greeting()
    with fake.as_(BOB), pytest.raises(HandshakeError, match="Unauthorized"):
        handshake.receive(greeting)


def test_replayed_greeting(fake: FakeMunge) -> None:
    greeting = client().build_greeting()
    serve(greeting)
    with pytest.raises(HandshakeError, match="Replayed"):
        serve(greeting)


def test_stolen_greeting_gives_the_thief_no_session(fake: FakeMunge) -> None:
    """The thief is first, so MUNGE sees no replay; but the answer is for alice."""
    reply, _ = serve(client().build_greeting())
    with fake.as_(BOB), pytest.raises(HandshakeError, match="Unauthorized"):
        client().finish(reply)


def test_answer_of_another_user(fake: FakeMunge) -> None:
    caller = client(server_uid=BOB)
    with fake.as_(BOB):
        hello = handshake.receive(caller.build_greeting()).hello
    with fake.as_(4000):  # who has got hold of the greeting's content
        reply, _ = handshake.answer(handshake.Greeting(hello, ALICE), host="n2", restart=1, instance="x")
    with pytest.raises(HandshakeError, match="answered by uid 4000, wanted 5002"):
        caller.finish(reply)


def test_root_may_answer_for_anybody(fake: FakeMunge) -> None:
    caller = client()
    greeting = handshake.receive(caller.build_greeting())
    with fake.as_(ROOT):
        reply, _ = handshake.answer(greeting, host="n2", restart=1, instance="x")
    assert caller.finish(reply).peer_uid == ROOT


def test_answer_about_something_else(fake: FakeMunge) -> None:
    for other in ({"job": 8}, {"target": "n3"}):
        caller, elsewhere = client(), client(**other)
        greeting = handshake.receive(elsewhere.build_greeting())
        mixed = msgspec.structs.replace(
            greeting, hello=msgspec.structs.replace(greeting.hello, nonce=caller._hello.nonce)
        )
        reply, _ = handshake.answer(mixed, host=greeting.hello.target, restart=1, instance="x")
        assert "answered by" in refusal(HandshakeError, caller.finish, reply), other


def test_answer_to_another_greeting(fake: FakeMunge) -> None:
    reply, _ = serve(client().build_greeting())
    with pytest.raises(HandshakeError, match="not to this greeting"):
        client().finish(reply)


def test_reflected_greeting_is_no_answer(fake: FakeMunge) -> None:
    caller = client()
    with pytest.raises(HandshakeError, match="malformed answer"):
        caller.finish(caller.build_greeting())


def test_an_answer_is_no_greeting(fake: FakeMunge) -> None:
    reply, _ = serve(client().build_greeting())
    with pytest.raises(HandshakeError, match="malformed greeting"):
        handshake.receive(reply)


def test_refusal_in_plain_words(fake: FakeMunge) -> None:
    with pytest.raises(HandshakeError, match=r"^refused: not yours$"):
        client().finish(handshake.encode_refusal("not yours"))
    with pytest.raises(HandshakeError) as caught:
        client().finish(handshake.encode_refusal("x" * 10000))
    assert len(str(caught.value)) < 300


def test_munge_down(fake: FakeMunge) -> None:
    caller, greeting = client(), client().build_greeting()
    fake.down = True
    with pytest.raises(HandshakeError, match="MUNGE: Failed to access socket"):
        caller.build_greeting()
    with pytest.raises(HandshakeError, match="MUNGE: Failed"):
        handshake.receive(greeting)


def enveloped(credential: bytes) -> bytes:
    return msgspec.msgpack.encode(handshake.Envelope(credential=credential))


def test_greetings_that_cannot_be(fake: FakeMunge) -> None:
    changes: list[tuple[str, Sequence[object]]] = [
        *(("least", ["2"]), ("nonce", [b"", b"x" * 17]), ("share", [b"", b"x" * 31]), ("restart", [-1])),
        *(("job", [-1, 1 << 32, "7"]), ("successor", [-1, 1 << 32, "7", None]), ("source", [None]), ("purpose", [3])),
    ]
    for field, value in [(field, value) for field, values in changes for value in values]:
        hello = msgspec.to_builtins(client()._hello, builtin_types=(bytes,)) | {field: value}
        credential = fake.encode(msgspec.msgpack.encode(hello), for_uid=ALICE)
        assert "malformed greeting" in refusal(HandshakeError, handshake.receive, enveloped(credential)), (
            field,
            value,
        )


def test_answers_with_a_weak_share(fake: FakeMunge) -> None:
    for share in (b"", b"x" * 31, b"x" * 33):
        caller = client()
        hello = handshake.receive(caller.build_greeting()).hello
        answer = handshake.ServerHello(version.CURRENT, hello.nonce, share, "n2", 7, 1, "x")
        credential = fake.encode(msgspec.msgpack.encode(answer), for_uid=ALICE)
        assert "not to this greeting" in refusal(HandshakeError, caller.finish, enveloped(credential)), share


NOISE = [
    b"",
    b"\xc1",
    b"\x81\xa1x" + b"\x91" * 16000,
    b"\x81\xaacredential\xc6\xff\xff\xff\xff",
    b"\x81\xa7refusal\xa2\xff\xfe",
    b"\xdf\xff\xff\xff\xff",
    os.urandom(16000),
]


def test_noise_before_there_is_a_key(fake: FakeMunge) -> None:
    for data in NOISE:
        said = refusal(HandshakeError, handshake.receive, data)
        assert re.search(r"malformed greeting|MUNGE|refused", said), data[:40]
        assert refusal(HandshakeError, client().finish, data), data[:40]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes(fake: FakeMunge, data: bytes) -> None:
    with pytest.raises(HandshakeError):
        handshake.receive(data)
    inside = fake.encode(data, for_uid=ALICE)
    with pytest.raises(HandshakeError):
        handshake.receive(enveloped(inside))
    with pytest.raises(HandshakeError):
        client().finish(enveloped(fake.encode(data, for_uid=ALICE)))


def test_credentials_that_never_reach_libmunge() -> None:
    for credential in (b"", b"MUNGE:\0:", b"x" * (munge.MAX_CREDENTIAL_BYTES + 1)):
        assert "malformed credential" in refusal(munge.MungeError, munge.decode, credential), len(credential)
