"""Mutual authentication of both ends of a TCP connection: one credential each way, then a session key.

1. client -> server: a credential that only the server's uid can open, containing `ClientHello`.

2. server -> client: a credential that only the client's uid can open, containing `ServerHello`, repeating
   the client's nonce; or a refusal in plain text.

Only the two ends know the session key: MUNGE encrypts both shares of it, and in the other schemes the key follows
from both shares and a secret that the ends have in common (`credentials`). Each later frame carries a MAC made with
that key (`frames`). Credentials are made once a connection, never per frame. A replayed `ClientHello` is useless,
because its sender cannot derive the session key from the answer. Both ends report the connection's endpoint
(`endpoint`), so a listener elsewhere cannot relay the connection. The module holds pure functions and does no I/O.

Where the endpoints differ, by a relay or by address translation, both ends refuse. The caller tries the next port.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import msgspec

from gemini_hpc.core.numbers import Job, Restart
from gemini_hpc.wire import credentials, endpoint, version
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.credentials import CredentialError, Opened

MAX_HELLO_BYTES = 16 * 1024


class HandshakeError(Exception):
    """A handshake that failed: the other end is not the expected one, or it refused this end."""


class OtherView(HandshakeError):
    """A handshake error because the ends disagree on which nodes the job lost (`core.views`)."""

    def __init__(self, lost: tuple[str, ...]) -> None:
        super().__init__(f"answered by an agent that goes on without {', '.join(lost)[:200] or 'no node less'}")
        self.lost = lost


class ClientHello(msgspec.Struct, frozen=True):
    """The client's greeting: caller, target, job and purpose of a connection.

    Attributes:
        least: Oldest protocol that the caller speaks.
        most: Newest protocol that the caller speaks.
        purpose: `link`, `pull`, `push`, `query`, `control`, ...
        dialled: Endpoint that the caller dialled; "": unknown.
        lost: Nodes of the incarnation that the caller continues without.
        successor: Job of the caller if it takes over state that the called job left behind.
    """

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
    successor: Job = 0


class ServerHello(msgspec.Struct, frozen=True):
    """The server's answer to a greeting.

    Attributes:
        chosen: Protocol that both ends speak from here on.
        instance: Identity of the answering process; a rebooted node has another one.
        listening: Endpoint that the caller reached; "": unknown.
        lost: Nodes that the answering agent continues without, as in `ClientHello`.
    """

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
    """The content of a frame before a key exists: a credential or a refusal."""

    credential: bytes = b""
    refusal: str = ""


class LinkSession(msgspec.Struct, frozen=True):
    """An authenticated connection: the keys of both directions and the other end's description of itself."""

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
    peer_successor: int = 0


_hello = Strict(msgspec.msgpack.Decoder(ClientHello))
_answer = Strict(msgspec.msgpack.Decoder(ServerHello))
_envelope = Strict(msgspec.msgpack.Decoder(Envelope))


def _derive_keys(hello: ClientHello, share: bytes, secret: bytes) -> tuple[bytes, bytes]:
    shares = hello.share + share
    key = hashlib.blake2b(shares, key=secret).digest() if secret else shares

    def derive(label: bytes) -> bytes:
        return hashlib.blake2b(label + hello.nonce, key=key, digest_size=32).digest()

    return derive(b"gemini-hpc client to server"), derive(b"gemini-hpc server to client")


def _open(data: bytes) -> Opened:
    try:
        envelope = _envelope.decode(data)
    except msgspec.MsgspecError:
        raise HandshakeError("malformed greeting") from None
    if envelope.refusal:
        raise HandshakeError(f"refused: {envelope.refusal[:200]}")
    try:
        return credentials.decode(envelope.credential)
    except CredentialError as exc:
        raise HandshakeError(str(exc)) from None


def encode_refusal(reason: str) -> bytes:
    """Return the plain answer to a rejected client."""
    return msgspec.msgpack.encode(Envelope(refusal=reason))


class Caller(NamedTuple):
    """The calling process, with the fields of `ClientHello` that tell of it."""

    cluster: str
    source: str
    instance: str
    restart: int = 0
    lost: tuple[str, ...] = ()


