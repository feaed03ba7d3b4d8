"""Moving one copy from a holder to this node: a connection of its own, raw bytes, digest checked on landing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from threading import Event
from typing import NamedTuple

import xxhash

from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import Client, HandshakeError
from gemini_hpc.wire.link import BlockingLink, Link, LinkClosed

SILENCE_S = 5.0
_PIECE_BYTES = 4 << 20


class PullFailed(Exception):
    """No source could serve the copy; the message names each with its reason."""


class Source(NamedTuple):
    """An agent that may serve a copy, and the stamp that it has there."""

    host: str
    address: str
    port: int
    client: Client
    stamp: Stamp


async def serve(link: Link, find: Callable[[peer.PullAsk], tuple[Copy, Memfd] | None]) -> None:
    """Answer one `PullAsk` on a connection and close it."""
    try:
        async with asyncio.timeout(SILENCE_S):
            ask = await link.receive()
        if not isinstance(ask, peer.PullAsk):
            return
        found = find(ask)
        if found is None:
            await link.flush(peer.PullHead(None, "not held here"))
            return
        record, memory = found
        sock = await link.hand_over(peer.PullHead(record))
        await asyncio.to_thread(_send, sock, memory, record.used)
    except (LinkClosed, TimeoutError, OSError):
        pass
    finally:
        link.abort()


def _send(sock: socket.socket, memory: Memfd, used_bytes: int) -> None:
    with sock, memory.view() as view:
        sock.settimeout(SILENCE_S)
        for at in range(0, used_bytes, _PIECE_BYTES):
            sock.sendall(view[at : min(used_bytes, at + _PIECE_BYTES)])


def fetch(
    copy: Copy,
    memory: Memfd,
    sources: Sequence[Source],
    stop: Event,
) -> tuple[str, str]:
    """Pull a copy into `memory` (blocking): (source host, what went wrong with earlier sources).

    sources: in the order in which they are tried. Raises `PullFailed`, also soon after `stop` is set.
    """
    failures: list[str] = []
    for source in sources:
        try:
            _fetch_one(copy, memory, source, stop)
            return source.host, "; ".join(failures)
        except (OSError, HandshakeError, LinkClosed, FrameError, PullFailed) as exc:
            failures.append(f"{source.host}: {exc or type(exc).__name__}")
    raise PullFailed("; ".join(failures) or "no node holds the copy")


def _fetch_one(copy: Copy, memory: Memfd, source: Source, stop: Event) -> None:
    link = BlockingLink.connect(source.address, source.port, source.client, SILENCE_S)
    try:
        link.sock.settimeout(SILENCE_S)
        link.send(peer.PullAsk(copy.set, copy.rank, source.stamp))
        head = link.receive(peer.PullHead)
        if head.copy is None:
            raise PullFailed(head.reason)
        if head.copy.used != copy.used or head.copy.digest != copy.digest:
            raise PullFailed("offers a different copy from the planned one")
        hasher = xxhash.xxh3_128()
        with memory.view() as view:
            at = 0
            while at < copy.used:
                if stop.is_set():
                    raise PullFailed("cancelled by a new recovery round")
                n = link.sock.recv_into(view[at : min(copy.used, at + _PIECE_BYTES)])
                if n == 0:
                    raise PullFailed(f"connection closed after {at} of {copy.used} bytes")
                hasher.update(view[at : at + n])
                at += n
        if hasher.hexdigest() != copy.digest:
            raise PullFailed("the digest does not match: damaged copy")
    finally:
        link.close()
