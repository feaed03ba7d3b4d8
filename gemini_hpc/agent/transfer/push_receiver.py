"""Versions that the agents of other nodes push here: raw bytes, received directly into the slot.

Each shard has a leading connection, and further ones beside it that carry bytes only, each with a thread. They end
together. A push is trusted like a trainer. The other end of the connections must be the agent of the shard's home in
this incarnation, epoch and round. The slot is assigned by the same rules (R1). The copy counts when its digest has
been verified (R5). Any other message ends the connections.

If a connection ends, or the bytes of a chunk do not come, the version's slot here becomes void. A newer connection
for a shard first ends the older one. A new round ends all of them before its inventory. If too many pieces differ, or
some still do, this agent ends the connections, and the home gives the version up.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas import replica_fills
from gemini_hpc.agent.replicas.digest_pool import Urgency
from gemini_hpc.agent.replicas.memory import NoMemory
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Key, Shard, Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.transfer import stripes
from gemini_hpc.agent.transfer.arrival import Arrival, Connection
from gemini_hpc.agent.transfer.part_receiver import Part, PartReceiver
from gemini_hpc.agent.transfer.rdma import Rdma, Window
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.core import ranges
from gemini_hpc.core.digest import combine_pieces, is_digest
from gemini_hpc.core.moments import UNKNOWN
from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Refused, Slot, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.link import BlockingLink, Link, LinkClosed
from gemini_hpc.wire.peer import MAX_AGAIN

SILENCE_S = 5.0  # a sender that is silent for this long within a message or chunk is lost
SEAL_WAIT_S = 1.5  # wait for the seal of the previous version, which may reach the home sooner than this node
_RETRY_S = 0.001  # interval of retries during that wait
T = TypeVar("T")


class _OnLoop(Protocol):
    """A function that runs a coroutine on the event loop for a waiting thread."""

    def __call__(self, work: Coroutine[Any, Any, T]) -> T: ...


@dataclass
class _Taken:
    """A slot in progress, filled by a push."""

    shard: Shard
    index: int
    stamp: Stamp
    view: memoryview
    present: tuple[Range, ...] = ()  # these bytes need not be sent
    filled: bool = False  # a rank here has filled some of them
    again: int = 0  # number of bytes that came twice, as they were damaged


@dataclass(eq=False)
class _Stripe:
    """A connection that carries bytes of a push."""

    link: BlockingLink | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        if self.link is not None:
            self.link.shut()


@dataclass(eq=False)
class _Push(_Stripe):
    """The leading connection of a push of one shard."""

    ask: peer.PushAsk = field(kw_only=True)
    host: str = field(kw_only=True)
    instance: str = field(kw_only=True)
    name: str = field(default_factory=lambda: os.urandom(8).hex())
    stopped: bool = False
    beside: dict[int, _Stripe] = field(default_factory=dict)  # the further connections
    arrival: Arrival | None = None  # of the version under way
    is_tried: bool = False  # the home has written here by RDMA, and may do so with versions

    def stop(self) -> None:
        self.stopped = True
        super().stop()
        for stripe in self.beside.values():
            stripe.stop()

    async def wait_for_stripes(self) -> None:
        """Return when no further connection brings bytes any more."""
        for stripe in self.beside.values():
            await stripe.over.wait()


class PushReceiver:
    """The pushes to this node."""

    def __init__(
        self, membership: Membership, trainings: Trainings, store: Store, filling: SlotWrites, rdma: Rdma, log: Log
    ) -> None:
        self._membership, self._trainings, self._store = membership, trainings, store
        self._filling, self._rdma, self._log = filling, rdma, log
        self._pool = store.pool
        self._parts = PartReceiver(membership, trainings, store, filling, log)
        self._pushes: dict[Key, _Push] = {}
        self.bytes = 0

    def tend(self) -> None:
        """Abandon parity that will not become whole. Called now and then."""
        self._parts.tend()

    def stop(self) -> None:
        """Stop accepting bytes of the old epoch. Wait for the end with `wait_stopped`."""
        for push in self._pushes.values():
            push.stop()

    async def wait_stopped(self) -> None:
        """Return when no stopped push writes any more."""
        for push in list(self._pushes.values()):
            if push.stopped:
                await push.over.wait()

    async def drop_peers(self, hosts: Collection[str]) -> None:
        """Stop the pushes from these dead hosts. On return none of these pushes writes any more."""
        left = [push for push in self._pushes.values() if push.host in hosts]
        for push in left:
            push.stop()
        for push in left:
            await push.over.wait()

    async def serve(self, link: Link) -> None:
        """Receive the versions that arrive over a push connection.

        Raises:
            LinkClosed: The push is refused, violates the protocol, or ends early.
            TimeoutError: The peer sends no request.
        """
        async with asyncio.timeout(SILENCE_S):
            ask = await link.receive()
        if isinstance(ask, peer.PushStripe):
            return await self._serve_beside(link, ask)
        if not isinstance(ask, peer.PushAsk):
            raise LinkClosed(f"wanted PushAsk, got {type(ask).__name__}")
        push = _Push(ask=ask, host=link.session.peer_host, instance=link.session.peer_instance)
        key, reason = (ask.training, ask.rank), self._find_refusal(push)
        while not reason and (older := self._pushes.get(key)) is not None:
            older.stop()
            await older.over.wait()
            reason = self._find_refusal(push)
        if reason:
            await link.flush(peer.PushAnswer(reason))
            raise LinkClosed(f"push of shard {ask.rank} from {push.host} refused: {reason}")
        self._pushes[key] = push
        try:
            parity = self._parts.expects(ask)
            most = 1 if parity else stripes.count_connections()
            offers = msgspec.UNSET if parity or not self._rdma.is_ready else True
            push.link = await link.block(peer.PushAnswer(push=push.name, stripes=most, rdma=offers))
            push.link.limit_silence(SILENCE_S)
            if push.stopped:
                raise LinkClosed("cancelled by a new recovery round")
            loop = asyncio.get_running_loop()
            await run_beside(f"gemini-pushed-{ask.rank}", lambda: self._receive(push, loop))
        finally:
            push.stop()
            await push.wait_for_stripes()
            if push.link is not None:
                push.link.close()
            del self._pushes[key]
            push.over.set()

    async def _serve_beside(self, link: Link, ask: peer.PushStripe) -> None:
        """Receive bytes that arrive over a further connection.

        Raises:
            LinkClosed: The connection is refused, violates the protocol, or ends early.
        """
        push, session = self._pushes.get((ask.training, ask.rank)), link.session
        reason = ""
        if push is None or push.stopped or push.name != ask.push:
            reason = "this transfer is not known here"
        elif (push.host, push.instance) != (session.peer_host, session.peer_instance):
            reason = "this transfer belongs to another agent"
        elif ask.number in push.beside:
            reason = "this connection exists already"
        elif self._parts.expects(push.ask) or ask.number >= stripes.count_connections():
            reason = "too many connections for one transfer"
        if push is None or reason:
            await link.flush(peer.PushAnswer(reason))
            raise LinkClosed(f"bytes of shard {ask.rank} from {session.peer_host} refused: {reason}")
        stripe = push.beside[ask.number] = _Stripe()
        try:
            stripe.link = await link.block(peer.PushAnswer())
            stripe.link.limit_silence(SILENCE_S)
            if not push.stopped:
                await run_beside(f"gemini-pushed-{ask.rank}-{ask.number}", lambda: self._receive_beside(push, stripe))
        finally:
            push.stop()  # bytes may be missing
            if stripe.link is not None:
                stripe.link.close()
            stripe.over.set()

    def _find_refusal(self, push: _Push) -> str:
        """Return why no bytes are accepted from this push now, or "" if they are."""
        ask, membership, incarnation = push.ask, self._membership, self._membership.training
        training, shard = self._trainings.get(ask.training), self._store.get(ask.training, ask.rank)
        if push.stopped or incarnation is None or training is None:
            return "no training of the job runs on this node now"
        if ask.epoch != membership.epoch or ask.round != membership.round:
            return f"this node is at epoch {membership.epoch}, round {membership.round}"
        if self._parts.expects(ask):
            return self._parts.find_refusal(ask, push.host)
        if shard is None or shard.registered_round != membership.round or shard.half_back:
            return f"shard of rank {ask.rank} is not registered here"
        if not shard.pushed:
            return f"a process of this node fills the shard of rank {ask.rank}"
        if membership.noderanks.get(push.host) != shard.home:
            return f"node rank {shard.home} is the home of the shard of rank {ask.rank}"
        return ""

    # ---- in the push's thread --------------------------------------------------------------------------

    def _receive(self, push: _Push, loop: asyncio.AbstractEventLoop) -> None:
        """Receive versions until the other end has no more.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """

        def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        link = push.link
        assert link is not None
        while True:
            link.wait(None)
            if not link.sock.recv(1, socket.MSG_PEEK):
                return
            head = link.receive_any()
            if isinstance(head, peer.PushTrial):
                push.is_tried = self._rdma.serve_trial(link, head, push.host)
                continue
            if not isinstance(head, peer.PushHead):
                raise LinkClosed(f"wanted PushHead, got {type(head).__name__}")
            if self._parts.expects(push.ask):
                self._receive_part(push, link, head, run_on_loop)
                continue
            taken = run_on_loop(self._begin_version(push, head))
            if isinstance(taken, str):
                link.send(peer.PushAnswer(taken))
                continue
            claimed: Committed | None = None
            found, counts = "", False
            try:
                digest, found = self._fill(push, link, taken, head)
                claimed = Committed(taken.stamp, head.used, digest)
            finally:
                push.arrival = None
                counts = run_on_loop(self._end(push, taken, claimed, found))
            if not counts and not taken.filled:  # the home must abort it too, or no newer version would be pushed
                raise LinkClosed("the digest differs")
            link.send(peer.PushVerified())

    def _receive_part(self, push: _Push, link: BlockingLink, head: peer.PushHead, run_on_loop: _OnLoop) -> None:
        part = run_on_loop(self._begin_part(push, head))
        if isinstance(part, str):
            link.send(peer.PushAnswer(part))
            return
        digest, claimed, found, mark = "", "", "", UNKNOWN
        try:
            start, end = part.wanted
            rest = ((0, start), (end, head.used))
            link.send(peer.PushAnswer(present=tuple((a, b) for a, b in rest if a < b), part=True))
            found = self._parts.receive_part(link, part, SILENCE_S)
            done = link.receive(peer.PushDone)
            if not is_digest(done.digest) or not is_digest(done.part):
                raise LinkClosed("not a digest")
            digest, claimed, mark = done.digest, done.part, done.mark
        finally:
            self.bytes += run_on_loop(self._parts.end(part, digest, claimed, found, mark))
        link.send(peer.PushVerified())

    def _fill(self, push: _Push, link: BlockingLink, taken: _Taken, head: peer.PushHead) -> tuple[str, str]:
        """Receive the slot's missing bytes. Return the home's digest, and the digest of all bytes in the slot.

        Arriving bytes are hashed at once, while they are in the processor's cache; the training is mostly not on the
        network then. The pool hashes the bytes that are present already. No other writer gets the slot meanwhile.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """
        used, memory = head.used, taken.shard.memory[taken.index]
        arrival = Arrival(taken.view, used, taken.present)
        pieces, lead = arrival.pieces, Connection(arrival, link, SILENCE_S)
        pair = head.pair if push.is_tried else msgspec.UNSET
        window = self._rdma.open_window(memory, pair) if isinstance(pair, peer.QueuePair) else None
        if window is not None:
            done = self._await_writes(lead, link, window, taken.present)
            arrival.mark_written()
            runs = [(0, pieces.count)]
        else:
            runs = arrival.list_present_runs()
        beside = [self._pool.hash(memory, pieces, *run, urgency=Urgency.ARRIVING) for run in runs]
        push.arrival = arrival  # before any byte can come
        if window is None:
            link.send(peer.PushAnswer(present=taken.present))
            done = self._receive_chunks(lead, link)
        for reading in beside:
            try:
                reading.result()
            except CancelledError:
                raise LinkClosed("this agent ends") from None
        bad = pieces.find_differing(done.pieces)
        if (
            pieces.compute_digest() != done.digest == combine_pieces(done.pieces, used)
            and not taken.filled
            and len(bad) <= MAX_AGAIN
        ):
            arrival.reopen_pieces(bad)
            taken.again = arrival.missing
            link.send(peer.PushAgain(tuple(bad)))
            if self._receive_chunks(lead, link).digest != done.digest:
                raise LinkClosed("another digest")
        return done.digest, pieces.compute_digest()

    @staticmethod
    def _await_writes(
        lead: Connection, link: BlockingLink, window: Window, present: tuple[Range, ...]
    ) -> peer.PushDone:
        """Let the home write the bytes by RDMA, and return its digest. Nobody writes on return, nor on failure.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """
        with closing(window):
            link.send(peer.PushAnswer(present=present, window=window.place))
            lead.wait()
            done = link.receive(peer.PushDone)
        if not is_digest(done.digest):
            raise LinkClosed("not a digest")
        return done

    @staticmethod
    def _receive_chunks(lead: Connection, link: BlockingLink) -> peer.PushDone:
        """Receive chunks up to the home's digest, and return the message with it.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """
        while True:
            lead.wait()  # a chunk is sent only when the training leaves bandwidth for it
            message = link.receive_any()
            if isinstance(message, peer.PushDone):
                lead.acknowledge()
                if not is_digest(message.digest) or lead.arrival.missing:
                    raise LinkClosed(f"not a digest, or {lead.arrival.missing} bytes are missing")
                return message
            if not isinstance(message, peer.PushChunk):
                raise LinkClosed(f"wanted PushChunk, got {type(message).__name__}")
            lead.receive(message)

    @staticmethod
    def _receive_beside(push: _Push, stripe: _Stripe) -> None:
        """Receive bytes of versions until the other end has no more.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """
        link, into = stripe.link, None
        assert link is not None
        while True:
            if into is None:
                link.wait(None)
            else:
                into.wait()
            if not link.sock.recv(1, socket.MSG_PEEK):
                return
            chunk, arrival = link.receive(peer.PushChunk), push.arrival
            if arrival is None:
                raise LinkClosed("bytes that belong to no version")
            if into is None or into.arrival is not arrival:
                into = Connection(arrival, link, SILENCE_S)
            into.receive(chunk)

    # ---- on the loop, for the thread -------------------------------------------------------------------

    async def _begin_part(self, push: _Push, head: peer.PushHead) -> Part | str:
        _check(head)
        return self._find_refusal(push) or await self._parts.begin_part(push.ask, push.host, head)

    async def _begin_version(self, push: _Push, head: peer.PushHead) -> _Taken | str:
        """Return a slot for this version, or the reason why there is none.

        Raises:
            LinkClosed: The version is impossible.
        """
        ask = push.ask
        _check(head)
        if reason := ranges.find_fault(head.kept, head.used):
            raise LinkClosed(reason)
        deadline = clock.monotonic() + SEAL_WAIT_S
        while True:
            if reason := self._find_refusal(push):
                return reason
            training, shard = self._trainings.get(ask.training), self._store.get(ask.training, ask.rank)
            assert training is not None and shard is not None
            if head.bytes != shard.bytes:
                if reason := await self._grow(training, shard, head.bytes):
                    break
                continue
            fill = await replica_fills.wait_for_fill(shard, head.version)
            if isinstance(fill, str):
                reason = fill
                break
            if reason := self._find_refusal(push):
                return reason
            if fill is not None and self._store.get(ask.training, ask.rank) is shard:
                shard.pair.slots[fill.index].busy = True
                # a failed fill may have overwritten kept bytes
                have = [*fill.present, *self._find_kept(head, fill.before)] if fill.present else []
                view = shard.memory[fill.index].view()
                return _Taken(
                    shard, fill.index, fill.stamp, view, self._normalize_ranges(have, head), bool(fill.present)
                )
            before = list(shard.pair.slots)
            try:
                index = self._filling.begin_write(training, shard, head.version)
            except Refused as exc:
                reason = exc.reason
                if not self._filling.may_seal_soon(training, shard) or clock.monotonic() > deadline:
                    break
                await asyncio.sleep(_RETRY_S)
                continue
            shard.pair.slots[index].busy = True
            present = self._normalize_ranges(self._find_kept(head, before[index]), head)
            return _Taken(
                shard, index, Stamp(self._membership.epoch, head.version), shard.memory[index].view(), present
            )
        self._log("skipped", version=head.version, detail=f"shard of rank {ask.rank}: {reason}")
        return reason

    def _find_kept(self, head: peer.PushHead, before: Slot) -> Sequence[Range]:
        """Return the ranges of this version that the slot already contained before it was assigned."""
        had = before.state == "complete" and before.stamp == Stamp(self._membership.epoch, head.base)
        return head.kept if had and head.kept and head.kept[-1][1] <= before.bytes_used else ()

    @staticmethod
    def _normalize_ranges(present: Sequence[Range], head: peer.PushHead) -> tuple[Range, ...]:
        found = ranges.choose_largest(ranges.merge_ranges(present))
        return () if ranges.find_fault(found, head.used) else tuple(found)

    async def _grow(self, training: Training, shard: Shard, size_bytes: int) -> str:
        """Create larger slots here, because the shard has outgrown its slots at its home.

        Return the reason for a failure, or "".
        """
        number = self._membership.round
        try:
            larger = await self._store.make_shard(shard.training, shard.rank, shard.world, shard.home, size_bytes)
        except NoMemory as exc:
            training.note = str(exc)
            return str(exc)
        if self._membership.round == number:  # else no rank has registered it in the new round
            larger.registered_round, larger.pushed = number, True
            training.page.set_grown(training.page.grown + 1)
            self._trainings.recount(shard.training)
        return ""

    async def _end(self, push: _Push, taken: _Taken, claimed: Committed | None, found: str) -> bool:
        """End a push into a slot, which has no writer any more then. Return whether the copy counts.

        Args:
            push: The push. If bytes are missing, its connections end.
            taken: The slot.
            claimed: The version and its digest, as its home has read it. None if bytes are missing.
            found: Digest of the bytes that have arrived.
        """
        if claimed is None:
            push.stop()
            await push.wait_for_stripes()
        taken.view.release()
        slot = taken.shard.pair.slots[taken.index]
        if slot.state != "filling" or slot.stamp != taken.stamp:
            return False
        if claimed is None:
            self._filling.empty_slot(taken.shard, taken.index)
            return False
        self.bytes += claimed.used_bytes - ranges.count_bytes(taken.present) + taken.again
        counts = self._filling.complete_slot(taken.shard, taken.index, claimed, found)
        if counts and taken.again:
            detail = (
                f"shard of rank {taken.shard.rank}: {taken.again} bytes were damaged on the way, and were sent again"
            )
            self._log("mended", version=taken.stamp.version, detail=detail)
        if taken.filled and found != claimed.digest:
            taken.shard.unlike = f"{local.UNLIKE} rank {taken.shard.rank} has"
            # The home keeps the version and sends the next one whole, so no rank waits for this one.
            self._filling.pass_over(taken.shard, taken.stamp.version)
        return counts


def _check(head: peer.PushHead) -> None:
    """Check the plausibility of a version's header.

    Raises:
        LinkClosed: The version is impossible.
    """
    if not 0 < head.used <= head.bytes or not head.version:
        raise LinkClosed(f"impossible version {head.version}: {head.used} bytes in a slot of {head.bytes}")
