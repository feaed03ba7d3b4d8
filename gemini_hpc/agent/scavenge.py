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
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc import clock
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
_WRITE_S = 3600.0  # within which everybody has written
_SILENT_S = 3.0
_GAP_S, _LONGEST_GAP_S = 60.0, 900.0  # from one try to the next, then twice as long
_TRIES = 3
_MAX_SETS = 64
_SHOWN = 8
_SAID = 400


class Scavenge:
    """One agent's part in it; it lives as long as the agent, and is of one incarnation at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._task: asyncio.Task[None] | None = None
        self._again_at = 0.0
        self._gap_s = _GAP_S
        self._asked_last = False  # memory is to be freed, and one more try was made for that
        self._leader = ""
        self._over = asyncio.Event()
        self.saved = False  # all that was sealed is on the tier
        self.reason = ""  # why not, the last time
        self._have: dict[str, peer.ScavengeHave] = {}
        self._unable: dict[str, set[str]] = {}  # by set, hosts that could not write
        self.gathering: dict[str, Gathering] = {}
        self._answered: dict[str, str] = {}  # by host: why it has not written all, or ""
        self._changed = asyncio.Event()

    # ---- when ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether it is going on."""
        return self._task is not None and not self._task.done()

    def due(self, *, last: bool = False) -> bool:
        """Whether it would do what nobody else does, where a node is missing. last: memory is to be freed, for which
        one more try is made at once."""
        if not (self._agent.detached and self._agent.drains.last and self._able()) or self.busy:
            return False
        if self._asked_last if last else clock.monotonic() < self._again_at:
            return False
        return self.missing()

    @property
    def serves(self) -> bool:
        """Whether what is left in memory is saved in this way, or has been: the root alone cannot."""
        return self._agent.detached and self._able() and (self.saved or self.busy or self.missing())

    def _able(self) -> bool:
        return bool(self._agent.drains.tier) and self._agent.mesh is not None

    @property
    def silent_s(self) -> float:
        """After such a silence a node is missing."""
        mesh = self._agent.mesh
        return _SILENT_S if mesh is None else max(_SILENT_S, 3 * mesh.silence_s)

    def missing(self) -> bool:
        """Whether a node has died, or a neighbour in the tree is silent: all stay until they hear that the last
        versions are saved."""
        mesh, rounds = self._agent.mesh, self._agent.rounds
        if mesh is None or rounds is None:
            return False
        kin = [*rounds.children, *([rounds.parent] if rounds.parent is not None else [])]
        now, silent_s = clock.monotonic(), self.silent_s
        return bool(mesh.dead) or any(now - mesh.heard.get(host, 0.0) > silent_s for host in kin)

    def begin(self, *, last: bool = False, asked: bool = False) -> None:
        """Try it. last: memory is to be freed; asked: by hand, which puts off nothing that happens by itself."""
        self._asked_last = self._asked_last or last
        self._gap_s = _GAP_S if asked else self._gap_s
        if not self.busy:
            self._leader = ""
            self._start()

    def _start(self) -> None:
        self._again_at, self._gap_s = clock.monotonic() + self._gap_s, min(2 * self._gap_s, _LONGEST_GAP_S)
        self._over.clear()
        self.reason = ""
        self._task = self._agent.spawn(self._run())

    def reset(self) -> None:
        """Another incarnation, or another round: what is here is needed for something else."""
        if self._task is not None:
            self._task.cancel()
        if self._task is not None or self._agent.detached:  # it may read slots that are written from now on
            self._agent.drains.node.cancel()
        self._task, self._leader, self.saved = None, "", False
        self._again_at, self._gap_s, self._asked_last = 0.0, _GAP_S, False
        self._have.clear()
        self._unable.clear()
        for gathering in self.gathering.values():
            gathering.end("the job has come back")
        self.gathering.clear()
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
        for _ in range(_TRIES):
            for host in agent.hosts:
                if self._leader or host == agent.node:
                    break
                if host not in mesh.dead and await mesh.reach(host, _REACH_S):
                    agent.send(host, self._own(calls=True))
                    await self._until(lambda: bool(self._leader) or self._over.is_set(), _ASKED_S)
                if self._over.is_set():  # it was saved before
                    return
            if not self._leader:
                self._leader = agent.node
                await self._lead()
                return
            if await self._follow():
                return
            self._leader = ""  # it cannot be reached any more

    async def _follow(self) -> bool:
        """Until the leader says that it is over; False where it cannot be heard any more."""
        mesh = self._agent.mesh
        assert mesh is not None
        while not await self._until(self._over.is_set, _AGAIN_S):
            if clock.monotonic() - mesh.heard.get(self._leader, 0.0) > _LOST_S:
                return False
        return True

    async def _until(self, what: Callable[[], bool], within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not what():
                    await self._changed.wait()
        return what()

    def _own(self, *, calls: bool = False) -> peer.ScavengeHave:
        """What this agent knows to have been sealed, and what it holds; also for a training that has grown since."""
        sealed: list[peer.Sealed] = []
        held: list[peer.Held] = []
        for training in self._agent.sets:
            shards = [shard for shard in self._agent.store if shard.set == training.name]
            last, world = training.sealed, training.world
            for shard in shards:
                stamps = shard.pair.complete_stamps()
                world = shard.world if last in stamps else world
                held += [
                    peer.Held(training.name, shard.rank, shard.home, (s.epoch, s.version)) for s in sorted(stamps)
                ]
            if last is not None and world and not self._agent.rejections.covers(training.name, last):
                sealed.append(peer.Sealed(training.name, (last.epoch, last.version), world))
        return peer.ScavengeHave(tuple(sealed), tuple(held), calls)

    # ---- the leader ------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        agent = self._agent
        others = [host for host in agent.hosts if host != agent.node]
        try:
            self._have = {}
            self._unable.clear()
            self._send(others, peer.ScavengeAsk())  # nobody leaves, or leads, while what is under way gets on
            await agent.drains.settle(_MUSTER_S)
            self._have[agent.node] = self._own()
            await self._muster(others)
            newest = self._newest()
            self.saved = all([await self._save(sealed) for sealed in newest]) if newest else self._unwanted()
            if self.saved:
                agent.drains.last = False
        finally:
            if self._leader == agent.node:
                self._send(others, peer.ScavengeOver(self.saved, self.reason[:_SAID]))

    def _unwanted(self) -> bool:
        """Whether all that was sealed has been rejected."""
        agent = self._agent
        sealed = [(training.name, training.sealed) for training in agent.sets if training.sealed is not None]
        return bool(sealed) and all(agent.rejections.covers(name, stamp) for name, stamp in sealed)

    async def _muster(self, others: list[str]) -> None:
        """Hear of all others what they have."""
        mesh = self._agent.mesh
        assert mesh is not None

        def silent() -> list[str]:
            return [host for host in others if host not in self._have and host not in mesh.dead]

        deadline = clock.monotonic() + _MUSTER_S
        while clock.monotonic() < deadline and (wanted := silent()):
            await asyncio.gather(*(self._ask(host) for host in wanted))
            await self._until(lambda: not silent(), _AGAIN_S)

    async def _ask(self, host: str) -> None:
        mesh = self._agent.mesh
        if mesh is not None and await mesh.reach(host, _REACH_S):
            self._agent.send(host, peer.ScavengeAsk())

    def _newest(self) -> list[peer.Sealed]:
        """Of each set what was sealed last, in the words of one who has it."""
        newest: dict[str, tuple[peer.Sealed, bool]] = {}
        for have in self._have.values():
            held = {(copy.set, copy.stamp) for copy in have.held}
            for sealed in have.sealed:
                if self._agent.rejections.covers(sealed.set, Stamp(*sealed.stamp)):
                    continue
                known, has = newest.get(sealed.set), (sealed.set, sealed.stamp) in held
                if known is None or (sealed.stamp, has) > (known[0].stamp, known[1]):
                    newest[sealed.set] = sealed, has
        return [sealed for sealed, _ in newest.values()][:_MAX_SETS]

    async def _save(self, sealed: peer.Sealed) -> bool:
        """One set, unless the tier has it; whether it is there."""
        agent, name, stamp = self._agent, sealed.set, Stamp(*sealed.stamp)
        try:
            stored = await agent.drains.stored((), _MUSTER_S)
        except TierFailed as error:  # which has been said
            self.reason = str(error)
            return False
        if any(m.set == name and Stamp(*m.stamp) >= stamp for m in stored):
            return True
        first = reason = ""
        for _ in range(_TRIES):
            gone = [host for host in agent.hosts if host not in self._have]
            agent.log("scavenging", version=stamp.version, detail=f"{_listed(gone)} missing: saving it to the tier")
            before = len(self._have), len(self._unable.get(name, ()))
            gathering = self.gathering[name] = Gathering(stamp, sealed.world)
            reason = await self._gather(name, gathering, gone)
            reason = reason or await agent.drains.publish(name, gathering)
            gathering.end(reason)
            first = first or reason  # who could not write is left out the next time: that is not the reason
            if not reason or (len(self._have), len(self._unable.get(name, ()))) == before:
                break  # it is there, or would fail again
        self.gathering.pop(name, None)
        if reason:
            self.reason = first
            agent.drains.say(name, stamp.version, first)
            await agent.drains.clean(name, Stamp(stamp.epoch, stamp.version + 1))
        return not reason

    async def _gather(self, name: str, gathering: Gathering, gone: list[str]) -> str:
        """Have everybody write; why a shard is still missing, or ""."""
        agent, mesh = self._agent, self._agent.mesh
        assert mesh is not None
        stamp = _pair(gathering.stamp)
        unable = self._unable.setdefault(name, set())
        held: dict[str, dict[int, set[int]]] = {host: {} for host in self._have if host not in unable}
        for host, have in self._have.items():
            if host in unable:
                continue
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
        silent_since: dict[str, float] = {}
        began = clock.monotonic()
        while waiting := [host for host in orders if host not in self._answered]:
            now = clock.monotonic()
            if agent.node in waiting:
                self._write(orders[agent.node], agent.node)
            others = [host for host in waiting if host != agent.node]
            reached = await asyncio.gather(*(mesh.reach(host, _REACH_S) for host in others))
            for host, there in zip(others, reached, strict=True):
                if there:
                    silent_since.pop(host, None)
                    agent.send(host, orders[host])
                else:
                    silent_since.setdefault(host, now)
            late = now - began > _WRITE_S
            lost = waiting if late else [host for host, since in silent_since.items() if now - since > _LOST_S]
            if lost:
                for host in lost:
                    self._have.pop(host, None)
                return f"{_listed(lost)} {'too slow' if late else 'not reached any more'}"
            await self._until(lambda: self._answered.keys() >= orders.keys(), _AGAIN_S)
        unable |= {host for host, reason in self._answered.items() if reason}
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
        gathering = self.gathering.get(done.set)
        if gathering is None or (gathering.stamp, gathering.attempt) != (Stamp(*done.stamp), done.attempt):
            return
        gathering.take(done.files)
        self._answered[host] = done.reason
        self._tell()

    def on_message(self, host: str, message: Message) -> None:
        """From a peer of this incarnation."""
        if not self._able():
            return
        if isinstance(message, peer.ScavengeHave):
            self._called(host, message)
        elif isinstance(message, peer.ScavengeAsk):
            if self._takes(host):
                self._agent.send(host, self._own())
        elif isinstance(message, peer.ScavengeWrite):
            if self._takes(host):
                self._write(message, host)
        elif isinstance(message, peer.ScavengeWrote):
            self._heard(host, message)
        elif isinstance(message, peer.ScavengeOver) and (message.saved or self._leader == host):
            if message.saved:
                self.saved, self._agent.drains.last = True, False
            self.reason = message.reason
            self._over.set()
            self._tell()

    def _called(self, host: str, message: peer.ScavengeHave) -> None:
        """An answer, or a call to lead."""
        agent = self._agent
        if self._leader == agent.node and self.busy:
            self._have[host] = message
            self._tell()
        elif self.saved:
            agent.send(host, peer.ScavengeOver(True))
        elif message.calls and not self.busy and agent.detached:
            self.begin()

    def _takes(self, host: str) -> bool:
        """Whether that host leads, for all this agent knows: of two the one that stands first in the list. Whoever
        asks it has a reason to: a node is missing."""
        agent, mesh = self._agent, self._agent.mesh
        if mesh is None:
            return False
        if self.busy and self._leader and mesh.position[self._leader] < mesh.position[host]:
            return False
        leads = self.busy and self._leader == agent.node
        if not self.saved:
            self._over.clear()
        self._leader = host
        if leads and self._task is not None:  # no more
            self._task.cancel()
            self.gathering.clear()
        if agent.detached and (leads or not self.busy) and not self._over.is_set():
            self._start()
        self._tell()
        return True


def _pair(stamp: Stamp) -> tuple[int, int]:
    return stamp.epoch, stamp.version


def _listed(hosts: list[str]) -> str:
    shown = ", ".join(hosts[:_SHOWN]) + ("" if len(hosts) <= _SHOWN else f" and {len(hosts) - _SHOWN} more")
    return f"{shown} {'is' if len(hosts) == 1 else 'are'}" if hosts else "nobody is"
