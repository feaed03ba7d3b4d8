"""Receiver of the parity here: of each shard of the stripe, agents push the bytes that this parity covers.

Each shard has its own connection, as for a whole copy (`push_receiver`). The bytes are folded into one slot together
with the other members' bytes. The receiver tells the sender that the rest of its shard is not wanted. A version
counts when all members of the stripe are folded in, each as its home's agent has sent it. `PushDone.part` is the
digest of the bytes that arrive. The digest of the whole shard is noted for an agent that reconstructs the shard.

A version without new bytes gives way to a newer one after a moment (`_LATE_S`), or once the root has abandoned it.

An agent that dies leaves no parity. Until the next version, its group survives the loss of that node only. The other
members have sent their bytes and would wait for a seal. So the rank beside the parity reports that no version up to
the next one will come (`wire.local.Register.passed`).
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from gemini_hpc import clock
from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.digest_pool import Urgency
from gemini_hpc.agent.replicas.memory import NoMemory, clear
from gemini_hpc.agent.replicas.parity import Parity, ParityFold
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.transfer.receipts import Receipts
from gemini_hpc.core.copy import Member
from gemini_hpc.core.digest import Digest
from gemini_hpc.core.parity import ParityTerm, Stripe
from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink, LinkClosed

SEAL_WAIT_S = 1.5  # wait for the seal of the previous version or for other members
_LATE_S = 1.0  # a version without new bytes for this long makes room for a newer one
# A missing version is lost after this time and this many usual iterations; the last value serves without a pace:
_LOST_S, _LOST, _LOST_UNKNOWN_S = 10.0, 10.0, 60.0
_RETRY_S = 0.001  # interval of retries during that wait
_PIECE_BYTES = 1 << 20


class Part(NamedTuple):
    """The bytes that one member contributes to a version, and the places to fold them in, in order."""

    shard: Shard
    fold: ParityFold
    rank: int
    wanted: Range
    places: list[ParityTerm]


class PartReceiver:
    """The receiver of all parity parts on this node."""

    def __init__(
        self, membership: Membership, trainings: Trainings, store: Store, filling: SlotWrites, log: Log
    ) -> None:
        self._membership, self._trainings, self._store = membership, trainings, store
        self._filling, self._log = filling, log

    def _find_parity(self, ask: peer.PushAsk) -> Shard | None:
        return self._store.find_covering_parity(ask.training, ask.rank, self._membership.round)

    def expects(self, ask: peer.PushAsk) -> bool:
        """Return whether parity here covers the shard."""
        return self._find_parity(ask) is not None

    def find_refusal(self, ask: peer.PushAsk, host: str) -> str:
        """Return why no bytes are accepted from this host now, or "" if they are."""
        shard, membership = self._find_parity(ask), self._membership
        if shard is None or shard.parity is None or shard.registered_round != membership.round:
            return f"no parity of the shard of rank {ask.rank} is registered here"
        home = shard.parity.homes[ask.rank]
        if membership.noderanks.get(host) != home:
            return f"node rank {home} is the home of the shard of rank {ask.rank}"
        return ""

    # ---- in the push's thread --------------------------------------------------------------------------

    @staticmethod
    def receive_part(link: BlockingLink, part: Part, silence_s: float) -> str:
        """Receive a member's bytes, up to the message behind them, and fold them in. Return their digest.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """
        at, end = part.wanted
        hasher, piece, receipts = Digest(), bytearray(min(_PIECE_BYTES, max(1, end - at))), Receipts(link)
        places = iter(part.places)
        place = next(places, None)
        while at < end:
            receipts.wait()
            chunk = link.receive(peer.PushChunk)
            if chunk.offset != at or not 0 < chunk.length <= end - at:
                raise LinkClosed(f"a chunk of {chunk.length} bytes at {chunk.offset}, after {at} of {end} bytes")
            start, stop = at, at + chunk.length
            while at < stop:
                while place is not None and place.end <= at:
                    place = next(places, None)
                assert place is not None  # the places together cover the wanted bytes
                with memoryview(piece)[: min(len(piece), stop - at, place.end - at)] as data:
                    link.fill(data, silence_s)
                    hasher.update(data)
                    part.fold.add(place.offset + at - place.start, data, place.factor)
                    at += len(data)
            receipts.add(stop - start)
        receipts.wait()
        receipts.acknowledge()
        return hasher.to_hex()

    # ---- on the loop -----------------------------------------------------------------------------------

    async def begin_part(self, ask: peer.PushAsk, host: str, head: peer.PushHead) -> Part | str:
        """Return the places for this version's bytes, or the reason why they are not accepted."""
        deadline = clock.monotonic() + SEAL_WAIT_S
        while True:
            training, shard = self._trainings.get(ask.training), self._find_parity(ask)
            if training is None or shard is None or shard.parity is None:
                return "the parity has been freed"
            if reason := self.find_refusal(ask, host):
                return reason
            stripe = _build_stripe(shard, shard.parity)
            if stripe.compute_block_bytes(head.used) > shard.bytes // stripe.blocks:
                reason = await self._grow(training, shard, shard.parity, head)
                break
            try:
                fold = await self._fold(training, shard, shard.parity, head.version)
            except Refused as exc:
                reason = exc.reason
                fill = shard.parity.fill
                is_awaited = fill is not None and self._is_under_way(training, shard, fill)
                if not (is_awaited or self._filling.may_seal_soon(training, shard)) or clock.monotonic() > deadline:
                    break
                await asyncio.sleep(_RETRY_S)
                continue
            if fold is None:
                continue
            if fold.torn or ask.rank not in fold.wanted:
                reason = (
                    f"version {head.version} of the shard of rank {ask.rank} was received before, or is incomplete"
                )
                break
            fold.wanted.discard(ask.rank)
            fold.writing.add(ask.rank)
            shard.pair.slots[fold.index].busy = True
            fold.folded[ask.rank] = Member(ask.rank, shard.parity.homes[ask.rank], head.bytes, head.used, "")
            wanted = stripe.find_part(ask.rank, shard.rank, head.used)
            places = stripe.derive_share(ask.rank, shard.rank, head.used, fold.room)
            return Part(shard, fold, ask.rank, wanted, places)
        self._log("skipped", version=head.version, detail=f"parity of the shard of rank {ask.rank}: {reason}")
        return reason

    async def _grow(self, training: Training, shard: Shard, parity_wanted: Parity, head: peer.PushHead) -> str:
        """Create larger parity for a shard that has outgrown its slots at its home.

        Return why this version is not accepted. The larger parity serves from the next version on, because other
        members' bytes of this version are in the smaller parity.
        """
        number = self._membership.round
        room = _build_stripe(shard, parity_wanted).compute_block_bytes(max(head.bytes, head.used))
        try:
            larger = await self._store.make_shard(
                shard.training,
                shard.rank,
                shard.world,
                shard.home,
                parity_wanted.blocks * room,
                parity=Parity(parity_wanted.homes, parity_wanted.blocks),
            )
        except NoMemory as exc:
            training.note = str(exc)
            return str(exc)
        if self._membership.round == number:  # else no rank has registered it in the new round
            larger.registered_round = number
            self._filling.pass_over(larger, head.version)
        return "the parity has grown, and protects this shard from the next version on"

    async def _fold(self, training: Training, shard: Shard, into: Parity, version: int) -> ParityFold | None:
        """Return the version's fold, begun here if necessary, or None if the caller must check again.

        Raises:
            core.slots.Refused: No slot may be written to now.
        """
        stamp = Stamp(self._membership.epoch, version)
        if into.fill is not None and into.fill.stamp == stamp:
            slot = shard.pair.slots[into.fill.index]
            if slot.state == "filling" and slot.stamp == stamp:
                return into.fill
        if into.fill is not None and self._is_under_way(training, shard, into.fill):
            raise Refused(f"version {into.fill.stamp} is still on its way")
        index = self._filling.begin_write(training, shard, version)
        slot = shard.pair.slots[index]
        slot.busy = True
        view = shard.memory[index].view()
        await asyncio.to_thread(clear, view)
        if shard.pair.slots[index] is not slot:
            view.release()
            return None
        slot.busy = False
        into.members[index] = ()
        if into.fill is not None:
            into.fill.view.release()
        into.fill = ParityFold(stamp, index, view, shard.bytes // into.blocks, into.homes)
        return into.fill

    @staticmethod
    def _is_under_way(training: Training, shard: Shard, fill: ParityFold) -> bool:
        """Return whether other members may still complete this version. A newer version must not spoil it then."""
        slot, sealing = shard.pair.slots[fill.index], training.sealing
        decided = sealing is None or fill.stamp in sealing.decision.abandoned
        wanted = slot.state == "filling" and slot.stamp == fill.stamp and not fill.torn
        return wanted and not decided and (bool(fill.writing) or clock.monotonic() - fill.touched < _LATE_S)

    def tend(self) -> None:
        """Abandon versions that will not become whole. Called now and then.

        The home has long had the shard beside the parity, and the other members send nothing more. A member may have
        sent its bytes to an agent that has died since. The member then waits until this agent reports that it lacks
        the version.
        """
        now = clock.monotonic()
        for shard in self._store.parities.values():
            beside, state = self._store.get(shard.training, shard.rank), shard.parity
            training = self._trainings.get(shard.training)
            if beside is None or state is None or training is None or training.sealing is None:
                continue
            fill, sealed, pace = state.fill, training.sealed or Stamp(0, 0), training.pace.build_state()
            patience_s = max(_LOST_S, _LOST * pace.usual_s) if pace is not None else _LOST_UNKNOWN_S
            if fill is not None and (fill.writing or now - fill.touched < patience_s):
                continue
            since = clock.time() - patience_s
            for slot, came in zip(beside.pair.slots, beside.since, strict=True):
                if slot.state != "complete" or slot.stamp is None or slot.stamp <= sealed or came > since:
                    continue
                if slot.stamp in shard.pair.list_complete_stamps() or slot.stamp.epoch != self._membership.epoch:
                    continue
                if (index := shard.pair.find_slot(slot.stamp)) is not None:
                    state.fill = None
                    self._filling.empty_slot(shard, index)
                if shard.pair.floor is None or slot.stamp >= shard.pair.floor:
                    self._filling.pass_over(shard, slot.stamp.version)

    async def end(self, part: Part, digest: str, claimed: str, found: str, mark: int) -> int:
        """End the writing of a member's bytes. Return how many bytes have arrived.

        Args:
            part: The member's bytes. No thread writes them any more.
            digest: Digest of the whole shard, or "" if bytes are missing.
            claimed: Digest of the member's bytes as the sender reports it.
            found: Digest of the member's bytes as they arrived.
            mark: Mark of the shard's moment (`core.moments`).
        """
        shard, fold = part.shard, part.fold
        fold.writing.discard(part.rank)
        fold.touched = clock.monotonic()
        if not digest or claimed != found:
            fold.torn = True
            if digest:
                detail = f"parity of the shard of rank {part.rank}: its digest differs after the transfer"
                self._log("damaged", version=fold.stamp.version, detail=detail)
        else:
            member = fold.folded[part.rank]
            fold.folded[part.rank] = Member(member.rank, member.home, member.bytes, member.used, digest, mark)
        slot, state = shard.pair.slots[fold.index], shard.parity
        if not any(shard is held for held in self._store.list_all()):  # the parity has been freed meanwhile
            return 0
        if state is None or state.fill is not fold or slot.state != "filling" or slot.stamp != fold.stamp:
            return 0
        if not fold.writing:
            slot.busy = False
        if fold.torn and not fold.writing:
            self._forget(state, fold)
            self._filling.empty_slot(shard, fold.index)
        elif fold.whole:
            await self._complete(shard, state, fold)
        return part.wanted[1] - part.wanted[0]

    async def _complete(self, shard: Shard, state: Parity, fold: ParityFold) -> None:
        lengths = {m.rank: m.used for m in fold.members}
        used = _build_stripe(shard, state).compute_parity_bytes(shard.rank, lengths, fold.room)
        slot = shard.pair.slots[fold.index]
        slot.busy = True
        digest = await self._store.pool.digest(shard.memory[fold.index], used, urgency=Urgency.ARRIVING)
        state.members[fold.index], state.rooms[fold.index] = fold.members, fold.room
        self._forget(state, fold)
        self._filling.complete_slot(shard, fold.index, Committed(fold.stamp, used, digest), digest)

    @staticmethod
    def _forget(state: Parity, fold: ParityFold) -> None:
        if state.fill is fold:
            state.fill = None
        fold.view.release()


def _build_stripe(shard: Shard, of: Parity) -> Stripe:
    """Return the stripe of the parity that lies beside this shard."""
    return Stripe(tuple(sorted((shard.rank, *of.homes))), of.blocks)
