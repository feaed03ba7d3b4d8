"""The pulls of one node in one round: its own copies as planned, and guests that a rank has requested."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Protocol

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.replicas.digest_pool import Urgency
from gemini_hpc.agent.replicas.memory import Memfd, NoMemory
from gemini_hpc.agent.replicas.parity import Parity
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.tier import worker_process
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.agent.transfer import making, pull
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.tier import orders
from gemini_hpc.tier.errors import TierFailed, TierUnanswered
from gemini_hpc.wire import peer
from gemini_hpc.wire.handshake import HandshakeClient

_REGIONS = 4  # regions of one shard or parity that are made at once


class Former(Protocol):
    """The job's predecessor."""

    async def request_handover(self, job: int, copy: Copy, stamp: Stamp) -> Memfd | None:
        """Return the memory of a copy that the predecessor's agent on this node has, unverified.

        Return None if the agent does not give the memory away.
        """

    def build_client(self, host: str, purpose: str, job: int) -> HandshakeClient:
        """Return the client side of a handshake with the predecessor's agent on a host."""


class PullScheduler:
    """A scheduler that fetches copies from peers, a few at once, and tries the next source after a failure."""

    def __init__(
        self,
        context: AgentContext,
        store: Store,
        trainings: Trainings,
        tier: TierChoice,
        predecessor: Former,
    ) -> None:
        """Create the scheduler.

        Args:
            context: The agent's context.
            store: Shards of this node.
            trainings: Trainings of this agent.
            tier: Choice of the job's tier.
            predecessor: Former job whose agents serve the copies that this job takes over.
        """
        self._identity, self._membership = context.identity, context.membership
        self._log, self._spawn = context.log, context.spawn
        self._store, self._trainings, self._tier, self._predecessor = store, trainings, tier, predecessor
        self._running: dict[tuple[str, int], asyncio.Task[Memfd]] = {}
        self._gate = asyncio.Semaphore(pull.AT_ONCE)
        self._stops: dict[tuple[str, int], Event] = {}
        self._stamps: dict[tuple[str, int], Stamp] = {}
        self._rounds_begun = 0
        self.bytes = 0
        self.unreadable: set[tuple[str, Stamp]] = set()  # versions on the tier with an unreadable shard

    async def cease(self) -> None:
        """Stop all pulls and return when none writes any more."""
        self._rounds_begun += 1
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()
        self._stops.clear()

    def stop_overtaken(self, training_name: str, sealed: Stamp) -> None:
        """Stop the pulls of this training that are older than a newly sealed version. They are useless now."""
        for (name, rank), stop in self._stops.items():
            task = self._running.get((name, rank))
            if name == training_name and task is not None and self._stamps.get((name, rank), sealed) < sealed:
                stop.set()

    def start(self, orders: list[peer.PullOrder]) -> None:
        """Begin the pulls that the plan orders from this node."""
        if orders:
            self._spawn(self._pull_all(orders, clock.time()))

    async def _pull_all(self, orders: list[peer.PullOrder], since: float) -> None:
        begun = self._rounds_begun
        results = await asyncio.gather(
            *(self._join_pull(o.copy, o.sources, parts=o.parts, keep=True) for o in orders), return_exceptions=True
        )
        if begun != self._rounds_begun:
            return
        good = [o for o, r in zip(orders, results, strict=True) if isinstance(r, Memfd)]
        took, size = clock.time() - since, sum(o.copy.used for o in good)
        version = max((o.copy.stamp[1] for o in orders), default=0)
        for order, result in zip(orders, results, strict=True):
            if isinstance(result, BaseException):
                self._log("unserved", version=version, detail=f"shard {order.copy.rank}: {result}")
        self._log("pulled", version=version, detail=f"{len(good)} shards, {size} bytes in {took:.3f} s")

    async def obtain(self, training: Training, copy: Copy) -> Memfd:
        """Return memory with this verified copy: held here, being pulled, or pulled now as a guest.

        Raises:
            PullFailed: No source can serve the copy.
        """
        key = (copy.training, copy.rank)
        if key in self._running:
            return await asyncio.shield(self._running[key])
        found = self._store.find_version(copy.training, copy.rank, copy.stamp)
        if found is not None and found[0].pair.slots[found[1]].state == "complete":
            return found[0].memory[found[1]]
        if copy.rank in training.load_copies:
            return training.load_copies[copy.rank]
        return await self._join_pull(copy, training.sources.get(copy.rank, ()), keep=False)

    async def _join_pull(
        self, copy: Copy, sources: tuple[str, ...], *, parts: tuple[tuple[str, Copy], ...] = (), keep: bool
    ) -> Memfd:
        key = _build_key(copy)
        task = self._running.get(key)
        if task is None:
            task = asyncio.ensure_future(self._pull_copy(copy, sources, parts, keep=keep))
            self._running[key] = task
            task.add_done_callback(lambda t: self._forget_pull(key, t))
        return await asyncio.shield(task)

    def _forget_pull(self, key: tuple[str, int], task: asyncio.Task[Memfd]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()

    async def _pull_copy(
        self, copy: Copy, sources: tuple[str, ...], parts: tuple[tuple[str, Copy], ...], *, keep: bool
    ) -> Memfd:
        if not keep:
            return await self._pull_guest(copy, sources)
        number = self._membership.round
        parity = Parity({member.rank: member.home for member in copy.members}, copy.blocks) if copy.members else None
        stop = self._stops[_build_key(copy)] = Event()
        stamp = self._stamps[_build_key(copy)] = copy.stamp
        try:
            shard = await self._store.make_shard(
                copy.training, copy.rank, copy.world, copy.home, copy.bytes, parity=parity
            )
            if stop.is_set():
                raise pull.PullFailed("cancelled by a new recovery round")
            shard.resumed_round = number
            held = shard.pair.find_slot(stamp)
            if held is not None and shard.pair.slots[held].digest == copy.digest:  # held since an earlier round
                return shard.memory[held]
            # Begin before waiting for the gate: a trainer that begins a newer version first would exclude this one.
            index = shard.begin_copy(stamp)
        except (NoMemory, Refused) as exc:
            moved = await self._move_copy(copy, sources, number) if isinstance(exc, NoMemory) else None
            if moved is None:
                raise pull.PullFailed(str(exc)) from None
            return moved
        memory = shard.memory[index]
        try:
            if parts:
                copy = msgspec.structs.replace(copy, digest=await self._make(copy, memory, parts, stop))
            else:
                await self._fetch(copy, memory, sources, stop)
        except BaseException:
            if shard.pair.slots[index].state == "filling" and shard.pair.slots[index].stamp == stamp:
                shard.pair.empty_slot(index)
            raise
        self._complete_slot(copy, shard, index)
        return memory

    async def _make(self, copy: Copy, memory: Memfd, parts: tuple[tuple[str, Copy], ...], stop: Event) -> str:
        async with self._gate:
            found: list[tuple[pull.Source | Memfd, Copy]] = []
            for host, part in parts:
                if host != self._identity.node:
                    if (source := self._find_source(host, part.stamp)) is None:
                        raise pull.PullFailed(f"{host} is dead")
                    found.append((source, part))
                    continue
                held = self._store.find_version(part.training, part.rank, part.stamp, parity=bool(part.members))
                if held is None or held[0].pair.slots[held[1]].digest != part.digest:
                    raise pull.PullFailed(f"shard {part.rank} is not held here")
                found.append((held[0].memory[held[1]], part))
            made = making.Making(copy, memory, found)
            await asyncio.to_thread(made.clear)
            for first in range(0, len(made.regions), _REGIONS):
                some = made.regions[first : first + _REGIONS]
                # Wait for all even if one fails, because they write to the memory.
                came = await asyncio.gather(
                    *(asyncio.to_thread(made.fold, region, stop) for region in some), return_exceptions=True
                )
                if failed := [error for error in came if isinstance(error, BaseException)]:
                    raise failed[0]
                self.bytes += sum(size for size in came if isinstance(size, int))
            return made.check_digest(await self._store.pool.digest(memory, copy.used, urgency=Urgency.ARRIVING))

    def _find_source(self, host: str, stamp: Stamp) -> pull.Source | None:
        """Return an agent of this job as a source, or None if it is dead."""
        incarnation, settings = self._membership.incarnation, self._identity.settings
        if incarnation is None or host in incarnation.mesh.dead:
            return None
        port = incarnation.mesh.ports.get(host) or _find_planned_port(incarnation, host)
        client = incarnation.mesh.build_client(host, "pull")
        return pull.Source(host, settings.format_address(host), port, client, stamp)

    def _complete_slot(self, copy: Copy, shard: Shard, index: int) -> None:
        if shard.parity is not None:
            shard.parity.members[index], shard.parity.rooms[index] = copy.members, copy.room
        shard.complete_slot(index, Committed(copy.stamp, copy.used, copy.digest))
        self._trainings.recount(copy.training)

    async def _move_copy(self, copy: Copy, sources: tuple[str, ...], number: int) -> Memfd | None:
        """Take over the predecessor's copy on this node, because there is no room for another copy beside it.

        Return None if the predecessor has no such copy here, or does not give it away.
        """
        takeover = self._takeover
        origin = takeover.find_origin(copy.training, copy.stamp) if takeover is not None else None
        if takeover is None or origin is None or peer.BEFORE + self._identity.node not in sources:
            return None
        memory = await self._predecessor.request_handover(takeover.job, copy, origin)
        if memory is None:
            return None
        try:
            shard = await self._store.adopt(copy.training, copy.rank, copy.world, copy.home, copy.bytes, memory)
        except NoMemory as exc:
            raise pull.PullFailed(str(exc)) from None
        shard.resumed_round = number
        index = shard.begin_copy(copy.stamp)
        if await self._store.pool.digest(memory, copy.used, urgency=Urgency.ARRIVING) != copy.digest:
            shard.pair.empty_slot(index)
            raise pull.PullFailed("the digest does not match: damaged copy")
        self._complete_slot(copy, shard, index)
        return memory

    async def _fetch(self, copy: Copy, memory: Memfd, sources: tuple[str, ...], stop: Event) -> None:
        identity = self._identity
        async with self._gate:
            incarnation = self._membership.incarnation
            if incarnation is None:
                raise pull.PullFailed("no peers")
            if peer.TIER in sources:
                await self._fetch_from_tier(copy, memory)
                self.bytes += copy.used
                return
            ways, takeover = list[pull.Source](), self._takeover
            for source in sources:
                host = source.removeprefix(peer.BEFORE)
                if host != source and takeover is not None:
                    client = self._predecessor.build_client(host, "pull", takeover.job)
                    port, stamp = takeover.ports.get(host, 0), takeover.stamps.get(copy.training, copy.stamp)
                    ways.append(pull.Source(host, identity.settings.format_address(host), port, client, stamp))
                elif host != identity.node and (way := self._find_source(host, copy.stamp)) is not None:
                    ways.append(way)
            connections = max(1, pull.AT_ONCE // max(1, len(self._running)))
            pulled = await run_beside(
                "gemini-pull", lambda: pull.fetch(copy, memory, ways, stop, connections), urgent=True
            )
        if pulled.failures:
            detail = f"shard {copy.rank} from {', '.join(pulled.hosts)}; {pulled.failures}"
            self._log("next_holder", version=copy.stamp[1], detail=detail)
        self.bytes += copy.used

    @property
    def _takeover(self) -> peer.Takeover | None:
        """Return the takeover in this round's plan, which lists what the job takes over from another job."""
        incarnation = self._membership.incarnation
        plan = incarnation.rounds.plan if incarnation is not None else None
        return plan.takeover if plan is not None else None

    async def _fetch_from_tier(self, copy: Copy, memory: Memfd) -> None:
        takeover, job, stamp = self._takeover, self._identity.job, copy.stamp
        key: str | None = self._membership.key
        origin = takeover.find_origin(copy.training, stamp) if takeover is not None else None
        if takeover is not None and origin is not None:
            job, key, stamp = takeover.job, None, origin
        order = orders.Read(
            self._tier.directory,
            job,
            copy.training,
            stamp,
            copy.rank,
            memory.fd,
            copy.used,
            copy.digest,
            key=key,
            cluster=self._membership.cluster,
        )
        try:
            await worker_process.carry_out(order, [memory.fd])
        except TierFailed as error:
            if not isinstance(error, TierUnanswered):
                self.unreadable.add((copy.training, copy.stamp))
            raise pull.PullFailed(str(error)) from None

    async def _pull_guest(self, copy: Copy, sources: tuple[str, ...]) -> Memfd:
        budget = self._store.budget
        stop = self._stops[copy.training, copy.rank] = Event()
        try:
            with budget.hold(copy.used, f"copy of shard {copy.rank} for loading") as made:
                made.append(memory := Memfd(f"gemini:guest:{copy.rank}", copy.used))
                await asyncio.to_thread(memory.reserve, budget.measure_left_bytes)
                await self._fetch(copy, memory, sources, stop)
                if stop.is_set():
                    raise pull.PullFailed("cancelled by a new recovery round")
        except NoMemory as exc:
            raise pull.PullFailed(str(exc)) from None
        self._trainings.get_or_create(copy.training).load_copies[copy.rank] = memory
        return memory


def _build_key(copy: Copy) -> tuple[str, int]:
    """Return the key of a pull. Parity gets a negative rank, because it is no rank's shard."""
    return copy.training, -1 - copy.rank if copy.members else copy.rank


def _find_planned_port(incarnation: Incarnation, host: str) -> int:
    """Return the port that the plan names for a host."""
    plan = incarnation.rounds.plan
    return plan.ports.get(host, 0) if plan is not None else 0
