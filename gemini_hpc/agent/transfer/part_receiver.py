"""What agents push for the parity here: of each shard of its stripe the bytes that this parity has of it.

A connection for each shard, as for a whole copy (`push_receiver`), but what comes is folded into one slot with what
the others send. The sender is told that the rest of its shard is not wanted. A version counts when all of the stripe
are in it, each as its home's agent has sent it: `PushDone.part` is the digest of the bytes that came. That of the
whole shard is noted, for whoever makes the shard again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from gemini_hpc import clock
from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.digest_pool import Urgency
from gemini_hpc.agent.replicas.memory import NoMemory
from gemini_hpc.agent.replicas.parity import Fold, Parity
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.core import parity
from gemini_hpc.core.copy import Member
from gemini_hpc.core.digest import Digest
from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink, LinkClosed

SEAL_WAIT_S = 1.5
_LATE_S = 1.0  # a version of which nothing more comes for so long makes room for a newer one
# What has not come for so long, and for so many usual iterations, does not come; where these are not known:
_LOST_S, _LOST, _LOST_UNKNOWN_S = 10.0, 10.0, 60.0
_RETRY_S = 0.001
_PIECE_BYTES = 1 << 20


class Part(NamedTuple):
    """One member's bytes of a version: those of its shard that come, and where they are folded in, in order."""

    shard: Shard
    fold: Fold
    rank: int
    wanted: Range
    places: list[parity.Fold]


