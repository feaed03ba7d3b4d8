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

from gemini_hpc import clock
from gemini_hpc.agent.drains import Drains
from gemini_hpc.agent.eventlog import Log
from gemini_hpc.agent.gathering import Gathering
from gemini_hpc.agent.incarnation import Incarnation
from gemini_hpc.agent.membership import Membership
from gemini_hpc.agent.mesh import Mesh
from gemini_hpc.agent.nodesaver import NodeSaver, Wanted
from gemini_hpc.agent.rejections import Rejections
from gemini_hpc.agent.store import Store
from gemini_hpc.agent.tasks import Spawn
from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.agent.trainingset import TrainingSet
from gemini_hpc.core import scavenge
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile

_REACH_S = 2.0
_MUSTER_S = 10.0  # within which all others answer, or count as missing
_ASKED_S = 10.0  # within which a leader takes the lead
_AGAIN_S = 1.0
_LOST_S = 10.0  # without an answer from a host that is to write, and without a way to it
_WRITE_S = 3600.0  # within which everybody has written
_GAP_S, _LONGEST_GAP_S = 60.0, 900.0  # from one try to the next, then twice as long
_TRIES = 3
_MAX_SETS = 64
_SHOWN = 8
_SAID = 400


class Scavenge:
    """One agent's part in it; it lives as long as the agent, and is of one incarnation at a time."""

    def __init__(
        self,
        node: str,
        membership: Membership,
        trainings: Iterable[TrainingSet],
        store: Store,
        rejections: Rejections,
        drains: Drains,
        saver: NodeSaver,
        log: Log,
        spawn: Spawn,
    ) -> None:
        self._node, self._membership, self._trainings, self._store = node, membership, trainings, store
        self._rejections, self._drains, self._saver = rejections, drains, saver
        self._log, self._spawn = log, spawn
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
        if not (self._membership.detached and self._drains.last and self._able()) or self.busy:
            return False
        if self._asked_last if last else clock.monotonic() < self._again_at:
            return False
        return self._incomplete()

    @property
    def serves(self) -> bool:
        """Whether what is left in memory is saved in this way, or has been: the root alone cannot."""
        return self._membership.detached and self._able() and (self.saved or self.busy or self._incomplete())

    def _able(self) -> bool:
        return bool(self._drains.tier) and self._membership.incarnation is not None

    def _incomplete(self) -> bool:
        """All stay until they hear that the last versions are saved."""
        incarnation = self._membership.incarnation
        return incarnation is not None and incarnation.incomplete()

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
        self._task = self._spawn(self._run())

    def reset(self) -> None:
        """Another incarnation, or another round: what is here is needed for something else."""
        if self._task is not None:
            self._task.cancel()
        if self._task is not None or self._membership.detached:  # it may read slots that are written from now on
            self._saver.cancel()
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
        incarnation = self._membership.incarnation
        if incarnation is None:
            return
        mesh = incarnation.mesh
        for _ in range(_TRIES):
            for host in incarnation.hosts:
                if self._leader or host == self._node:
                    break
                if host not in mesh.dead and await mesh.reach(host, _REACH_S):
                    incarnation.send(host, self._own(calls=True))
                    await self._until(lambda: bool(self._leader) or self._over.is_set(), _ASKED_S)
                if self._over.is_set():  # it was saved before
                    return
            if not self._leader:
                self._leader = self._node
                await self._lead(incarnation)
                return
            if await self._follow(mesh):
                return
            self._leader = ""  # it cannot be reached any more

    async def _follow(self, mesh: Mesh) -> bool:
        """Until the leader says that it is over; False where it cannot be heard any more."""
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
        for training in self._trainings:
            shards = [shard for shard in self._store if shard.set == training.name]
            last, world = training.sealed, training.world
            for shard in shards:
                stamps = shard.pair.complete_stamps()
                world = shard.world if last in stamps else world
                held += [
                    peer.Held(training.name, shard.rank, shard.home, (s.epoch, s.version)) for s in sorted(stamps)
                ]
            if last is not None and world and not self._rejections.covers(training.name, last):
                sealed.append(peer.Sealed(training.name, (last.epoch, last.version), world))
        return peer.ScavengeHave(tuple(sealed), tuple(held), calls)

    # ---- the leader ------------------------------------------------------------------------------------

    async def _lead(self, incarnation: Incarnation) -> None:
        others = [host for host in incarnation.hosts if host != self._node]
        try:
            self._have = {}
            self._unable.clear()
            self._send(
                incarnation, others, peer.ScavengeAsk()
            )  # nobody leaves, or leads, while what is under way gets on
            await self._drains.settle(_MUSTER_S)
            self._have[self._node] = self._own()
            await self._muster(incarnation, others)
            newest = self._newest()
            saved = [await self._save(incarnation, sealed) for sealed in newest]
            self.saved = all(saved) if newest else self._unwanted()
            if self.saved:
                self._drains.found()
        finally:
            if self._leader == self._node:
                self._send(incarnation, others, peer.ScavengeOver(self.saved, self.reason[:_SAID]))

    def _unwanted(self) -> bool:
        """Whether all that was sealed has been rejected."""
        sealed = [(training.name, training.sealed) for training in self._trainings if training.sealed is not None]
        return bool(sealed) and all(self._rejections.covers(name, stamp) for name, stamp in sealed)

    async def _muster(self, incarnation: Incarnation, others: list[str]) -> None:
        """Hear of all others what they have."""
        mesh = incarnation.mesh

        def silent() -> list[str]:
            return [host for host in others if host not in self._have and host not in mesh.dead]

        deadline = clock.monotonic() + _MUSTER_S
        while clock.monotonic() < deadline and (wanted := silent()):
            await asyncio.gather(*(self._ask(incarnation, host) for host in wanted))
            await self._until(lambda: not silent(), _AGAIN_S)

    async def _ask(self, incarnation: Incarnation, host: str) -> None:
        if await incarnation.mesh.reach(host, _REACH_S):
            incarnation.send(host, peer.ScavengeAsk())

    def _newest(self) -> list[peer.Sealed]:
        """Of each set what was sealed last, in the words of one who has it."""
        newest: dict[str, tuple[peer.Sealed, bool]] = {}
        for have in self._have.values():
            held = {(copy.set, copy.stamp) for copy in have.held}
            for sealed in have.sealed:
                if self._rejections.covers(sealed.set, Stamp(*sealed.stamp)):
                    continue
                known, has = newest.get(sealed.set), (sealed.set, sealed.stamp) in held
                if known is None or (sealed.stamp, has) > (known[0].stamp, known[1]):
                    newest[sealed.set] = sealed, has
        return [sealed for sealed, _ in newest.values()][:_MAX_SETS]

    async def _save(self, incarnation: Incarnation, sealed: peer.Sealed) -> bool:
        """One set, unless the tier has it; whether it is there."""
        drains, name, stamp = self._drains, sealed.set, Stamp(*sealed.stamp)
        try:
            stored = await drains.stored((), _MUSTER_S)
        except TierFailed as error:  # which has been said
            self.reason = str(error)
            return False
        if any(m.set == name and Stamp(*m.stamp) >= stamp for m in stored):
            return True
        first = reason = ""
        for _ in range(_TRIES):
            gone = [host for host in incarnation.hosts if host not in self._have]
            self._log("scavenging", version=stamp.version, detail=f"{_listed(gone)} missing: saving it to the tier")
            before = len(self._have), len(self._unable.get(name, ()))
            gathering = self.gathering[name] = Gathering(stamp, sealed.world)
            reason = await self._gather(incarnation, name, gathering, gone)
            reason = reason or await drains.publish(name, gathering)
            gathering.end(reason)
            first = first or reason  # who could not write is left out the next time: that is not the reason
            if not reason or (len(self._have), len(self._unable.get(name, ()))) == before:
                break  # it is there, or would fail again
        self.gathering.pop(name, None)
        if reason:
            self.reason = first
            drains.say(name, stamp.version, first)
            await drains.clean(name, Stamp(stamp.epoch, stamp.version + 1))
        return not reason

    async def _gather(self, incarnation: Incarnation, name: str, gathering: Gathering, gone: list[str]) -> str:
        """Have everybody write; why a shard is still missing, or ""."""
        mesh = incarnation.mesh
        stamp = _pair(gathering.stamp)
        unable = self._unable.setdefault(name, set())
        held: dict[str, dict[int, set[int]]] = {host: {} for host in self._have if host not in unable}
        for host, have in self._have.items():
            if host in unable:
                continue
            for copy in have.held:
                if (copy.set, copy.stamp) == (name, stamp):
                    held[host].setdefault(copy.home, set()).add(copy.rank)
        writers, missing = scavenge.writers(held, self._membership.noderanks, gathering.world)
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
            if self._node in waiting:
                self._write(orders[self._node], self._node)
            others = [host for host in waiting if host != self._node]
            reached = await asyncio.gather(*(mesh.reach(host, _REACH_S) for host in others))
            for host, there in zip(others, reached, strict=True):
                if there:
                    silent_since.pop(host, None)
                    incarnation.send(host, orders[host])
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

    @staticmethod
    def _send(incarnation: Incarnation, hosts: Iterable[str], message: Message) -> None:
        for host in hosts:
            incarnation.send(host, message)

    # ---- everybody -------------------------------------------------------------------------------------

    def _write(self, order: peer.ScavengeWrite, leader: str) -> None:
        """This node's part; the leader is told of it, as often as it asks."""

        def told(files: tuple[NodeFile, ...], reason: str) -> None:
            done = peer.ScavengeWrote(order.set, order.stamp, files, reason, order.attempt)
            if leader == self._node:
                self._heard(leader, done)
            else:
                self._membership.send(leader, done)

        what = Wanted(order.set, Stamp(*order.stamp), order.attempt, frozenset(order.homes))
        if not self._saver.wanted(what, self._drains.tier, told):
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
                self._membership.send(host, self._own())
        elif isinstance(message, peer.ScavengeWrite):
            if self._takes(host):
                self._write(message, host)
        elif isinstance(message, peer.ScavengeWrote):
            self._heard(host, message)
        elif isinstance(message, peer.ScavengeOver) and (message.saved or self._leader == host):
            if message.saved:
                self.saved = True
                self._drains.found()
            self.reason = message.reason
            self._over.set()
            self._tell()

    def _called(self, host: str, message: peer.ScavengeHave) -> None:
        """An answer, or a call to lead."""
        if self._leader == self._node and self.busy:
            self._have[host] = message
            self._tell()
        elif self.saved:
            self._membership.send(host, peer.ScavengeOver(True))
        elif message.calls and not self.busy and self._membership.detached:
            self.begin()

    def _takes(self, host: str) -> bool:
        """Whether that host leads, for all this agent knows: of two the one that stands first in the list. Whoever
        asks it has a reason to: a node is missing."""
        incarnation = self._membership.incarnation
        if incarnation is None:
            return False
        position = incarnation.mesh.position
        if self.busy and self._leader and position[self._leader] < position[host]:
            return False
        leads = self.busy and self._leader == self._node
        if not self.saved:
            self._over.clear()
        self._leader = host
        if leads and self._task is not None:  # no more
            self._task.cancel()
            self.gathering.clear()
        if self._membership.detached and (leads or not self.busy) and not self._over.is_set():
            self._start()
        self._tell()
        return True


def _pair(stamp: Stamp) -> tuple[int, int]:
    return stamp.epoch, stamp.version


def _listed(hosts: list[str]) -> str:
    shown = ", ".join(hosts[:_SHOWN]) + ("" if len(hosts) <= _SHOWN else f" and {len(hosts) - _SHOWN} more")
    return f"{shown} {'is' if len(hosts) == 1 else 'are'}" if hosts else "nobody is"
