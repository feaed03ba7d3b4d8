"""The pulls of one node in one round: its own copies as planned, and guests that a rank asked for."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.agent import pull, tierwork
from gemini_hpc.agent.memory import Memfd, NoMemory
from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.agent.trainingset import TrainingSet
from gemini_hpc.core.record import Committed
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.tier import orders
from gemini_hpc.wire import peer

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

_AT_ONCE = 4


class Pulls:
    """Fetches copies from peers, a few at once, next source on failure."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._running: dict[tuple[str, int], asyncio.Task[Memfd]] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._stops: dict[tuple[str, int], Event] = {}
        self._stamps: dict[tuple[str, int], Stamp] = {}
        self._rounds_begun = 0
        self.bytes = 0

    async def cease(self) -> None:
        """Give up all pulls and return when none writes any more."""
        self._rounds_begun += 1
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()
        self._stops.clear()

    def overtaken(self, set_name: str, sealed: Stamp) -> None:
        """Something newer has been sealed: what is still being pulled of this set is of no use any more."""
        for (name, rank), stop in self._stops.items():
            task = self._running.get((name, rank))
            if name == set_name and task is not None and self._stamps.get((name, rank), sealed) < sealed:
                stop.set()

    def start(self, orders: list[peer.PullOrder]) -> None:
        """Begin what the plan gives this node to do."""
        if orders:
            self._agent.spawn(self._all(orders, clock.time()))

    async def _all(self, orders: list[peer.PullOrder], since: float) -> None:
        begun = self._rounds_begun
        results = await asyncio.gather(
            *(self._shared(o.copy, o.sources, keep=True) for o in orders), return_exceptions=True
        )
        if begun != self._rounds_begun:
            return
        good = [o for o, r in zip(orders, results, strict=True) if isinstance(r, Memfd)]
        took, size = clock.time() - since, sum(o.copy.used for o in good)
        version = max((o.copy.stamp[1] for o in orders), default=0)
        for order, result in zip(orders, results, strict=True):
            if isinstance(result, BaseException):
                self._agent.log("unserved", version=version, detail=f"shard {order.copy.rank}: {result}")
        self._agent.log("pulled", version=version, detail=f"{len(good)} shards, {size} bytes in {took:.3f} s")

    async def obtain(self, training: TrainingSet, copy: peer.CopyRecord) -> Memfd:
        """Memory with this verified copy: held here, being pulled, or pulled now as a guest. Raises `PullFailed`."""
        key = (copy.set, copy.rank)
        if key in self._running:
            return await asyncio.shield(self._running[key])
        found = self._agent.store.find(copy.set, copy.rank, Stamp(*copy.stamp))
        if found is not None and found[0].pair.slots[found[1]].state == "complete":
            return found[0].memory[found[1]]
        if copy.rank in training.guests:
            return training.guests[copy.rank]
        return await self._shared(copy, training.sources.get(copy.rank, ()), keep=False)

    async def _shared(self, copy: peer.CopyRecord, sources: tuple[str, ...], *, keep: bool) -> Memfd:
        key = (copy.set, copy.rank)
        task = self._running.get(key)
        if task is None:
            task = asyncio.ensure_future(self._one(copy, sources, keep=keep))
            self._running[key] = task
            task.add_done_callback(lambda t: self._done(key, t))
        return await asyncio.shield(task)

    def _done(self, key: tuple[str, int], task: asyncio.Task[Memfd]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()

    async def _one(self, copy: peer.CopyRecord, sources: tuple[str, ...], *, keep: bool) -> Memfd:
        if not keep:
            return await self._guest(copy, sources)
        agent, number = self._agent, self._round()
        stop = self._stops[copy.set, copy.rank] = Event()
        stamp = self._stamps[copy.set, copy.rank] = Stamp(*copy.stamp)
        try:
            shard = await agent.store.make(copy.set, copy.rank, copy.world, copy.home, copy.bytes)
            if stop.is_set():
                raise pull.PullFailed("given up for a new round")
            shard.resumed_round = number
            # At once, not when the gate opens: a trainer that begins a newer version first would shut this one out.
            index = shard.pair.begin(stamp, None, frozenset(), voted=frozenset())
            shard.pair.slots[index].busy = True
            shard.memory[index].commit(None)
        except (NoMemory, Refused) as exc:
            raise pull.PullFailed(str(exc)) from None
        memory = shard.memory[index]
        try:
            await self._fetch(copy, memory, sources, stop)
        except BaseException:
            if shard.pair.slots[index].state == "filling" and shard.pair.slots[index].stamp == stamp:
                shard.pair.void(index)
            raise
        shard.pair.complete(index, stamp, copy.digest, copy.used)
        shard.since[index] = shard.verified[index] = clock.time()
        memory.commit(Committed(stamp, copy.used, copy.digest))
        agent.sets.recount(copy.set)
        return memory

    async def _fetch(self, copy: peer.CopyRecord, memory: Memfd, sources: tuple[str, ...], stop: Event) -> None:
        agent = self._agent
        async with self._gate:
            mesh = agent.mesh
            if mesh is None:
                raise pull.PullFailed("no peers")
            if peer.TIER in sources:
                await self._from_tier(copy, memory)
                self.bytes += copy.used
                return
            ways = []
            for host in sources:
                if host != agent.node and host not in mesh.dead:
                    port = mesh.ports.get(host) or pull_port(agent, host)
                    ways.append((host, agent.address_of(host), port, mesh.client(host, "pull")))
            source, trouble = await asyncio.to_thread(pull.fetch, copy, memory, ways, stop)
        if trouble:
            agent.log("next_holder", version=copy.stamp[1], detail=f"shard {copy.rank} from {source}; {trouble}")
        self.bytes += copy.used

    async def _from_tier(self, copy: peer.CopyRecord, memory: Memfd) -> None:
        drains = self._agent.drains
        order = orders.Read(
            drains.tier, self._agent.job, copy.set, copy.stamp, copy.rank, memory.fd, copy.used, copy.digest
        )
        try:
            await tierwork.carry_out(order, [memory.fd])
        except TierFailed as error:
            drains.unreadable.add((copy.set, copy.stamp))
            raise pull.PullFailed(str(error)) from None

    def _round(self) -> int:
        return self._agent.rounds.round if self._agent.rounds is not None else 0

    async def _guest(self, copy: peer.CopyRecord, sources: tuple[str, ...]) -> Memfd:
        agent = self._agent
        stop = self._stops[copy.set, copy.rank] = Event()
        try:
            agent.budget.take(copy.used, f"copy of shard {copy.rank} for loading")
        except NoMemory as exc:
            raise pull.PullFailed(str(exc)) from None
        memory = Memfd(f"gemini:guest:{copy.rank}", copy.used)
        try:
            await asyncio.to_thread(memory.reserve, agent.budget.left_bytes)
            await self._fetch(copy, memory, sources, stop)
            if stop.is_set():
                raise pull.PullFailed("given up for a new round")
        except BaseException as exc:
            memory.close()
            agent.budget.give(copy.used)
            if isinstance(exc, NoMemory):
                raise pull.PullFailed(str(exc)) from None
            raise
        agent.sets.named(copy.set).guests[copy.rank] = memory
        return memory


def pull_port(agent: Agent, host: str) -> int:
    """The port that the plan names for a host."""
    plan = agent.rounds.plan if agent.rounds is not None else None
    return plan.ports.get(host, 0) if plan is not None else 0
