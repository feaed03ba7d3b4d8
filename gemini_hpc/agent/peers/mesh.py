"""Links to peer agents: dialling, heartbeats, and the reaction to silence.

The agent at position p of the host list keeps links to its tree parent and children. Further links go to its two
neighbours on either side of the ring of positions, and to the members of its placement group. The agent at the later
position dials the earlier one. `failure_detector` decides which peers count as dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from gemini_hpc import clock
from gemini_hpc.agent.peers.failure_detector import Doubt, Effect, FailureDetector, Liveness, Probe
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.wire import peer, protocol
from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError, OtherView
from gemini_hpc.wire.link import Link, LinkClosed, connect_any
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.ports import list_candidates

_PARALLEL_SEARCHES = 64
# agents of a job start within a second of each other; a missing one is dialled twice a second
_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
_PART_S = 1.0  # seconds in which any reachable peer has received a farewell


class MeshListener(Protocol):
    """The agent, as far as its links to peers concern it."""

    def on_link(self, host: str) -> None:
        """Handle a new link to a peer."""

    def on_message(self, host: str, message: protocol.AnyMessage) -> None:
        """Handle a message of a peer."""

    def on_dead(self, host: str, witnesses: tuple[str, ...], known: bool) -> None:
        """Handle the death of a peer.

        Args:
            host: The peer.
            witnesses: The hosts that found it dead.
            known: The death was known when the incarnation began.
        """

    def on_nodes_lost(self, hosts: tuple[str, ...]) -> None:
        """Handle the view of a peer that goes on without these nodes."""


class Mesh:
    """The links of one agent in one incarnation."""

    def __init__(
        self,
        identity: AgentIdentity,
        restart: int,
        hosts: tuple[str, ...],
        listener: MeshListener,
        complain: Callable[[str], None],
        *,
        expected: Collection[str] = (),
        lost: tuple[str, ...] = (),
    ) -> None:
        """Create the mesh without links.

        Args:
            identity: The agent's identity.
            restart: Number of the incarnation.
            hosts: Its nodes.
            listener: Handles links, messages and deaths.
            complain: Logs a fault of a peer.
            expected: Hosts whose agents were alive in the incarnation before.
            lost: Nodes of the incarnation that it goes on without.
        """
        self._identity, self._settings = identity, identity.settings
        self._listener, self._complain, self._lost = listener, complain, lost
        self.host, self.restart, self.hosts = identity.node, restart, hosts
        self.position = {h: i for i, h in enumerate(hosts)}
        self.links: dict[str, Link] = {}
        self.ports: dict[str, int] = {}
        self.detector = FailureDetector(self.host, hosts, self.silence_s, clock.monotonic(), expected)
        self._tasks: set[asyncio.Task[None]] = set()
        self._probes: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._parting = False
        self._uninformed: set[str] = set()  # peers that may not know yet that this agent leaves
        self._all_told = asyncio.Event()
        self._spawn(self._beat())

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- partners --------------------------------------------------------------------------------------

    def want(self, partners: Iterable[str]) -> None:
        """Keep links to these hosts, too. Dial those before us in the host list."""
        for name in partners:
            if name == self.host or name in self.detector.partners or name not in self.position:
                continue
            self.detector.partners.add(name)
            if self.position[name] < self.position[self.host]:
                self._spawn(self._keep_connected(name))

    def list_ring_neighbours(self, reach: int = 2) -> set[str]:
        """Return the neighbours on the ring of positions."""
        n, p = len(self.hosts), self.position[self.host]
        return {self.hosts[(p + d) % n] for d in range(-reach, reach + 1)} - {self.host}

    def build_client(self, target: str, purpose: str) -> HandshakeClient:
        """Return the calling side of a handshake with a peer of this job."""
        identity, caller = self._identity, self._identity.build_caller(self.restart, self._lost)
        return HandshakeClient(caller, purpose=purpose, job=identity.job, target=target, server_uid=identity.uid)

    async def _dial(self, name: str, timeout_s: float) -> Link:
        return await self.dial(name, "link", timeout_s)

    async def dial(self, name: str, purpose: str, timeout_s: float) -> Link:
        """Open a new connection to a peer.

        Raises:
            OSError: No connection can be made.
            TimeoutError: The peer does not answer in time.
            HandshakeError: The peer refuses, or does not authenticate.
        """
        ports = list_candidates(self._settings, self._identity.job)
        known = self.ports.get(name)
        if known is not None:
            ports = [known, *(p for p in ports if p != known)]
        ports = ports[: len(ports) if known is None else 4]
        address = self._settings.format_address(name)
        try:
            link, port = await connect_any(address, ports, lambda: self.build_client(name, purpose), timeout_s)
        except OtherView as exc:
            self._listener.on_nodes_lost(exc.lost)
            raise
        self.ports[name] = port
        return link

    async def _keep_connected(self, name: str) -> None:
        tries = 0
        while name not in self.detector.left or name in self._uninformed:
            with suppress(OSError, HandshakeError, TimeoutError):
                link = await self._dial(name, 2.0)
                tries = 0
                await self.serve(name, link)
            await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
            tries += 1

    async def serve(self, name: str, link: Link) -> None:
        """Use an authenticated link until it breaks. A newer link to the same host replaces the older one."""
        old = self.links.get(name)
        if old is not None:
            old.abort()
        self.links[name] = link
        event = "its coming"
        try:
            if self._parting:
                link.finish(peer.AgentLeft())
            else:
                self._carry_out(self.detector.record_message(name, clock.monotonic()))
                self._listener.on_link(name)
            while True:
                message = await link.receive()
                if self._parting:
                    continue
                event = type(message).__name__
                self._carry_out(self.detector.record_message(name, link.last_heard))
                self._dispatch(name, message)
        except LinkClosed as exc:
            if name not in self.detector.left:
                self._complain(f"link to {name} has ended: {exc}")
        except Exception as exc:  # a bad message must not end the dialling of this peer for good
            self._complain(f"link to {name}: could not handle {event}: {exc!r}")
        finally:
            if self.links.get(name) is link:
                del self.links[name]
                if self._parting and link.is_read:
                    self._record_informed(name)
            if name in self.detector.left:
                link.close()  # closing is the answer: a leaving peer waits for it
            else:
                link.abort()

    # ---- messages --------------------------------------------------------------------------------------

    def send(self, name: str, message: Message) -> bool:
        """Send to one host. Return whether there is a link to it."""
        link = self.links.get(name)
        if link is None or link.closed:
            return False
        link.send(message)
        return True

    def _dispatch(self, name: str, message: protocol.AnyMessage) -> None:
        if isinstance(message, peer.Ping):
            return
        if isinstance(message, peer.ProbeAsk):
            self._spawn(self._answer_probe(name, message.host))
        elif isinstance(message, peer.ProbeAnswer):
            future = self._probes.get((name, message.host))
            if future is not None and not future.done():
                future.set_result(message.alive)
        elif isinstance(message, peer.Liveness):
            if message.restart == self.restart:
                effects = self.detector.on_report(name, message.host, alive=message.alive, now=clock.monotonic())
                self._carry_out(effects)
        elif isinstance(message, peer.AgentLeft):
            self._carry_out(self.detector.record_leave(name))
        else:
            self._listener.on_message(name, message)

    def list_silent(self) -> set[str]:
        """Return the partners that are suspected now: silent, or without a link."""
        return self.detector.list_silent(self.links)

    def list_linked(self) -> set[str]:
        """Return the hosts with a link that messages can be sent on."""
        return {host for host, link in self.links.items() if not link.closed}

    def list_unlinked(self) -> set[str]:
        """Return the partners without a link."""
        return self.detector.partners - set(self.links)

    # ---- heartbeats and suspicion ----------------------------------------------------------------------

    @property
    def silence_s(self) -> float:
        """Return the silence in seconds after which a peer is suspected."""
        return self._settings.compute_heartbeat_timeout_s()

    @property
    def dead(self) -> set[str]:
        """Return the hosts that count as dead."""
        return self.detector.dead

    @property
    def left(self) -> set[str]:
        """Return the hosts whose agents have ended after a training that succeeded."""
        return self.detector.left

    @property
    def last_heard(self) -> dict[str, float]:
        """Return the time of each host's last message (monotonic seconds)."""
        return self.detector.last_heard

    async def _beat(self) -> None:
        while True:
            due = clock.monotonic() + self._settings.heartbeat_s
            await asyncio.sleep(self._settings.heartbeat_s)
            for link in list(self.links.values()):
                link.send(peer.Ping())
            now = clock.monotonic()
            self._carry_out(self.detector.suspect_silent(now, self.links, late_s=now - due))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Probe):
                self._spawn(self._probe(effect))
            elif isinstance(effect, Doubt):
                self._spawn(self._probe_again(effect))
            elif isinstance(effect, Liveness):
                for other in self.links:
                    self.send(other, peer.Liveness(effect.host, effect.alive, self.restart))
            else:
                self._listener.on_dead(effect.host, effect.witnesses, effect.known)

    async def _probe(self, probe: Probe) -> None:
        try:
            own_result, *theirs = await asyncio.gather(
                self._can_reach(probe.host, probe.direct_s),
                *(self._ask_witness(other, probe.host, probe.indirect_s) for other in probe.witnesses),
            )
            self._carry_out(self.detector.declare_by_probe(probe, own_result is True, theirs, clock.monotonic()))
        finally:
            self.detector.give_up(probe)

    async def _probe_again(self, doubt: Doubt) -> None:
        if await self._can_reach(doubt.host, doubt.direct_s):
            self._carry_out(self.detector.record_reached(doubt.host, clock.monotonic()))

    async def ensure_link(self, name: str, timeout_s: float) -> bool:
        """Return whether a link to this host exists, after dialling it if none is alive."""
        link = self.links.get(name)
        if link is not None and not link.closed and clock.monotonic() - link.last_heard <= self.silence_s:
            return True
        try:
            made = await self._dial(name, timeout_s)
        except (OSError, HandshakeError, TimeoutError):
            return False
        self._spawn(self.serve(name, made))
        await asyncio.sleep(0)  # lets the new link become registered
        return True

    async def _can_reach(self, name: str, timeout_s: float) -> bool:
        if name in self.detector.left:
            return True
        link = self.links.get(name)
        if link is not None and clock.monotonic() - link.last_heard <= self.silence_s / 2:
            return True
        try:
            probe = await self._dial(name, timeout_s)
        except HandshakeError as exc:
            return str(exc).startswith("refused")
        except (OSError, TimeoutError):
            return False
        probe.abort()
        return True

    async def can_reach_anybody(self, limit_s: float) -> bool:
        """Return whether any peer can be reached, among all hosts not declared dead.

        The hosts include those that are not our partners.
        """
        found, timeout_s = asyncio.Event(), self.silence_s
        names = iter([h for h in self.hosts if h != self.host and h not in self.dead])

        async def search() -> None:
            for name in names:
                if found.is_set() or await self._can_reach(name, timeout_s):
                    found.set()
                    return

        searches = asyncio.gather(*(search() for _ in range(_PARALLEL_SEARCHES)))
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await searches
        return found.is_set()

    async def find_unreached(self, names: Sequence[str], timeout_s: float) -> tuple[str, ...]:
        """Return those of the hosts whose agents cannot be reached, among the first 64."""
        names = names[:_PARALLEL_SEARCHES]
        answers = await asyncio.gather(*(self._can_reach(name, timeout_s) for name in names))
        return tuple(name for name, answer in zip(names, answers, strict=True) if not answer)

    async def _ask_witness(self, other: str, name: str, timeout_s: float) -> bool | None:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._probes[other, name] = future
        try:
            if not self.send(other, peer.ProbeAsk(name)):
                return None
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            self._probes.pop((other, name), None)

    async def _answer_probe(self, asker: str, name: str) -> None:
        if name in self.position:
            alive = await self._can_reach(name, self.silence_s / 2)
            self.send(asker, peer.ProbeAnswer(name, alive))

    def leave(self) -> None:
        """Announce to all peers that this agent ends after the job's success. No host is missed from now on.

        A link that comes only then carries the message, too. The link to the controller ends in the same way. No
        epilog waits for either.
        """
        if self._parting:
            return
        self._parting = True
        known = self.detector.partners.intersection(self.detector.last_heard)
        self._uninformed = known.union(self.links) - self.detector.left - self.detector.dead
        self.detector.left.update(self.hosts)
        for link in self.links.values():
            link.finish(peer.AgentLeft())
        self._record_informed()

    def _record_informed(self, *names: str) -> None:
        """Record peers that know of this agent's end."""
        self._uninformed.difference_update(names)
        if not self._uninformed:
            self._all_told.set()

    async def wait_until_informed(self) -> None:
        """Wait briefly until each connected peer knows that this agent leaves."""
        if self._parting:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PART_S):
                    await self._all_told.wait()

    def close(self) -> None:
        """Drop all links and stop dialling."""
        self.detector.watching = False
        for task in list(self._tasks):
            task.cancel()
        for link in list(self.links.values()):
            link.abort()
        self.links.clear()
