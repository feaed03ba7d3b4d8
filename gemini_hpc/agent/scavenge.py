"""What is done for a job that has lost a node and does not come back: the nodes that are left save its newest sealed
version to the tier, before their memory is freed.

A save goes along the tree of the incarnation, and each node writes the shards that are at home with it. With a node
missing the tree is broken, and nobody would write that node's shards, though its placement group has copies. So here
the first host of the list that can be reached leads:

1. It asks all others what has been sealed last, and what they hold. The newest seal counts.
2. Where the tier has nothing as new, it names for each node rank one host that writes its shards as its file
   (`core.scavenge`).
3. When each rank's shard is there, the version becomes whole as ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc.agent.gathering import Gathering
from gemini_hpc.agent.nodesaver import Wanted
from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.core import scavenge
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

_REACH_S = 2.0
_MUSTER_S = 10.0  # within which all others answer, or count as missing
_ASKED_S = 10.0  # within which a leader takes the lead
_AGAIN_S = 1.0
_LOST_S = 10.0  # without an answer from a host that is to write, and without a way to it
_TRIES = 3
_MAX_SETS = 64
_SILENT_S = 3.0
_SHOWN = 8
_SAID = 400


class Scavenge:
    """One agent's part in it; it lives as long as the agent, and is of one incarnation at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._task: asyncio.Task[None] | None = None
        self._held_since = 0.0
        self._leader = ""
        self._over = asyncio.Event()
        self._have: dict[str, peer.ScavengeHave] = {}
        self._gathering: dict[str, Gathering] = {}
        self._answered: dict[str, str] = {}  # by host: why it has not written all, or ""
        self._changed = asyncio.Event()

    # ---- when ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether it is going on."""
        return self._task is not None and not self._task.done()

    @property
    def begun(self) -> bool:
        """Whether it has been, or is, in this incarnation."""
        return self._task is not None

    def holds(self) -> bool:
        """Whether memory that is to be freed must stay for it a while."""
        return self.busy and time.monotonic() - self._held_since < self._agent.settings.tier_flush_s

    def due(self) -> bool:
        """Whether it would do what nobody else does: once, where a node is missing."""
        agent = self._agent
        possible = agent.detached and bool(agent.settings.tier_flush_s) and self._able() and not self.begun
        return possible and self._missing() and any(training.sealed is not None for training in agent.sets)

    def _able(self) -> bool:
        return bool(self._agent.drains.tier) and self._agent.mesh is not None

    def _missing(self) -> bool:
        """Whether a node has died, or was not heard of when this one was left alone."""
        mesh, rounds = self._agent.mesh, self._agent.rounds
        if mesh is None or rounds is None:
            return False
        kin = [*rounds.children, *([rounds.parent] if rounds.parent is not None else [])]
        long_ago = time.monotonic() - max(_SILENT_S, 3 * mesh.silence_s)
        return bool(mesh.dead) or any(mesh.heard.get(host, 0.0) < long_ago for host in kin)

    def begin(self) -> None:
        """Once in an incarnation; again only the time is taken from which freed memory may wait for it."""
        self._held_since = time.monotonic()
        if not self.begun:
            self._over.clear()
            self._task = self._agent.spawn(self._run())

    def reset(self) -> None:
        """Another incarnation, or another round: what is here is needed for something else."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._leader = None, ""
        self._have.clear()
        for gathering in self._gathering.values():
            gathering.end("the job has come back")
        self._gathering.clear()
        self._answered.clear()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- who -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """The first host of the list that can be reached leads, or whoever does already."""
        agent, mesh = self._agent, self._agent.mesh
        assert mesh is not None
        for host in agent.hosts:
            if self._leader or host == agent.node:
                break
            if host not in mesh.dead and await mesh.reach(host, _REACH_S):
                agent.send(host, self._own())
                await self._until(lambda: bool(self._leader), _ASKED_S)
        if self._leader:
            await self._follow(self._leader)
        else:
            self._leader = agent.node
            await self._lead()

    async def _follow(self, leader: str) -> None:
        """Until it says that it is over, or cannot be heard any more."""
        mesh = self._agent.mesh
        assert mesh is not None
        while not self._over.is_set():
            await self._until(self._over.is_set, _AGAIN_S)
            if time.monotonic() - mesh.heard.get(leader, 0.0) > _LOST_S:
                return

    async def _until(self, what: Callable[[], bool], within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not what():
                    await self._changed.wait()
        return what()

    def _own(self) -> peer.ScavengeHave:
        """What this agent knows to have been sealed, and what it holds."""
        sealed: list[peer.Sealed] = []
        held: list[peer.Held] = []
        for training in self._agent.sets:
            if training.sealed is not None and training.world:
                sealed.append(peer.Sealed(training.name, _pair(training.sealed), training.world))
            for shard in self._agent.store.of_set(training.name):
                stamps = sorted(shard.pair.complete_stamps())
                held += [peer.Held(training.name, shard.rank, shard.home, _pair(stamp)) for stamp in stamps]
        return peer.ScavengeHave(tuple(sealed), tuple(held))

    # ---- the leader ------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        agent = self._agent
        agent.drains.give_up("a node is missing: the others save what is left")
        others = [host for host in agent.hosts if host != agent.node]
        try:
            self._have[agent.node] = self._own()
            await self._muster(others)
            for sealed in self._newest():
                await self._save(sealed)
        finally:
            self._send(others, peer.ScavengeOver())

    async def _muster(self, others: list[str]) -> None:
        """Hear of all others what they have."""
        mesh = self._agent.mesh
        assert mesh is not None

        def silent() -> list[str]:
            return [host for host in others if host not in self._have and host not in mesh.dead]

        deadline = time.monotonic() + _MUSTER_S
        while time.monotonic() < deadline and (wanted := silent()):
            await asyncio.gather(*(mesh.reach(host, _REACH_S) for host in wanted))
            self._send(wanted, peer.ScavengeAsk())
            await self._until(lambda: not silent(), _AGAIN_S)

    def _newest(self) -> list[peer.Sealed]:
        newest: dict[str, peer.Sealed] = {}
        for sealed in (s for have in self._have.values() for s in have.sealed):
            if sealed.set not in newest or sealed.stamp > newest[sealed.set].stamp:
                newest[sealed.set] = sealed
        return list(newest.values())[:_MAX_SETS]

    async def _save(self, sealed: peer.Sealed) -> None:
        """One set, unless the tier has it."""
        agent, stamp = self._agent, Stamp(*sealed.stamp)
        try:
            await agent.drains.stored((), _MUSTER_S)
        except TierFailed:  # which has been said
            return
        known = agent.drains.saved.get(sealed.set)
        if known is not None and known[0] >= stamp:
            return
        reason = ""
        for _ in range(_TRIES):
            gone = [host for host in agent.hosts if host not in self._have]
            agent.log("scavenging", version=stamp.version, detail=f"{_listed(gone)} missing: saving it to the tier")
            gathering = self._gathering[sealed.set] = Gathering(stamp, sealed.world)
            reason = await self._gather(sealed.set, gathering, gone)
            reason = reason or await agent.drains.publish(sealed.set, gathering)
            if not reason or [host for host in agent.hosts if host not in self._have] == gone:
                break
        self._gathering.pop(sealed.set, None)
        if reason:
            agent.drains.say(sealed.set, stamp.version, reason)

    async def _gather(self, name: str, gathering: Gathering, gone: list[str]) -> str:
        """Have everybody write; why a shard is still missing, or ""."""
        agent, mesh = self._agent, self._agent.mesh
        assert mesh is not None
        stamp = _pair(gathering.stamp)
        held: dict[str, dict[int, set[int]]] = {host: {} for host in self._have}
        for host, have in self._have.items():
            for copy in have.held:
                if (copy.set, copy.stamp) == (name, stamp):
                    held[host].setdefault(copy.home, set()).add(copy.rank)
        writers, missing = scavenge.writers(held, agent.noderanks, gathering.world)
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN]))
            more = "" if len(missing) <= _SHOWN else f" and {len(missing) - _SHOWN} more"
            return f"the shards of rank {shown}{more} are gone with {', '.join(gone[:_SHOWN])}"
        self._answered.clear()
        orders = {
            host: peer.ScavengeWrite(name, stamp, tuple(sorted(homes)), gathering.attempt)
            for host, homes in writers.items()
        }
        if agent.node in orders:
            self._write(orders[agent.node], agent.node)
        silent_since: dict[str, float] = {}
        while waiting := [host for host in orders if host not in self._answered]:
            now = time.monotonic()
            for host in waiting:
                if host == agent.node or await mesh.reach(host, _REACH_S):
                    silent_since.pop(host, None)
                    self._send([host], orders[host])
                else:
                    silent_since.setdefault(host, now)
            if lost := [host for host, since in silent_since.items() if now - since > _LOST_S]:
                for host in lost:
                    del self._have[host]
                return f"{_listed(lost)} not reached any more"
            await self._until(lambda: self._answered.keys() >= orders.keys(), _AGAIN_S)
        return "; ".join(f"{host}: {reason}" for host, reason in self._answered.items() if reason)[:_SAID]

    def _send(self, hosts: Iterable[str], message: Message) -> None:
        for host in hosts:
            if host != self._agent.node:
                self._agent.send(host, message)

    # ---- everybody -------------------------------------------------------------------------------------

    def _write(self, order: peer.ScavengeWrite, leader: str) -> None:
        """This node's part; the leader is told of it, as often as it asks."""

        def told(files: tuple[NodeFile, ...], reason: str) -> None:
            done = peer.ScavengeWrote(order.set, order.stamp, files, reason, order.attempt)
            if leader == self._agent.node:
                self._heard(leader, done)
            else:
                self._agent.send(leader, done)

        what = Wanted(order.set, Stamp(*order.stamp), order.attempt, frozenset(order.homes))
        if not self._agent.drains.node.wanted(what, self._agent.drains.tier, told):
            told((), f"version {order.stamp[1]} is no longer there")

    def _heard(self, host: str, done: peer.ScavengeWrote) -> None:
        gathering = self._gathering.get(done.set)
        if gathering is None or (gathering.stamp, gathering.attempt) != (Stamp(*done.stamp), done.attempt):
            return
        gathering.take(done.files)
        self._answered[host] = done.reason
        self._tell()

    def on_message(self, host: str, message: Message) -> None:
        """From a peer of this incarnation."""
        agent = self._agent
        if not self._able():
            return
        if isinstance(message, peer.ScavengeHave):
            self._called(host, message)
        elif isinstance(message, peer.ScavengeAsk):
            if self._takes(host):
                agent.send(host, self._own())
        elif isinstance(message, peer.ScavengeWrite):
            if self._leader == host and not self._over.is_set():
                self._write(message, host)
        elif isinstance(message, peer.ScavengeWrote):
            self._heard(host, message)
        elif isinstance(message, peer.ScavengeOver) and self._leader == host:
            self._over.set()
            self._tell()

    def _called(self, host: str, message: peer.ScavengeHave) -> None:
        """An answer, or a call to lead."""
        agent = self._agent
        if self._leader == agent.node and self.busy:
            self._have[host] = message
            self._tell()
        elif self._leader == agent.node:  # it is over
            agent.send(host, peer.ScavengeAsk())
            agent.send(host, peer.ScavengeOver())
        elif not self.begun and agent.detached:
            self.begin()

    def _takes(self, host: str) -> bool:
        """Whether that host leads, for all this agent knows: of two the one that stands first in the list."""
        mesh = self._agent.mesh
        if mesh is None:
            return False
        if self.busy and self._leader and mesh.position[self._leader] < mesh.position[host]:
            return False
        self._leader = host
        self._over.clear()
        if not self.busy:
            self._held_since = time.monotonic()
            self._task = self._agent.spawn(self._follow(host))
        self._tell()
        return True


def _pair(stamp: Stamp) -> tuple[int, int]:
    return stamp.epoch, stamp.version


def _listed(hosts: list[str]) -> str:
    shown = ", ".join(hosts[:_SHOWN]) + ("" if len(hosts) <= _SHOWN else f" and {len(hosts) - _SHOWN} more")
    return f"{shown} {'is' if len(hosts) == 1 else 'are'}" if hosts else "nobody is"
