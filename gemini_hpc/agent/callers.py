"""Who dials this agent: peers of its incarnation, those that pull or summon, and `gemini-hpc inspect`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gemini_hpc.agent import flush, pull, summons
from gemini_hpc.agent.picture import inspect_part
from gemini_hpc.agent.ports import candidates
from gemini_hpc.core.slots import Stamp
from gemini_hpc.operators import Operators
from gemini_hpc.wire import peer, picture
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import Greeting, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, accept
from gemini_hpc.wire.lobby import Lobby

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

_MAX_CALLERS = 512
_MAX_STRANGERS = 256  # connections that have not been authenticated yet
_ANSWER_S = 5.0


class Callers:
    """The agent's TCP port: everyone is authenticated, admitted for one purpose, and served within bounds."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._count = 0
        self._lobby = Lobby(_MAX_STRANGERS)
        self._operators = Operators(agent.settings.operators, (0, agent.uid, *agent.settings.slurm_uids()))

    async def listen(self) -> tuple[asyncio.Server, int]:
        """On the first of this job's ports that is free; the server, the port. Raises SystemExit if none is."""
        agent = self._agent
        failure: OSError | None = None
        ports = candidates(agent.settings, agent.job)
        for port in ports:
            try:
                return await asyncio.start_server(self._call, agent.address or "0.0.0.0", port, backlog=256), port
            except OSError as exc:
                failure = exc
        raise SystemExit(f"gemini-hpc: no port of {ports} is free: {failure}")

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        agent = self._agent
        address = (writer.get_extra_info("peername") or ("somewhere",))[0]
        ticket = self._lobby.enter(address, writer.transport.abort)
        try:
            try:
                link = await accept(
                    reader,
                    writer,
                    self._admit,
                    host=agent.node,
                    restart=lambda: max(agent.restart, 0),
                    instance=agent.instance,
                )
            finally:
                self._lobby.leave(address, ticket)
            if self._count >= _MAX_CALLERS:
                return
            self._count += 1
            try:
                await self._serve(link)
            finally:
                self._count -= 1
        except (HandshakeError, LinkClosed, FrameError, TimeoutError, OSError) as exc:
            agent.complain(f"a call from {address} has ended: {exc or type(exc).__name__}")
        finally:
            writer.close()

    async def _admit(self, greeting: Greeting) -> str:
        agent, hello = self._agent, greeting.hello
        if hello.cluster != agent.settings.cluster_name or hello.job != agent.job or hello.target != agent.node:
            return f"this is job {agent.job} on {agent.node} of {agent.settings.cluster_name}"
        if hello.purpose == "query":
            return "" if await self._operators.allows(greeting.uid) else "not yours"
        if hello.purpose == "flush":  # it writes: who may only look does not
            return "" if greeting.uid in (0, agent.uid, *agent.settings.slurm_uids()) else "not yours"
        if greeting.uid != agent.uid:
            return "not yours"
        if hello.purpose in ("inventory", "pull") and hello.restart > agent.restart and agent.detached:
            return ""  # a newer incarnation that went on elsewhere may read what is kept here
        if hello.purpose == "summons" and summons.may_summon(agent, hello.restart):
            return ""
        if (
            hello.purpose not in ("link", "pull", "push")
            or hello.source not in agent.hosts
            or hello.source == agent.node
        ):
            return "not a peer"
        if hello.restart != agent.restart:
            return f"restart {agent.restart} here"
        return ""

    async def _serve(self, link: Link) -> None:
        agent, purpose = self._agent, link.session.purpose
        if purpose == "link" and link.session.peer_restart != agent.restart:
            link.abort()
        elif purpose == "link" and agent.mesh is not None:
            await agent.mesh.serve(link.session.peer_host, link)
        elif purpose == "pull":
            await pull.serve(link, self._find)
        elif purpose == "push":
            await agent.incoming.serve(link)
        elif purpose == "summons":
            await summons.answer(agent, link)
        elif purpose == "flush":
            await flush.answer(agent, link)
        elif purpose == "inventory":
            async with asyncio.timeout(_ANSWER_S):
                if isinstance(await link.receive(), peer.Collect):
                    await link.flush(peer.InventoryUp(0, (await agent.member.inventory(verify=False),)))
        elif purpose == "query":
            async with asyncio.timeout(_ANSWER_S):
                message = await link.receive()
                if isinstance(message, picture.InspectAsk):
                    await link.flush(inspect_part(agent, message.request, message.record))

    def _find(self, ask: peer.PullAsk) -> tuple[peer.CopyRecord, Any] | None:
        found = self._agent.store.find(ask.set, ask.rank, Stamp(*ask.stamp))
        if found is None:
            return None
        record = found[0].record(found[1])
        return None if record is None else (record, found[0].memory[found[1]])
