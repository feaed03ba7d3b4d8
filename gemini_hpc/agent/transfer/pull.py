"""Transfer of one copy from a holder to this node: a connection of its own, raw bytes, digest verified on arrival."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from threading import Event
from typing import NamedTuple

from gemini_hpc import clock
from gemini_hpc.agent.replicas.digest_pool import DigestPool, Urgency
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import Digest
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError
from gemini_hpc.wire.link import BlockingLink, Link, LinkClosed

SILENCE_S = 5.0  # time limit for one message or one read
PATIENCE_S = 60.0  # patience with a source that still makes or pulls the copy
_LOOK_S = 0.05  # interval of retries with a source that does not have the copy yet
_PIECE_BYTES = 4 << 20
_STEP_BYTES = 512 << 10  # bytes received and hashed at once, small enough for the processor's cache


class PullFailed(Exception):
    """A failure of all sources to serve the copy. The message names each source with its reason."""


class Source(NamedTuple):
    """An agent that may serve a copy, and the stamp that the copy has there."""

    host: str
    address: str
    port: int
    client: HandshakeClient
    stamp: Stamp


class NotYet(PullFailed):
    """A refusal of a source that does not have the copy yet."""


async def serve(link: Link, pool: DigestPool, find: Callable[[peer.PullAsk], tuple[Copy, Memfd] | bool]) -> None:
    """Answer one `PullAsk` on a connection and close it.

    Args:
        link: The connection.
        pool: Threads that make the digest of a part.
        find: Returns the copy with its memory, or whether the copy is on its way here.
    """
    try:
        async with asyncio.timeout(SILENCE_S):
            ask = await link.receive()
        if not isinstance(ask, peer.PullAsk):
            return
        found = find(ask)
        if isinstance(found, bool):
            await link.flush(peer.PullHead(None, "on its way there" if found else "not held here", later=found))
            return
        record, memory = found
        start, end = (ask.start, ask.end) if ask.end else (0, record.used)
        if not start < end <= record.used:
            await link.flush(peer.PullHead(None, f"bytes {start} to {end} of {record.used}"))
            return
        part = await pool.digest(memory, end, start, urgency=Urgency.ARRIVING) if ask.end else ""
        sock = await link.hand_over(peer.PullHead(record, part=part))
        await asyncio.to_thread(_send, sock, memory, start, end)
    except (LinkClosed, TimeoutError, OSError):
        pass
    finally:
        link.abort()


def _send(sock: socket.socket, memory: Memfd, start: int, end: int) -> None:
    with sock, memory.view() as view:
        sock.settimeout(SILENCE_S)
        for at in range(start, end, _PIECE_BYTES):
            sock.sendall(view[at : min(end, at + _PIECE_BYTES)])


def fetch(
    copy: Copy,
    memory: Memfd,
    sources: Sequence[Source],
    stop: Event,
) -> tuple[str, str]:
    """Pull a copy into `memory` (blocking). Return the source host and the failures of earlier sources.

    Args:
        copy: The copy to pull.
        memory: Memory to write to.
        sources: Sources in the order in which they are tried.
        stop: Cancels the pull.

    Raises:
        PullFailed: All sources fail, or `stop` is set meanwhile.
    """
    failures: list[str] = []
    for source in sources:
        try:
            _fetch_patiently(copy, memory, source, stop)
            return source.host, "; ".join(failures)
        except (OSError, HandshakeError, LinkClosed, FrameError, PullFailed) as exc:
            failures.append(f"{source.host}: {str(exc) or type(exc).__name__}")
    raise PullFailed("; ".join(failures) or "no node holds the copy")


def fetch_part(
    copy: Copy, start: int, end: int, source: Source, take: Callable[[int, memoryview], None], stop: Event
) -> None:
    """Pull the bytes from `start` to `end` of a copy, or of the parity beside it (blocking).

    Args:
        copy: The copy.
        start: First byte.
        end: Byte after the last one.
        source: Agent to pull from.
        take: Receives each piece with its distance from `start`, before the digest of the whole part is verified.
        stop: Cancels the pull.

    Raises:
        PullFailed: The source cannot serve the part, the digest does not match, or `stop` is set.
        OSError: The connection fails.
        HandshakeError: The handshake fails.
        LinkClosed: The source closes the connection.
        FrameError: The source sends a malformed frame.
    """
    link = BlockingLink.connect(source.address, source.port, source.client, SILENCE_S)
    try:
        link.sock.settimeout(SILENCE_S)
        link.send(peer.PullAsk(copy.set, copy.rank, source.stamp, bool(copy.of), start, end))
        head = link.receive(peer.PullHead)
        if head.copy is None:
            raise PullFailed(head.reason)
        if _content(head.copy) != _content(copy):
            raise PullFailed("offers a different copy from the planned one")
        hasher, piece, at = Digest(), bytearray(min(_PIECE_BYTES, end - start)), 0
        while at < end - start:
            if stop.is_set():
                raise PullFailed("cancelled by a new recovery round")
            with memoryview(piece)[: min(len(piece), end - start - at)] as room:
                n = link.sock.recv_into(room)
                if n == 0:
                    raise PullFailed(f"connection closed after {at} of {end - start} bytes")
                with room[:n] as data:
                    hasher.update(data)
                    take(at, data)
                at += n
        if hasher.hexdigest() != head.part:
            raise PullFailed("the digest of a part does not match")
    finally:
        link.close()


def _content(copy: Copy) -> tuple[object, ...]:
    return copy.used, copy.digest, copy.of, copy.blocks, copy.room


def _fetch_patiently(copy: Copy, memory: Memfd, source: Source, stop: Event) -> None:
    deadline = clock.monotonic() + PATIENCE_S
    while True:
        try:
            return _fetch_one(copy, memory, source, stop)
        except NotYet:
            if clock.monotonic() > deadline or stop.is_set():
                raise
        clock.sleep(_LOOK_S)


def _fetch_one(copy: Copy, memory: Memfd, source: Source, stop: Event) -> None:
    link = BlockingLink.connect(source.address, source.port, source.client, SILENCE_S)
    try:
        link.sock.settimeout(SILENCE_S)
        link.send(peer.PullAsk(copy.set, copy.rank, source.stamp))
        head = link.receive(peer.PullHead)
        if head.copy is None:
            raise (NotYet if head.later else PullFailed)(head.reason)
        if head.copy.used != copy.used or head.copy.digest != copy.digest:
            raise PullFailed("offers a different copy from the planned one")
        hasher = Digest()
        with memory.view() as view:
            at = 0
            while at < copy.used:
                if stop.is_set():
                    raise PullFailed("cancelled by a new recovery round")
                n = link.sock.recv_into(view[at : min(copy.used, at + _STEP_BYTES)])
                if n == 0:
                    raise PullFailed(f"connection closed after {at} of {copy.used} bytes")
                hasher.update(view[at : at + n])
                at += n
        if hasher.hexdigest() != copy.digest:
            raise PullFailed("the digest does not match: damaged copy")
    finally:
        link.close()
