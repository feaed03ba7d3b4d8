"""Before anybody has said who he is: floods of connections, and strangers behind ports that an agent should have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError
from gemini_hpc.wire.link import Link, accept, connect_any
from gemini_hpc.wire.preauth_limit import PreauthLimit

from .fake_munge import ALICE, FakeMunge, client

# ---- the lobby -------------------------------------------------------------------------------------------


class Crowd:
    def __init__(self, most: int) -> None:
        self.lobby = PreauthLimit(most)
        self.gone: list[tuple[str, int]] = []
        self.tickets: dict[tuple[str, int], int] = {}

    def enter(self, address: str, number: int) -> None:
        self.tickets[address, number] = self.lobby.enter(address, lambda: self.gone.append((address, number)))


def test_a_flood_pushes_out_only_itself() -> None:
    crowd = Crowd(100)
    for n in range(3):
        crowd.enter("victim", n)
    for n in range(1000):
        crowd.enter("flood", n)
    crowd.enter("victim", 3)
    assert len(crowd.lobby) == 100
    assert {address for address, _ in crowd.gone} == {"flood"}
    assert [n for _, n in crowd.gone] == list(range(904)), "its oldest first: the newest has had the least time"


def test_many_addresses_and_places_that_become_free() -> None:
    crowd = Crowd(10)
    for n in range(10):
        crowd.enter(f"a{n}", n)
    crowd.enter("a3", 99)
    assert len(crowd.gone) == 1 and len(crowd.lobby) == 10
    for (address, _), ticket in crowd.tickets.items():
        crowd.lobby.leave(address, ticket)
        crowd.lobby.leave(address, ticket)
    assert len(crowd.lobby) == 0
    crowd.enter("b", 0)
    assert len(crowd.gone) == 1


# ---- ports that strangers listen on ----------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


async def _agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer, lambda _: "", host="n2", read_restart=lambda: 1, instance="i2")


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)
    writer.close()


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\0\0\0\4\xc1\xc1\xc1\xc1")
    writer.close()


async def _hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


STRANGERS: dict[str, list[Serve]] = {
    "silent": [_silent],
    "all kinds": [_garbage, _silent, _hangs_up, _silent],
    "nearly all ports": [_silent] * 8,
}


async def _dial(servers: list[Serve], timeout_s: float = 3.0) -> tuple[int, int]:
    """(port that was linked, port of the last server)"""
    listening = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in servers]
    ports = [server.sockets[0].getsockname()[1] for server in listening]
    try:
        link, port = await connect_any("127.0.0.1", ports, lambda: client(target="n2"), timeout_s)
        link.abort()
        return port, ports[-1]
    finally:
        for server in listening:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def test_agent_behind_strangers_is_found(fake: FakeMunge) -> None:
    """Ports follow from the job's id: anybody on the host can take the first ones."""
    for name, strangers in STRANGERS.items():
        found, wanted = asyncio.run(_dial([*strangers, _agent]))
        assert found == wanted, name


def test_strangers_only(fake: FakeMunge) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(_dial([_silent, _hangs_up], 1.0))
    with pytest.raises(HandshakeError):
        asyncio.run(_dial([_garbage, _hangs_up], 1.0))


def test_nobody_there() -> None:
    async def run() -> tuple[Link, int]:
        server = await asyncio.start_server(_silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await connect_any("127.0.0.1", [port], _never, 2.0)

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(run())


def _never() -> HandshakeClient:
    return client(server_uid=ALICE)
