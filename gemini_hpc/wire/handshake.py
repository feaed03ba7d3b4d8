"""Mutual authentication of two ends of a TCP connection: one MUNGE credential each way, then a session key.

1. client -> server: a credential that only the server's uid can open, with `ClientHello` inside.
2. server -> client: a credential that only the client's uid can open, with `ServerHello` inside, which
   repeats the client's nonce; or a refusal in plain words.
Both shares of the key travelled encrypted by MUNGE, so only the two ends know the session key, and each
later frame carries a MAC made with it (`frames`). MUNGE is asked once a connection, never per frame. A
replayed `ClientHello` leads nowhere: its sender cannot open the answer. Both say where the connection ends
(`endpoint`), so that nobody who listens elsewhere can pass it on. Pure functions; no I/O here.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from gemini_hpc.core.numbers import Job, Restart
from gemini_hpc.wire import endpoint, munge, version
from gemini_hpc.wire.bounds import Strict

MAX_HELLO_BYTES = 16 * 1024


class HandshakeError(Exception):
    """The other end is not who it should be, or said so of us."""


class OtherView(HandshakeError):
    """The other end goes on without these nodes, and this end does not, or the other way round (`core.views`)."""

    def __init__(self, lost: tuple[str, ...]) -> None:
        super().__init__(f"answered by an agent that goes on without {', '.join(lost)[:200] or 'no node less'}")
        self.lost = lost


class ClientHello(msgspec.Struct, frozen=True):
    """Who calls whom, about which job, what for (`link`, `pull`, `push`, `query`, `control`, ...); speaking protocols
    `least` to `most`. dialled: the endpoint that was meant ("": it is not known). lost: nodes of the
    incarnation that the caller goes on without. heir: the job of the caller, where it is another one than the job
    that is called: it takes over what that one has left."""

    least: int
    most: int
    purpose: str
    cluster: str
    job: Job
    restart: Restart
    source: str
    target: str
    instance: str
    nonce: bytes
    share: bytes
    dialled: str = ""
    lost: tuple[str, ...] = ()
    heir: Job = 0


class ServerHello(msgspec.Struct, frozen=True):
    """The answer; `instance` names the answering process's life (a rebooted node has another). chosen: the protocol
    that both speak from here on. listening: the endpoint that was reached ("": it is not known). lost: as in
    `ClientHello`."""

    chosen: int
    nonce: bytes
    share: bytes
    host: str
    job: Job
    restart: Restart
    instance: str
    listening: str = ""
    lost: tuple[str, ...] = ()


class Envelope(msgspec.Struct, frozen=True):
    """What travels before there is a key: a credential or a refusal."""

    credential: bytes = b""
    refusal: str = ""


class Session(msgspec.Struct, frozen=True):
    """An authenticated connection: the keys of both directions and what the other end said of itself."""

    send_key: bytes
    receive_key: bytes
    peer_uid: int
    peer_host: str
    peer_instance: str
    peer_restart: int
    purpose: str
    job: int
    proto: int = version.CURRENT
    peer_lost: tuple[str, ...] = ()
    peer_heir: int = 0


_hello = Strict(msgspec.msgpack.Decoder(ClientHello))
_answer = Strict(msgspec.msgpack.Decoder(ServerHello))
_envelope = Strict(msgspec.msgpack.Decoder(Envelope))


def _keys(hello: ClientHello, share: bytes) -> tuple[bytes, bytes]:
    def derive(label: bytes) -> bytes:
        return hashlib.blake2b(label + hello.nonce, key=hello.share + share, digest_size=32).digest()

    return derive(b"gemini-hpc client to server"), derive(b"gemini-hpc server to client")


def _open(data: bytes) -> tuple[bytes, int]:
    try:
        envelope = _envelope.decode(data)
    except msgspec.MsgspecError:
        raise HandshakeError("malformed greeting") from None
    if envelope.refusal:
        raise HandshakeError(f"refused: {envelope.refusal[:200]}")
    try:
        return munge.decode(envelope.credential)
    except munge.MungeError as exc:
        raise HandshakeError(f"MUNGE: {exc}") from None


def refusal(reason: str) -> bytes:
    """The plain answer to a client that is turned away."""
    return msgspec.msgpack.encode(Envelope(refusal=reason))


class Client:
    """The calling side of one handshake."""

    def __init__(
        self,
        *,
        purpose: str,
        cluster: str,
        job: int,
        restart: int,
        source: str,
        target: str,
        instance: str,
        server_uid: int,
        lost: tuple[str, ...] = (),
        heir: int = 0,
    ) -> None:
        self._hello = ClientHello(
            least=version.OLDEST,
            most=version.CURRENT,
            purpose=purpose,
            cluster=cluster,
            job=job,
            restart=restart,
            source=source,
            target=target,
            instance=instance,
            nonce=os.urandom(16),
            share=os.urandom(32),
            lost=lost,
            heir=heir,
        )
        self._server_uid = server_uid

    def greeting(self, dialled: str = "") -> bytes:
        """The first bytes to send; dialled: the endpoint they go to. Raises `HandshakeError` where no credential can
        be had."""
        self._hello = msgspec.structs.replace(self._hello, dialled=dialled)
        try:
            credential = munge.encode(msgspec.msgpack.encode(self._hello), for_uid=self._server_uid)
        except munge.MungeError as exc:
            raise HandshakeError(f"MUNGE: {exc}") from None
        return msgspec.msgpack.encode(Envelope(credential=credential))

    def finish(self, data: bytes) -> Session:
        """The session from the server's answer. Raises `HandshakeError`."""
        payload, uid = _open(data)
        if uid not in (self._server_uid, 0):
            raise HandshakeError(f"answered by uid {uid}, wanted {self._server_uid}")
        try:
            answer = _answer.decode(payload)
        except msgspec.MsgspecError:
            raise HandshakeError("malformed answer") from None
        if answer.nonce != self._hello.nonce or len(answer.share) != 32:
            raise HandshakeError("the answer is not to this greeting")
        if answer.job != self._hello.job or answer.host != self._hello.target:
            raise HandshakeError(f"answered by {answer.host} for job {answer.job}")
        if elsewhere := endpoint.mismatch(self._hello.dialled, answer.listening):
            raise HandshakeError(elsewhere)
        if self._hello.purpose in ("link", "push") and answer.restart != self._hello.restart:
            raise HandshakeError(f"answered by restart {answer.restart}")
        if self._hello.purpose in ("link", "push") and answer.lost != self._hello.lost:
            raise OtherView(answer.lost)
        if not version.OLDEST <= answer.chosen <= version.CURRENT:
            raise HandshakeError(version.mismatch(answer.chosen, answer.chosen))
        outward, inward = _keys(self._hello, answer.share)
        return Session(
            send_key=outward,
            receive_key=inward,
            peer_uid=uid,
            peer_host=answer.host,
            peer_instance=answer.instance,
            peer_restart=answer.restart,
            purpose=self._hello.purpose,
            job=answer.job,
            proto=answer.chosen,
            peer_lost=answer.lost,
        )


