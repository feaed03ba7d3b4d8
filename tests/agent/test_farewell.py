"""The last words of an agent that leaves are read by peers and controller, whatever is on its way meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_hpc.agent.controller_link import ControllerLink
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.config import Settings
from gemini_hpc.wire import peer
from gemini_hpc.wire.controller import EventsUp
from gemini_hpc.wire.handshake import LinkSession
from gemini_hpc.wire.inspect_schema import EventRecord
from gemini_hpc.wire.link import Link, LinkClosed
from gemini_hpc.wire.message import Message

from .contexts import QuietListener, made_context

HOSTS = ("n1", "n2")


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Link]]:
    """Both ends of a connection between n1 and n2."""
    keys = os.urandom(32), os.urandom(32)
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), "127.0.0.1", 0)
    ends = [await asyncio.open_connection(*server.sockets[0].getsockname()), await accepted.get()]
    links = [
        Link(*end, LinkSession(mine, theirs, os.getuid(), host, "x", 0, "link", 1))
        for end, mine, theirs, host in zip(ends, keys, keys[::-1], HOSTS[::-1], strict=True)
    ]
    try:
        yield links[0], links[1]
    finally:
        for link in links:
            link.abort()
        server.close()


def mesh(host: str) -> Mesh:
    """Return the mesh of an agent on this host, which dials nobody."""
    identity = AgentIdentity(Settings(), 1, os.getuid(), host, "", instance="x")
    return Mesh(identity, 0, HOSTS, QuietListener(), lambda text: None)


async def turns() -> None:
    """Wait until frames under way on this machine have come."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def reset(link: Link) -> None:
    """End the connection as a host does that has lost it."""
    sock = link._writer.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.abort()


async def everything(link: Link) -> list[Message]:
    """All messages up to the end of the connection."""
    found: list[Message] = []
    while True:
        try:
            found.append(await link.receive())
        except LinkClosed:
            return found


def test_a_peer_that_sends_meanwhile_reads_it() -> None:
    """It writes to the connection twice before it reads: of a closed one the first write is answered by a reset."""

    async def run() -> None:
        async with linked() as (near, far):
            leaver = mesh("n1")
            served = asyncio.ensure_future(leaver.serve("n2", near))
            await turns()
            leaver.leave()
            for _ in range(2):
                far.send(peer.Ping())
                await turns()
            assert not leaver.links["n2"].is_read
            assert peer.AgentLeft() in await everything(far)
            far.close()
            await leaver.wait_until_informed()
            assert served.done() and not leaver.links, "its answer is the end of the connection"
            leaver.close()

    asyncio.run(run())


def test_who_leaves_at_the_same_time_is_heard() -> None:
    async def run() -> None:
        async with linked() as (near, far):
            both = {"n2": mesh("n1"), "n1": mesh("n2")}
            ends = [
                asyncio.ensure_future(both["n2"].serve("n2", near)),
                asyncio.ensure_future(both["n1"].serve("n1", far)),
            ]
            await turns()
            for one in both.values():
                one.leave()
            await asyncio.gather(*(one.wait_until_informed() for one in both.values()), *ends)
            for one in both.values():
                one.close()

    asyncio.run(run())


@pytest.mark.parametrize("at", ["before", "then"])
def test_a_peer_whose_link_is_lost_at_that_moment_is_told_on_the_next_one(at: str) -> None:
    async def run() -> None:
        leaver, other = mesh("n1"), mesh("n2")
        leaver.detector.partners.add("n2")
        async with linked() as (near, far):
            ends = [asyncio.ensure_future(leaver.serve("n2", near))]
            await turns()
            if at == "then":
                leaver.leave()
            reset(far)
            await turns()
            assert not leaver.links
            leaver.leave()
        waits = asyncio.ensure_future(leaver.wait_until_informed())
        await turns()
        assert not waits.done()
        async with linked() as (near, far):
            ends += [
                asyncio.ensure_future(leaver.serve("n2", near)),
                asyncio.ensure_future(other.serve("n1", far)),
            ]
            await waits
            assert other.left == {"n1"} and not other.list_silent()
        await asyncio.gather(*ends)
        leaver.close()
        other.close()

    asyncio.run(run())


def test_the_controller_reads_the_last_that_an_agent_tells() -> None:
    async def run() -> None:
        async with linked() as (near, far):
            listener: Any = SimpleNamespace(finished=None)
            line = ControllerLink(made_context(Membership()), listener)
            served = asyncio.ensure_future(line._serve(near))
            await turns()
            told = EventRecord(1.0, "released", "n1", 0, 5, "the training succeeded")
            line.send_event(told)
            hangs_up = asyncio.ensure_future(line.hang_up())
            await turns()
            for _ in range(2):
                far.send(peer.Ping())
                await turns()
            assert not hangs_up.done()
            assert EventsUp(7, (told,)) in await everything(far)
            far.close()
            await hangs_up
            with pytest.raises(LinkClosed):
                await served

    asyncio.run(run())
