"""The agent's service for training ranks: one method for each request of `wire.local`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from gemini_hpc import clock
from gemini_hpc.agent.closed_trainings import ClosedTrainings
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas import galois, replica_fills
from gemini_hpc.agent.replicas.digest_pool import Urgency
from gemini_hpc.agent.replicas.memory import NoMemory, adopt
from gemini_hpc.agent.replicas.parity import Parity, cover_alike
from gemini_hpc.agent.replicas.pledges import Wish
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.rescue import Rescue
from gemini_hpc.agent.sessions import RequestRejected, Sessions
from gemini_hpc.agent.stats_store import StatsStore
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.agent.transfer.pull import PullFailed
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.agent.transfer.transfers import Transfers
from gemini_hpc.core import ranges
from gemini_hpc.core.digest import is_digest
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import local
from gemini_hpc.wire.local_server import LocalClient, Reply
from gemini_hpc.wire.rate_limit import RateLimit

_MAX_SHARDS = 4096  # limit on one node over all trainings; each shard takes two descriptors
_EVENTS_PER_S, _EVENTS_BURST = 2.0, 200.0
_Answer = local.Message | Reply | None  # None is `Ok`; a reply has descriptors
_Handle = Callable[[LocalClient, Any], _Answer | Awaitable[_Answer]]


class RankRequests:
    """The requests of training ranks, served for the agent that owns trainings and store."""

    def __init__(
        self,
        context: AgentContext,
        sessions: Sessions,
        replicas: Replicas,
        transfers: Transfers,
        tier: TierParts,
        closed: ClosedTrainings,
        rescue: Rescue,
        stats: StatsStore,
    ) -> None:
        self._node, self._membership = context.node, context.membership
        self._log, self._spawn = context.events, context.spawn
        self._store, self._trainings, self._filling = replicas.store, replicas.trainings, replicas.filling
        self._rejections, self._outlines = replicas.rejections, replicas.outlines
        self._outgoing, self._pulls = transfers.outgoing, transfers.pulls
        self._saver, self._keeps = tier.saver, tier.keeps
        self._sessions, self._closed, self._rescue, self._stats = sessions, closed, rescue, stats
        self._fills: dict[tuple[str, int, int], LocalClient] = {}
        self._keepers: dict[tuple[str, int], LocalClient] = {}
        self._events = RateLimit(_EVENTS_PER_S, _EVENTS_BURST)
        self._populating = asyncio.Lock()  # one core is enough for what nothing waits for
        self._handlers: dict[type, _Handle] = {
            local.Register: self._register,
            local.BeginVersion: self._on_begin,
            local.Fill: self._fill,
            local.Filled: self._on_filled,
            local.Landed: self._on_landed,
            local.Abort: self._abort,
            local.Fetch: self._fetch,
            local.OpenPush: self._open_push,
            local.Event: self._log_event,
        }
        # of requests that only the rank named in them may send
        self._own_handlers: dict[type[local.OfRank], _Handle] = {
            local.OpenRescue: lambda client, m: (local.Ok(), [rescue.open(client, m.training, m.rank)]),
            local.Finished: self._on_finished,
            local.Reject: self._reject,
            local.KeepVersion: self._keep,
            local.LiveOn: lambda _, m: self._outlines.record_live_nodes(m.training, m.rank, m.nodes),
            local.OutlineWritten: self._on_outline_written,
            local.Unfilled: lambda client, m: self._leave_out(client, m.version),
            local.Traffic: self._store_traffic,
            local.Timeline: lambda _, m: stats.store_timeline(m.training, m.rank, m.timeline),
            local.CacheBytes: lambda _, m: stats.store_data(m.training, m.rank, m.key, m.data),
            local.FetchCached: lambda _, m: local.CachedBytes(stats.recall(m.training, m.rank, m.key)),
        }

    # ---- bookkeeping -----------------------------------------------------------------------------------

    def on_disconnect(self, client: LocalClient) -> None:
        """Handle the end of a connection: void the slots that the process was filling."""
        self._empty_filling(client)
        self._keepers = {key: keeper for key, keeper in self._keepers.items() if keeper is not client}
        self._outgoing.stop_channels(client)
        self._rescue.on_disconnect(client)
        if writing := replica_fills.on_disconnect(client, list(self._store)):
            self._spawn(replica_fills.wait_for_end(client, writing))
        self._sessions.on_disconnect(client)

    def drop_all(self) -> None:
        """Drop all sessions: in a new round all processes must say hello again."""
        self._sessions.drop_all()
        self._fills.clear()

    def _require_shard(self, client: LocalClient, name: str, rank: int) -> tuple[Training, Shard]:
        training = self._sessions.require_training(client, name)
        shard = self._store.get(name, rank)
        if shard is None:
            raise RequestRejected(f"shard of rank {rank} is not registered here")
        return training, shard

    def _authorize(self, client: LocalClient, m: local.Register | local.HandBack) -> Training:
        """Return the training of a shard that this client may write.

        Each shard has one writer on a node. The shard must be one that this node keeps, of a training as large as its
        ranks have reported.

        Raises:
            Rejected: The client may not write this shard.
        """
        membership, shards = self._membership, self._store.shards
        training, n = self._sessions.require_training(client, m.training), membership.nodes
        own_noderank = membership.noderanks[self._node]
        if m.world != training.world or m.rank >= m.world or m.home >= n:
            raise RequestRejected(f"impossible shard: rank {m.rank} of {m.world}, home {m.home}")
        if own_noderank not in membership.redundancy.list_holders(m.home):
            raise RequestRejected(f"node rank {own_noderank} keeps no copies of node rank {m.home}")
        keeper = self._keepers.get((m.training, m.rank))
        if keeper is not None and keeper is not client and not keeper.closed.is_set():
            raise RequestRejected(f"process {keeper.pid} already writes the shard of rank {m.rank} here")
        if (m.training, m.rank) not in shards and len(shards) >= _MAX_SHARDS:
            raise RequestRejected(f"a node keeps at most {_MAX_SHARDS} shards")
        return training

    # ---- requests --------------------------------------------------------------------------------------

    async def handle(self, client: LocalClient, request: local.Request, fds: list[int]) -> Reply:
        """Answer one request of a training rank, and close the descriptors."""
        try:
            if isinstance(request, local.Hello):
                return await self._sessions.admit_rank(client, request, fds)
            if isinstance(request, local.HandBack):
                return await self._hand_back(client, request, fds)
            if isinstance(request, local.OfRank) and (handle := self._own_handlers.get(type(request))) is not None:
                self._sessions.check_rank(client, request)
            elif (handle := self._handlers.get(type(request))) is None:
                return local.Error("not a request of a training rank"), []
            found = handle(client, request)
            answer = await found if isinstance(found, Awaitable) else found
            return answer if isinstance(answer, tuple) else (answer or local.Ok(), [])
        except (RequestRejected, NoMemory) as exc:
            return local.Error(str(exc), isinstance(exc, RequestRejected) and exc.later), []
        finally:
            for fd in fds:
                os.close(fd)

    def _on_finished(self, client: LocalClient, m: local.Finished) -> None:
        training = self._sessions.require_training(client, m.training)
        training.finished.add(m.rank)
        self._closed.close(training, self._sessions.find_series(client), m.version)

    def _reject(self, client: LocalClient, m: local.Reject) -> None:
        training = self._sessions.require_training(client, m.training)
        if training.chosen is None or training.chosen.version != m.version:
            raise RequestRejected(f"version {m.version} is not the one that the ranks have loaded")
        if why := self._rejections.reject(training, self._membership.epoch, m.reason, fresh=m.fresh):
            raise RequestRejected(why)

    def _keep(self, _: LocalClient, m: local.KeepVersion) -> None:
        if why := self._keeps.ask(Wish(m.training, m.name, m.version)):
            raise RequestRejected(why)

    def _on_outline_written(self, client: LocalClient, m: local.OutlineWritten) -> None:
        _, shard = self._require_shard(client, m.training, m.rank)
        # the message comes later than the write, perhaps when the slot is complete
        stamp = Stamp(self._membership.epoch, m.version)
        if not shard.pushed and m.slot in (0, 1) and shard.pair.slots[m.slot].stamp == stamp:
            self._outlines.on_written(shard, m.slot, m.small_bytes, m.areas, m.moment)

    def _log_event(self, client: LocalClient, m: local.Event) -> None:
        self._on_event(client, m)
        if self._events.take_tokens():
            self._log.log(_clean_text(m.name, 40), version=m.version, detail=m.detail[:300], t=m.t)
        else:
            self._log.log_rate_limited(f"process {client.pid} sends more events than the log keeps")

    def _on_event(self, client: LocalClient, m: local.Event) -> None:
        """Handle an event of a rank. A rank's report of lost protection is believed and shown to all users."""
        training, rank = self._sessions.find_rank(client)
        if training is None or training.present.get(rank) is not client:
            return
        if m.name in ("skipped", "void"):  # such versions are steps, too
            training.pace.record_version(m.version, clock.time() - m.t)
            self._leave_out(client, m.version)
            for (name, rank), keeper in self._keepers.items():
                shard = self._store.get(name, rank)
                if keeper is client and shard is not None and not shard.pushed:
                    self._filling.pass_over(shard, m.version)
        elif m.name == "raised":
            self._sessions.ends.record_exception(client, _clean_text(m.detail, 200), m.version)
        elif m.name == "degraded":
            training.record_trouble(f"rank {rank}: {m.detail[:300]}")
        elif m.name == "unprotected":  # an unprotected rank reports no more steps
            training.pace.reset()
            training.left[rank] = m.detail[:300]
            self._empty_filling(client)

    def _empty_filling(self, client: LocalClient) -> None:
        """Void all slots that this process was filling."""
        for (name, rank, index), filler in list(self._fills.items()):
            if filler is client:
                del self._fills[name, rank, index]
                shard = self._store.get(name, rank)
                if shard is not None and shard.pair.slots[index].state == "filling":
                    shard.pair.empty_slot(index)
                    self._trainings.recount(name)

    def _store_traffic(self, _: LocalClient, m: local.Traffic) -> None:
        training = self._trainings.get(m.training)
        sealed = training.sealed if training is not None else None
        self._stats.store_traffic(m.training, m.rank, m.state, saved=sealed.version if sealed is not None else 0)

    async def _register(self, client: LocalClient, m: local.Register) -> _Answer:
        training = self._authorize(client, m)
        if m.members:
            return await self._register_parity(client, training, m)
        size_bytes = m.bytes
        if m.pushed and not size_bytes and (known := self._store.get(m.training, m.rank)) is not None:
            size_bytes = known.bytes
        if not size_bytes:
            raise RequestRejected("a shard of 0 bytes is impossible")
        shard = await self._make_shard(client, training, m, size_bytes)
        self._keepers[m.training, m.rank] = client
        shard.pushed, shard.unlike, shard.half_back = m.pushed, "", False
        replica_fills.release(shard)
        self._trainings.recount(m.training)
        if m.pushed:
            self._spawn(self._populate(shard))
        return local.Slots(shard.bytes), [os.dup(memory.fd) for memory in shard.memory]

    async def _make_shard(
        self,
        client: LocalClient,
        training: Training,
        m: local.Register,
        size_bytes: int,
        parity: Parity | None = None,
    ) -> Shard:
        """Return the shard, or the parity beside it, registered in this round."""
        number = self._membership.round
        try:
            shard = await self._store.make_shard(m.training, m.rank, m.world, m.home, size_bytes, parity=parity)
        except NoMemory as exc:
            training.note = str(exc)
            self._log.log("refused", detail=str(exc))
            raise
        if self._membership.round != number:
            raise RequestRejected("a recovery round is under way")
        self._authorize(client, m)
        shard.registered_round = number
        return shard

    async def _populate(self, shard: Shard) -> None:
        """Map the pages of a shard that this agent receives, one slot after another, beside all other work.

        Nothing waits for this: a page that is not mapped yet costs its writer a page fault. The slot that is filled
        first comes first.
        """
        for index in sorted((0, 1), key=lambda index: shard.pair.slots[index].stamp or Stamp(0, 0)):
            async with self._populating:
                if (memory := shard.memory[index]).fd >= 0:  # else it was trimmed or freed
                    await run_beside("gemini-populate", memory.populate)

    async def _register_parity(self, client: LocalClient, training: Training, m: local.Register) -> local.Slots:
        """Register the parity kept beside a shard of this node, made of shards of its group's other nodes."""
        membership = self._membership
        own_noderank = membership.noderanks[self._node]
        ranks, homes = {rank for rank, _ in m.members}, {home for _, home in m.members}
        others = set(membership.redundancy.list_receivers(own_noderank)) if membership.redundancy.parity else set()
        if m.home != own_noderank or homes != others or not len(ranks) == len(homes) == len(m.members):
            raise RequestRejected(f"shards of node ranks {sorted(homes)} are no stripe of node rank {own_noderank}")
        if m.rank in ranks or max(ranks) >= m.world or not m.bytes:
            raise RequestRejected(f"impossible parity beside the shard of rank {m.rank}: of ranks {sorted(ranks)}")
        known = self._store.parities.get((m.training, m.rank))
        parity = Parity(dict(m.members), membership.redundancy.parity)
        has_grown = known is not None and cover_alike(known.parity, parity)
        size_bytes = max(m.bytes, known.bytes) if known is not None and has_grown else m.bytes
        shard = await self._make_shard(client, training, m, size_bytes, parity)
        if parity.blocks > 1 and galois.load_library() is None:
            training.note = f"{galois.LIBRARY} (ISA-L) is not installed on {self._node}: parity is slow there"
        self._trainings.recount(m.training)
        if m.passed:
            self._filling.pass_over(shard, m.passed)
        return local.Slots(shard.bytes)

    def _on_begin(self, client: LocalClient, m: local.BeginVersion) -> local.Message:
        training, shard = self._require_shard(client, m.training, m.rank)
        if shard.registered_round != self._membership.round or training.sealing is None:
            raise RequestRejected(f"shard of rank {m.rank} is not registered in this round")
        if self._keepers.get((m.training, m.rank)) is not client:
            raise RequestRejected(f"shard of rank {m.rank} is not registered by this process")
        if shard.pushed:
            raise RequestRejected(f"the agent of its home node fills the shard of rank {m.rank}")
        training.pace.record_version(m.version)
        _, rank = self._sessions.find_rank(client)
        if training.present.get(rank) is client and rank in training.left:
            return local.Refused(f"rank {rank} is no longer protected")
        try:
            index = self._filling.begin_write(training, shard, m.version)
        except Refused as exc:
            return local.Refused(exc.reason)
        self._fills[m.training, m.rank, index] = client
        training.begun = max(training.begun, m.version)
        note = self._saver.troubles.pop_note(m.training)
        if m.rank == 0 and training.void_note:
            note, training.void_note = training.void_note, ""
        return local.Begun(index, note)

    def _fill(self, client: LocalClient, m: local.Fill) -> local.Message:
        training, shard = self._require_shard(client, m.training, m.rank)
        if shard.registered_round != self._membership.round or not shard.pushed:
            raise RequestRejected(f"shard of rank {m.rank} is not pushed here in this round")
        if self._keepers.get((m.training, m.rank)) is not client:
            raise RequestRejected(f"shard of rank {m.rank} is not registered by this process")
        if shard.unlike:
            raise RequestRejected(shard.unlike)
        try:
            return local.Begun(
                replica_fills.begin_fill(self._filling, client, training, shard, m.version, self._membership.epoch)
            )
        except Refused as exc:
            return local.Refused(exc.reason)

    def _on_filled(self, client: LocalClient, m: local.Filled) -> None:
        _, shard = self._require_shard(client, m.training, m.rank)
        if reason := ranges.find_fault(m.present, shard.bytes):
            replica_fills.end(client, shard, m.version, ())
            raise RequestRejected(reason)
        if not replica_fills.end(client, shard, m.version, m.present):
            raise RequestRejected(f"version {m.version} of rank {m.rank} is not being filled by this process")

    def _leave_out(self, client: LocalClient, version: int) -> None:
        """Record that this rank fills no other rank's shard in this version."""
        for (name, rank), keeper in self._keepers.items():
            shard = self._store.get(name, rank)
            if keeper is client and shard is not None and shard.pushed:
                shard.unfilled = max(shard.unfilled, version)

    def _find_filling_shard(
        self, client: LocalClient, name: str, rank: int, index: int, version: int
    ) -> Shard | None:
        _, shard = self._require_shard(client, name, rank)
        if index not in (0, 1) or self._fills.get((name, rank, index)) is not client:
            return None
        slot = shard.pair.slots[index]
        if slot.state != "filling" or slot.stamp != Stamp(self._membership.epoch, version):
            return None
        return shard

    def _on_landed(self, client: LocalClient, m: local.Landed) -> None:
        shard = self._find_filling_shard(client, m.training, m.rank, m.slot, m.version)
        if shard is None:
            raise RequestRejected(f"slot {m.slot} of rank {m.rank} is not being filled with version {m.version}")
        if not 0 < m.used <= shard.bytes:
            raise RequestRejected(f"{m.used} bytes used in a slot of {shard.bytes} bytes")
        at_home = shard.home == self._membership.noderanks[self._node]
        if not is_digest(m.digest) and not (at_home and not m.digest):
            raise RequestRejected(f"the shard of rank {m.rank} is of node rank {shard.home}: a copy needs its digest")
        claimed = Committed(Stamp(self._membership.epoch, m.version), m.used, m.digest)
        try:
            self._filling.finish_write(shard, m.slot, claimed)
        except ValueError as exc:
            raise RequestRejected(str(exc)) from None
        del self._fills[m.training, m.rank, m.slot]

    def _open_push(self, client: LocalClient, m: local.OpenPush) -> Reply:
        membership = self._membership
        _, shard = self._require_shard(client, m.training, m.rank)
        own_noderank = membership.noderanks[self._node]
        if self._keepers.get((m.training, m.rank)) is not client or shard.pushed:
            raise RequestRejected(f"shard of rank {m.rank} is not filled by this process")
        if shard.home != own_noderank or m.holder not in membership.redundancy.list_receivers(own_noderank):
            raise RequestRejected(f"node rank {m.holder} keeps no copy of the shard of rank {m.rank} of this node")
        host = next(name for name, rank in membership.noderanks.items() if rank == m.holder)
        return local.Ok(), self._outgoing.open(client, shard, host)

    def _abort(self, client: LocalClient, m: local.Abort) -> None:
        shard = self._find_filling_shard(client, m.training, m.rank, m.slot, m.version)
        if shard is not None:
            del self._fills[m.training, m.rank, m.slot]
            self._filling.empty_slot(shard, m.slot)

    async def _fetch(self, client: LocalClient, m: local.Fetch) -> Reply:
        training = self._sessions.require_training(client, m.training)
        copy = training.chosen_copies.get(m.rank)
        if copy is None:
            raise RequestRejected(f"shard {m.rank} is not part of the chosen version")
        try:
            memory = await self._pulls.obtain(training, copy)
        except PullFailed as exc:
            self._log.log("unserved", version=copy.stamp[1], detail=f"shard {m.rank}: {exc}")
            raise RequestRejected(f"shard {m.rank} of version {copy.stamp[1]} could not be fetched: {exc}") from None
        reply = local.Copy(copy.stamp[0], copy.stamp[1], copy.bytes, copy.used, copy.digest)
        return reply, [memory.open_read_only()]

    async def _hand_back(self, client: LocalClient, m: local.HandBack, fds: list[int]) -> Reply:
        training = self._authorize(client, m)
        if len(fds) != 1 or m.slot not in (0, 1) or m.bytes == 0:
            raise RequestRejected("a hand-back needs one descriptor and a slot")
        shard = self._store.get(m.training, m.rank)
        taken = shard is not None and (shard.bytes != m.bytes or shard.pair.slots[m.slot].state != "empty")
        if taken or m.epoch > self._membership.epoch:
            raise RequestRejected(f"slot {m.slot} of rank {m.rank} cannot take version {m.version} back")
        try:
            memory = adopt(fds[0], m.bytes)
        except (ValueError, OSError) as exc:
            raise RequestRejected(str(exc)) from None
        try:
            shard = await self._store.make_shard(m.training, m.rank, m.world, m.home, m.bytes, reserve=False)
            if self._authorize(client, m) and shard.pair.slots[m.slot].state != "empty":
                raise RequestRejected(f"slot {m.slot} of rank {m.rank} is no longer empty")
        except BaseException:
            memory.close()
            raise
        shard.memory[m.slot].close()
        shard.memory[m.slot] = memory
        self._keepers[m.training, m.rank] = client
        incarnation, number = self._membership.incarnation, self._membership.round
        shard.registered_round, shard.pushed = number, m.pushed
        shard.half_back = True
        if m.digest and 0 < m.used <= m.bytes:
            digest = await self._store.pool.digest(memory, m.used, urgency=Urgency.OWN)
            self._authorize(client, m)
            if self._membership.incarnation is not incarnation or self._membership.round != number:
                raise RequestRejected("a recovery round began meanwhile")
            stamp = Stamp(m.epoch, m.version)
            free = shard.pair.slots[m.slot].state == "empty" and shard.pair.find_slot(stamp) is None
            if digest == m.digest and free:
                shard.pair.restore_slot(m.slot, stamp, digest, m.used, shard.read_moment(m.slot))
                shard.since[m.slot] = shard.verified[m.slot] = clock.time()
                memory.commit(Committed(stamp, m.used, digest))
            else:
                shard.pair.pass_over(stamp)  # the version is never written again: release all that waits for it
                self._log.log(
                    "damaged", version=m.version, detail=f"shard {m.rank}: handed back with a different digest"
                )
        if training.sealing is not None:
            training.sealing.voted |= shard.pair.list_complete_stamps()
        shard.handed_back |= {m.slot}
        shard.half_back = shard.handed_back != {0, 1}
        self._trainings.recount(m.training)
        return local.Ok(), []


def _clean_text(text: str, limit: int) -> str:
    return "".join(c for c in text[:limit] if c.isascii() and (c.isalnum() or c in "_-")) or "unnamed"