class PartReceiver:
    """All of them on this node."""

    def __init__(self, membership: Membership, sets: Trainings, store: Store, filling: SlotWrites, log: Log) -> None:
        self._membership, self._sets, self._store = membership, sets, store
        self._filling, self._log = filling, log

    def _parity_of(self, ask: peer.PushAsk) -> Shard | None:
        return self._store.parity_of(ask.set, ask.rank, self._membership.round)

    def expects(self, ask: peer.PushAsk) -> bool:
        """Whether the shard is in a parity here."""
        return self._parity_of(ask) is not None

    def refusal(self, ask: peer.PushAsk, host: str) -> str:
        """Why nothing is taken from there now; "": it is."""
        shard, here = self._parity_of(ask), self._membership
        if shard is None or shard.parity is None or shard.registered_round != here.round:
            return f"no parity of the shard of rank {ask.rank} is registered here"
        home = shard.parity.homes[ask.rank]
        if here.noderanks.get(host) != home:
            return f"node rank {home} is the home of the shard of rank {ask.rank}"
        return ""

    # ---- in the push's thread --------------------------------------------------------------------------

    @staticmethod
    def take(link: BlockingLink, part: Part, silence_s: float) -> str:
        """The digest of the bytes that came, all of which are folded in. Raises LinkClosed, OSError."""
        at, end = part.wanted
        hasher, piece = Digest(), bytearray(min(_PIECE_BYTES, max(1, end - at)))
        places = iter(part.places)
        place = next(places, None)
        while at < end:
            link.wait(None)
            chunk = link.receive(peer.PushChunk)
            if chunk.offset != at or not 0 < chunk.length <= end - at:
                raise LinkClosed(f"a chunk of {chunk.length} bytes at {chunk.offset}, after {at} of {end} bytes")
            stop = at + chunk.length
            while at < stop:
                while place is not None and place.end <= at:
                    place = next(places, None)
                assert place is not None  # together they are what is wanted
                with memoryview(piece)[: min(len(piece), stop - at, place.end - at)] as data:
                    link.fill(data, silence_s)
                    hasher.update(data)
                    part.fold.add(place.at + at - place.start, data, place.by)
                    at += len(data)
            link.send(peer.PushAck(at))
        return hasher.hexdigest()

    # ---- on the loop -----------------------------------------------------------------------------------

    async def begin(self, ask: peer.PushAsk, host: str, head: peer.PushHead) -> Part | str:
        """Where this version's bytes go, or why they are not taken."""
        deadline = clock.monotonic() + SEAL_WAIT_S
        while True:
            training, shard = self._sets.get(ask.set), self._parity_of(ask)
            if training is None or shard is None or shard.parity is None:
                return "the parity has been freed"
            if reason := self.refusal(ask, host):
                return reason
            stripe = sorted((shard.rank, *shard.parity.homes))
            blocks = shard.parity.blocks
            if parity.block_bytes(head.used, len(stripe), blocks) > shard.bytes // blocks:
                reason = await self._grow(training, shard, shard.parity, head)
                break
            try:
                fold = await self._fold(training, shard, shard.parity, head.version)
            except Refused as exc:
                reason = exc.reason
                if self._settled(training, shard) or clock.monotonic() > deadline:
                    break
                await asyncio.sleep(_RETRY_S)
                continue
            if fold is None:
                continue
            if fold.torn or ask.rank not in fold.wanted:
                reason = f"version {head.version} of the shard of rank {ask.rank} has been here, or is torn"
                break
            fold.wanted.discard(ask.rank)
            fold.writing.add(ask.rank)
            shard.pair.slots[fold.index].busy = True
            fold.members[ask.rank] = Member(ask.rank, shard.parity.homes[ask.rank], head.bytes, head.used, "")
            wanted = parity.part(stripe, ask.rank, shard.rank, head.used, blocks)
            places = parity.share(stripe, ask.rank, shard.rank, head.used, blocks, fold.room)
            return Part(shard, fold, ask.rank, wanted, places)
        self._log("skipped", version=head.version, detail=f"parity of the shard of rank {ask.rank}: {reason}")
        return reason

    async def _grow(self, training: Training, shard: Shard, of: Parity, head: peer.PushHead) -> str:
        """A shard has outgrown its slots at its home: a larger parity, from the next version on, for what others have
        sent of this one is in the smaller. Returns why this one is not taken."""
        number = self._membership.round
        room = parity.block_bytes(max(head.bytes, head.used), len(of.homes) + 1, of.blocks)
        try:
            larger = await self._store.make_parity(
                shard.set, shard.rank, shard.world, shard.home, of.blocks * room, of.homes.items(), of.blocks
            )
        except NoMemory as exc:
            training.note = str(exc)
            return str(exc)
        if self._membership.round == number:  # else it is nobody's in the new one
            larger.registered_round = number
            self._filling.passed(larger, head.version)
        return "the parity has grown for it: from the next version on"

    async def _fold(self, training: Training, shard: Shard, into: Parity, version: int) -> Fold | None:
        """The version's, begun here if need be; None: look again. Raises `core.slots.Refused`."""
        stamp = Stamp(self._membership.epoch, version)
        if into.fill is not None and into.fill.stamp == stamp:
            slot = shard.pair.slots[into.fill.index]
            if slot.state == "filling" and slot.stamp == stamp:
                return into.fill
        if into.fill is not None and self._under_way(training, shard, into.fill):
            raise Refused(f"version {into.fill.stamp} is still on its way")
        index = self._filling.begin(training, shard, version)
        slot = shard.pair.slots[index]
        slot.busy = True
        view = shard.memory[index].view()
        await asyncio.to_thread(_clear, view)
        if shard.pair.slots[index] is not slot:
            view.release()
            return None
        slot.busy = False
        into.of[index] = ()
        if into.fill is not None:
            into.fill.view.release()
        into.fill = Fold(stamp, index, view, shard.bytes // into.blocks, into.homes)
        return into.fill

    @staticmethod
    def _under_way(training: Training, shard: Shard, fill: Fold) -> bool:
        """Whether others of the stripe may still bring this version: who goes on to the next is not to spoil it."""
        slot, sealing = shard.pair.slots[fill.index], training.sealing
        decided = sealing is None or fill.stamp in sealing.word.abandoned
        wanted = slot.state == "filling" and slot.stamp == fill.stamp and not fill.torn
        return wanted and not decided and (bool(fill.writing) or clock.monotonic() - fill.touched < _LATE_S)

    def _settled(self, training: Training, shard: Shard) -> bool:
        """Whether waiting for a seal, or for who is writing, is of no use."""
        sealed = training.sealed or Stamp(0, 0)
        fill = shard.parity.fill if shard.parity is not None else None
        if fill is not None and self._under_way(training, shard, fill):
            return False
        undecided = any(
            s.busy or (s.state == "complete" and s.stamp is not None and s.stamp > sealed) for s in shard.pair.slots
        )
        return not undecided or training.sealing is None or training.sealing.degraded

    def tend(self) -> None:
        """Called now and then: give up what will not become whole. Its home has had the shard beside it for long, and
        nothing more comes of the others: a member may have sent it to an agent that has died since, and then waits
        for this one to say that it has not got it."""
        now = clock.monotonic()
        for shard in self._store.parities.values():
            beside, state = self._store.get(shard.set, shard.rank), shard.parity
            training = self._sets.get(shard.set)
            if beside is None or state is None or training is None or training.sealing is None:
                continue
            fill, sealed, pace = state.fill, training.sealed or Stamp(0, 0), training.pace.state()
            patience_s = max(_LOST_S, _LOST * pace.usual_s) if pace is not None else _LOST_UNKNOWN_S
            if fill is not None and (fill.writing or now - fill.touched < patience_s):
                continue
            since = clock.time() - patience_s
            for slot, came in zip(beside.pair.slots, beside.since, strict=True):
                if slot.state != "complete" or slot.stamp is None or slot.stamp <= sealed or came > since:
                    continue
                if slot.stamp in shard.pair.complete_stamps() or slot.stamp.epoch != self._membership.epoch:
                    continue
                if (index := shard.pair.find(slot.stamp)) is not None:
                    state.fill = None
                    self._filling.void(shard, index)
                if shard.pair.floor is None or slot.stamp >= shard.pair.floor:
                    self._filling.passed(shard, slot.stamp.version)

    async def end(self, part: Part, digest: str, claimed: str, found: str, mark: int) -> int:
        """Nobody writes these bytes any more; how many have come. digest: of the whole shard, where all have come;
        claimed, found: of those that came, as said and as read; mark: of the shard's moment (`core.moments`)."""
        shard, fold = part.shard, part.fold
        fold.writing.discard(part.rank)
        fold.touched = clock.monotonic()
        if not digest or claimed != found:
            fold.torn = True
            if digest:
                detail = f"parity of the shard of rank {part.rank}: its digest differs after the transfer"
                self._log("damaged", version=fold.stamp.version, detail=detail)
        else:
            member = fold.members[part.rank]
            fold.members[part.rank] = Member(member.rank, member.home, member.bytes, member.used, digest, mark)
        slot, state = shard.pair.slots[fold.index], shard.parity
        if not any(shard is held for held in self._store.every()):  # it has been freed meanwhile
            return 0
        if state is None or state.fill is not fold or slot.state != "filling" or slot.stamp != fold.stamp:
            return 0
        if not fold.writing:
            slot.busy = False
        if fold.torn and not fold.writing:
            self._forget(state, fold)
            self._filling.void(shard, fold.index)
        elif fold.whole:
            await self._complete(shard, state, fold)
        return part.wanted[1] - part.wanted[0]

    async def _complete(self, shard: Shard, state: Parity, fold: Fold) -> None:
        stripe = sorted((shard.rank, *state.homes))
        lengths = {m.rank: m.used for m in fold.of}
        used = parity.parity_bytes(stripe, shard.rank, lengths, state.blocks, fold.room)
        slot = shard.pair.slots[fold.index]
        slot.busy = True
        digest = await self._store.pool.digest(shard.memory[fold.index], used, urgency=Urgency.ARRIVING)
        state.of[fold.index], state.rooms[fold.index] = fold.of, fold.room
        self._forget(state, fold)
        self._filling.arrived(shard, fold.index, Committed(fold.stamp, used, digest), digest)

    @staticmethod
    def _forget(state: Parity, fold: Fold) -> None:
        if state.fill is fold:
            state.fill = None
        fold.view.release()


def _clear(view: memoryview) -> None:
    for at in range(0, len(view), _PIECE_BYTES):
        size = min(_PIECE_BYTES, len(view) - at)
        view[at : at + size] = bytes(size)
