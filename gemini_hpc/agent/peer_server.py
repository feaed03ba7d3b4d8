"""The agent's TCP server for peers of its incarnation, for pulls and summons, and for `gemini-hpc inspect`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gemini_hpc import clock
from gemini_hpc.agent.inspect_part import InspectView
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.retention import Retention
from gemini_hpc.agent.transfer import pull_source
from gemini_hpc.agent.wake_peers import Wake
from gemini_hpc.core.copy import Copy
from gemini_hpc.operators import Operators
from gemini_hpc.wire import inspect_schema, peer
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import Greeting, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, accept
from gemini_hpc.wire.ports import list_candidates
from gemini_hpc.wire.preauth_limit import PreauthLimit

_MAX_CALLERS = 512
_MAX_STRANGERS = 256  # limit of connections that are not authenticated yet
_ANSWER_S = 5.0  # an admitted caller sends its request at once; a silent one would hold a connection


class PeerServer:
    """A TCP port where each caller is authenticated, admitted for one purpose, and served within bounds."""

    def __init__(
        self,
        context: AgentContext,
        store: Store,
        waker: Wake,
        view: InspectView,
        build_inventory: Callable[[], Awaitable[peer.InventoryRecord]],
        on_nodes_lost: Callable[[tuple[str, ...]], None],
        retention: Retention,
        services: Mapping[str, Callable[[Link], Awaitable[None]]],
    ) -> None:
        """Create the server; `listen` opens the port.

        Args:
            context: The agent's context.
            store: The agent's copies.
            waker: Admits summons.
            view: The agent's view of the job.
            build_inventory: Returns the inventory of this node, unverified.
            on_nodes_lost: Called with the lost nodes of another view, when a peer has it.
            retention: Decides whether other jobs of the owner are served.
            services: Serve the connections of further purposes, by purpose.
        """
        self._identity, self._membership, self._events = context.identity, context.membership, context.events
        self._store, self._waker, self._view, self._build_inventory = store, waker, view, build_inventory
        self._on_nodes_lost, self._retention, self._services = on_nodes_lost, retention, services
        self._count = 0
        self._preauth_limit = PreauthLimit(_MAX_STRANGERS)
        self._operators = Operators(context.settings.operators, self._owners)

    @property
    def _owners(self) -> tuple[int, ...]:
        return 0, self._identity.uid, *self._identity.settings.list_slurm_uids()

    async def listen(self) -> tuple[asyncio.Server, int]:
        """Listen on the first free port of this job's ports, and return the server and the port.

        Raises:
            SystemExit: No port is free.
        """
        identity = self._identity
        failure: OSError | None = None
        ports = list_candidates(identity.settings, identity.job)
        for port in ports:
            try:
                return await asyncio.start_server(
                    self._on_connection, identity.address or "0.0.0.0", port, backlog=256
                ), port
            except OSError as exc:
                failure = exc
        reason = failure.strerror or failure if failure is not None else "none was tried"
        raise SystemExit(
            f"gemini-hpc: none of the TCP ports {min(ports)}-{max(ports)} of job {identity.job} is free on "
            f"{identity.node} ({reason}): free some, or raise agent_port_count"
        )

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = (writer.get_extra_info("peername") or ("somewhere",))[0]
        ticket = self._preauth_limit.enter(address, writer.transport.abort)
        try:
            try:
                link = await accept(
                    reader,
                    writer,
                    self._admit,
                    host=self._identity.node,
                    read_restart=lambda: max(self._membership.restart, 0),
                    instance=self._identity.instance,
                    list_lost=lambda: self._membership.lost,
                )
            finally:
                self._preauth_limit.leave(address, ticket)
            if self._count >= _MAX_CALLERS:
                return
            self._count += 1
            try:
                await self._serve(link)
            finally:
                self._count -= 1
        except (HandshakeError, LinkClosed, FrameError, TimeoutError, OSError) as exc:
            self._events.log_rate_limited(f"connection from {address} ended: {str(exc) or type(exc).__name__}")
        finally:
            writer.close()

    async def _admit(self, greeting: Greeting) -> str:
        identity, membership, hello = self._identity, self._membership, greeting.hello
        if (
            hello.cluster != identity.settings.cluster_name
            or hello.job != identity.job
            or hello.target != identity.node
        ):
            return f"this is job {identity.job} on {identity.node} of {identity.settings.cluster_name}"
        if hello.purpose == "query":
            return "" if await self._operators.allows(greeting.uid) else "the job belongs to another user"
        if hello.purpose in ("flush", "evacuate"):  # these purposes write: an operator who may only look is refused
            return "" if greeting.uid in self._owners else "the job belongs to another user"
        if greeting.uid != identity.uid:
            return "the job belongs to another user"
        if hello.successor:  # another job of the owner may read copies that are kept for no other use
            known = hello.purpose in ("inventory", "pull", "taken") and hello.successor != identity.job
            return (
                self._retention.explain_refusal() if known else "not from a node of this job, as this agent knows it"
            )
        if hello.purpose in ("inventory", "pull") and hello.restart > membership.restart and membership.detached:
            return ""  # a newer incarnation that went on elsewhere may read the copies kept here
        if hello.purpose == "wake" and self._waker.admits(hello.restart):
            return ""
        known = hello.source in membership.hosts or hello.source in membership.lost
        if hello.purpose not in ("link", "pull", "push") or not known or hello.source == identity.node:
            return "not from a node of this job, as this agent knows it"
        if hello.restart != membership.restart:
            return f"this agent is at restart {membership.restart}"
        # If the views differ, note the caller's; the caller learns ours in the handshake and is not served
        if hello.lost != membership.lost and not membership.detached:
            self._on_nodes_lost(hello.lost)
        return ""

    async def _serve(self, link: Link) -> None:
        purpose, incarnation = link.session.purpose, self._membership.incarnation
        own_view = (self._membership.restart, self._membership.lost)
        alike = (link.session.peer_restart, link.session.peer_lost) == own_view
        if purpose in ("link", "push") and not alike:
            link.close()  # the handshake has shown the caller this agent's view
        elif purpose == "link" and incarnation is not None:
            await incarnation.mesh.serve(link.session.peer_host, link)
        elif purpose == "pull":
            await pull_source.serve(link, self._store.pool, self._find_copy)
        elif (serve := self._services.get(purpose)) is not None:
            await serve(link)
        elif purpose == "taken":
            async with asyncio.timeout(_ANSWER_S):
                if isinstance(await link.receive(), peer.TakenOver) and not self._retention.explain_refusal():
                    reason = f"job {link.session.peer_successor} has taken it over"
                    self._retention.leave(clock.monotonic(), reason, save=False)
        elif purpose == "inventory":
            async with asyncio.timeout(_ANSWER_S):
                if isinstance(await link.receive(), peer.Collect):
                    await link.flush(peer.InventoryUp(0, (await self._build_inventory(),)))
        elif purpose == "query":
            async with asyncio.timeout(_ANSWER_S):
                message = await link.receive()
                if isinstance(message, inspect_schema.InspectAsk):
                    kept_until = self._retention.compute_kept_until()
                    await link.flush(self._view.build_part(message.request, kept_until, message.record))

    def _find_copy(self, ask: peer.PullAsk) -> tuple[Copy, Any] | bool:
        found = self._store.find_version(ask.training, ask.rank, ask.stamp, parity=ask.parity)
        if found is None:
            return False
        shard, index = found
        record, slot = shard.describe_copy(index), shard.pair.slots[index]
        restored = slot.state == "filling" and slot.stamp is not None and slot.stamp.epoch < self._membership.epoch
        return restored if record is None else (record, shard.memory[index])
