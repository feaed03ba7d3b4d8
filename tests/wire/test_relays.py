"""Somebody in between: listens where one of ours should, and passes every byte on to where that one really is."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial

import msgspec
import pytest
from refusals import refusal

from gemini_hpc.wire import endpoint, handshake
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import accept, connect_any

from .fake_munge import FakeMunge, client

HERE = "127.0.0.1"


class Server:
    """An agent's port, with what became of each call."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = await accept(reader, writer, lambda _: "", host="n2", read_restart=lambda: 1, instance="i2")
            self.said.append("link")
            await asyncio.sleep(0.1)
            link.abort()
        except HandshakeError as exc:
            self.said.append(str(exc))


async def _relay(target: int, kept: list[bytes]) -> asyncio.Server:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                kept.append(data)
                writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inward, outward = await asyncio.open_connection(HERE, target)
        await asyncio.gather(pump(reader, outward), pump(inward, writer))

    return await asyncio.start_server(between, HERE, 0)


def _port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


def test_relay_in_front_of_an_agent_is_passed_by(fake: FakeMunge) -> None:
    async def run() -> None:
        server, kept = Server(), list[bytes]()
        real = await asyncio.start_server(server, HERE, 0)
        relay = await _relay(_port(real), kept)
        link, port = await connect_any(HERE, [_port(relay), _port(real)], lambda: client(target="n2"), 3.0)
        link.abort()
        assert port == _port(real), "the link goes to the listener itself"
        assert kept, "the relay was called"
        words = f"dialled at {HERE}:{_port(relay)}, listening at {HERE}:{_port(real)}"
        assert server.said[0].startswith(words) and server.said[1:] == ["link"], server.said
        real.close()
        relay.close()

    asyncio.run(run())


def test_caller_sees_a_relay_by_itself(fake: FakeMunge) -> None:
    """It is enough that one of the two ends looks."""
    caller = client()
    greeting = handshake.receive(caller.build_greeting("10.0.0.2:17000"))
    blind = msgspec.structs.replace(greeting, hello=msgspec.structs.replace(greeting.hello, dialled=""))
    data, _ = handshake.answer(blind, host="n2", restart=1, instance="x", listening="10.0.0.2:17001")
    with pytest.raises(HandshakeError, match=r"dialled at 10\.0\.0\.2:17000, listening at 10\.0\.0\.2:17001"):
        caller.finish(data)


def test_older_releases_do_not_say_where(fake: FakeMunge) -> None:
    caller = client()
    data, _ = handshake.answer(handshake.receive(caller.build_greeting()), host="n2", restart=1, instance="x")
    assert caller.finish(data).peer_host == "n2"
    caller = client()
    greeting = handshake.receive(caller.build_greeting("10.0.0.2:17000"))
    assert greeting.hello.dialled == "10.0.0.2:17000"
    data, _ = handshake.answer(greeting, host="n2", restart=1, instance="x", listening="")
    assert caller.finish(data).peer_host == "n2"


def test_another_port_or_address_is_another_end(fake: FakeMunge) -> None:
    for listening in ("10.0.0.2:17001", "10.0.0.3:17000", "[fd00::2]:17000"):
        greeting = handshake.receive(client().build_greeting("10.0.0.2:17000"))
        answer = partial(handshake.answer, greeting, host="n2", restart=1, instance="x")
        assert "relays this connection" in refusal(HandshakeError, answer, listening=listening), listening


def test_both_ends_name_one_connection_alike() -> None:
    for family, host in ((socket.AF_INET, HERE), (socket.AF_INET6, "::1")):
        with socket.socket(family) as server:
            server.bind((host, 0))
            server.listen(1)
            with socket.create_connection(server.getsockname()[:2]) as calling, server.accept()[0] as taken:
                assert endpoint.read_remote(calling) == endpoint.read_local(taken) != "", host


def test_ipv4_on_a_socket_for_both() -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen(1)
        with socket.create_connection((HERE, server.getsockname()[1])) as calling, server.accept()[0] as taken:
            assert endpoint.read_remote(calling) == endpoint.read_local(taken) != ""