class HandshakeClient:
    """The calling side of one handshake."""

    def __init__(
        self, caller: Caller, *, purpose: str, job: int, target: str, server_uid: int, successor: int = 0
    ) -> None:
        self._hello = ClientHello(
            least=version.OLDEST,
            most=version.CURRENT,
            purpose=purpose,
            job=job,
            target=target,
            nonce=os.urandom(16),
            share=os.urandom(32),
            successor=successor,
            **caller._asdict(),
        )
        self._server_uid = server_uid

    def build_greeting(self, dialled: str = "") -> bytes:
        """Return the first bytes to send.

        Args:
            dialled: Endpoint that the bytes go to.

        Raises:
            HandshakeError: No credential is issued.
        """
        self._hello = msgspec.structs.replace(self._hello, dialled=dialled)
        try:
            credential = credentials.encode(
                msgspec.msgpack.encode(self._hello), for_uid=self._server_uid, job=self._hello.job
            )
        except CredentialError as exc:
            raise HandshakeError(str(exc)) from None
        return msgspec.msgpack.encode(Envelope(credential=credential))

    def finish(self, data: bytes) -> LinkSession:
        """Return the session that the server's answer establishes.

        Raises:
            HandshakeError: The answer is a refusal, malformed, or not from the expected server.
        """
        opened = _open(data)
        if opened.uid not in (self._server_uid, 0):
            raise HandshakeError(f"answered by uid {opened.uid}, wanted {self._server_uid}")
        try:
            answer = _answer.decode(opened.payload)
        except msgspec.MsgspecError:
            raise HandshakeError("malformed answer") from None
        if answer.nonce != self._hello.nonce or len(answer.share) != 32:
            raise HandshakeError("the answer is not to this greeting")
        if answer.job != self._hello.job or answer.host != self._hello.target:
            raise HandshakeError(f"answered by {answer.host} for job {answer.job}")
        if elsewhere := endpoint.find_mismatch(self._hello.dialled, answer.listening):
            raise HandshakeError(elsewhere)
        if self._hello.purpose in ("link", "push") and answer.restart != self._hello.restart:
            raise HandshakeError(f"answered by restart {answer.restart}")
        if self._hello.purpose in ("link", "push") and answer.lost != self._hello.lost:
            raise OtherView(answer.lost)
        if not version.OLDEST <= answer.chosen <= version.CURRENT:
            raise HandshakeError(version.describe_mismatch(answer.chosen, answer.chosen))
        outward, inward = _derive_keys(self._hello, answer.share, opened.secret)
        return LinkSession(
            send_key=outward,
            receive_key=inward,
            peer_uid=opened.uid,
            peer_host=answer.host,
            peer_instance=answer.instance,
            peer_restart=answer.restart,
            purpose=self._hello.purpose,
            job=answer.job,
            proto=answer.chosen,
            peer_lost=answer.lost,
        )


class Greeting(msgspec.Struct, frozen=True):
    """An opened `ClientHello` with the uid that its credential vouches for; the server decides whether to answer.

    Attributes:
        proto: Newest protocol that both ends speak; 0: none.
        opened: Credential that contained the greeting; None if it had none.
    """

    hello: ClientHello
    uid: int
    proto: int = version.CURRENT
    opened: Opened | None = None


def receive(data: bytes) -> Greeting:
    """Open a client's first bytes.

    Raises:
        HandshakeError: The credential is refused or the greeting is malformed.
    """
    opened = _open(data)
    try:
        hello = _hello.decode(opened.payload)
    except msgspec.MsgspecError:
        raise HandshakeError("malformed greeting") from None
    if len(hello.nonce) != 16 or len(hello.share) != 32:
        raise HandshakeError("malformed greeting")
    return Greeting(hello, opened.uid, version.find_common(hello.least, hello.most), opened)


def answer(
    greeting: Greeting, *, host: str, restart: int, instance: str, listening: str = "", lost: tuple[str, ...] = ()
) -> tuple[bytes, LinkSession]:
    """Return the server's answer to an accepted greeting, and its session.

    Args:
        greeting: The accepted greeting.
        host: Name of this host.
        restart: Restart count of the job's incarnation here.
        instance: Identity of this process.
        listening: Endpoint at which the greeting arrived; "": unknown.
        lost: Nodes that this agent continues without.

    Raises:
        HandshakeError: No common protocol, a relayed connection, or no credential is issued.
    """
    hello = greeting.hello
    if not greeting.proto:
        raise HandshakeError(version.describe_mismatch(hello.least, hello.most))
    if elsewhere := endpoint.find_mismatch(hello.dialled, listening):
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
        credential = credentials.encode(
            msgspec.msgpack.encode(reply), for_uid=greeting.uid, job=hello.job, answers=greeting.opened
        )
    except CredentialError as exc:
        raise HandshakeError(str(exc)) from None
    inward, outward = _derive_keys(hello, reply.share, greeting.opened.secret if greeting.opened else b"")
    session = LinkSession(
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
        peer_successor=hello.successor,
    )
    return msgspec.msgpack.encode(Envelope(credential=credential)), session