class Greeting(msgspec.Struct, frozen=True):
    """An opened `ClientHello` and the uid that MUNGE vouches for; the server decides whether to answer. proto: what
    both speak, 0 where there is nothing."""

    hello: ClientHello
    uid: int
    proto: int = version.CURRENT


def receive(data: bytes) -> Greeting:
    """Open a client's first bytes. Raises `HandshakeError`."""
    payload, uid = _open(data)
    try:
        hello = _hello.decode(payload)
    except msgspec.MsgspecError:
        raise HandshakeError("malformed greeting") from None
    if len(hello.nonce) != 16 or len(hello.share) != 32:
        raise HandshakeError("malformed greeting")
    return Greeting(hello, uid, version.common(hello.least, hello.most))


def answer(
    greeting: Greeting, *, host: str, restart: int, instance: str, listening: str = "", lost: tuple[str, ...] = ()
) -> tuple[bytes, Session]:
    """The server's answer to an accepted greeting, and its session; listening: where the greeting has arrived. Raises
    `HandshakeError`."""
    hello = greeting.hello
    if not greeting.proto:
        raise HandshakeError(version.mismatch(hello.least, hello.most))
    if elsewhere := endpoint.mismatch(hello.dialled, listening):
        raise HandshakeError(elsewhere)
    reply = ServerHello(
        chosen=greeting.proto,
        nonce=hello.nonce,
        share=os.urandom(32),
        host=host,
        job=hello.job,
        restart=restart,
        instance=instance,
        listening=listening,
        lost=lost,
    )
    try:
        credential = munge.encode(msgspec.msgpack.encode(reply), for_uid=greeting.uid)
    except munge.MungeError as exc:
        raise HandshakeError(f"MUNGE: {exc}") from None
    inward, outward = _keys(hello, reply.share)
    session = Session(
        send_key=outward,
        receive_key=inward,
        peer_uid=greeting.uid,
        peer_host=hello.source,
        peer_instance=hello.instance,
        peer_restart=hello.restart,
        purpose=hello.purpose,
        job=hello.job,
        proto=greeting.proto,
        peer_lost=hello.lost,
        peer_heir=hello.heir,
    )
    return msgspec.msgpack.encode(Envelope(credential=credential)), session
