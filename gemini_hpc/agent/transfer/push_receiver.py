"""Versions that the agents of other nodes push here: raw bytes, received directly into the slot.

Each shard has one connection and one thread. A push is trusted like a trainer. The other end of the connection must
be the agent of the shard's home in this incarnation, epoch and round. The slot is assigned by the same rules (R1).
The copy counts when its digest has been verified (R5). Any other message ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
from gemini_hpc.agent.transfer.part_receiver import Part, PartReceiver
from gemini_hpc.agent.transfer.threads import beside
from gemini_hpc.core import ranges
from gemini_hpc.core.digest import PIECE_BYTES, Pieces, is_digest
from gemini_hpc.core.moments import UNKNOWN
from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Refused, Slot, Stamp
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.link import BlockingLink, Link, LinkClosed

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
    there: tuple[Range, ...] = ()  # these bytes need not be sent
    filled: bool = False  # a rank here has filled some of them


@dataclass(eq=False)
class _Push:
    """A connection that pushes one shard."""

    ask: peer.PushAsk
    host: str
    link: BlockingLink | None = None
    stopped: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        self.stopped = True
        if self.link is not None:
            self.link.shut()


class PushReceiver:
    """The pushes to this node."""

    def __init__(self, membership: Membership, sets: Trainings, store: Store, filling: SlotWrites, log: Log) -> None:
        self._membership, self._sets, self._store = membership, sets, store
        self._filling, self._log = filling, log
        self._pool = store.pool
        self._parts = PartReceiver(membership, sets, store, filling, log)
        self._pushes: dict[Key, _Push] = {}
        self.bytes = 0

    def tend(self) -> None:
        """Abandon parity that will not become whole. Called now and then."""
        self._parts.tend()

    def stop(self) -> None:
        """Stop accepting bytes of the old epoch. Wait for the end with `ended`."""
        for push in self._pushes.values():
            push.stop()

    async def ended(self) -> None:
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
        if not isinstance(ask, peer.PushAsk):
            raise LinkClosed(f"wanted PushAsk, got {type(ask).__name__}")
        push = _Push(ask, link.session.peer_host)
        key, reason = (ask.set, ask.rank), self._refusal(push)
        while not reason and (older := self._pushes.get(key)) is not None:
            older.stop()
            await older.over.wait()
            reason = self._refusal(push)
        if reason:
            await link.flush(peer.PushAnswer(reason))
            raise LinkClosed(f"push of shard {ask.rank} from {push.host} refused: {reason}")
        self._pushes[key] = push
        try:
            push.link = await link.block(peer.PushAnswer())
            push.link.bound(SILENCE_S)
            if push.stopped:
                raise LinkClosed("cancelled by a new recovery round")
            loop = asyncio.get_running_loop()
            await beside(f"gemini-pushed-{ask.rank}", lambda: self._receive(push, loop))
        finally:
            if push.link is not None:
                push.link.close()
            del self._pushes[key]
            push.over.set()

    def _refusal(self, push: _Push) -> str:
        """Return why no bytes are accepted from this push now, or "" if they are."""
        ask, here, incarnation = push.ask, self._membership, self._membership.training
        training, shard = self._sets.get(ask.set), self._store.get(ask.set, ask.rank)
        if push.stopped or incarnation is None or training is None:
            return "this node has no part in a running training"
        if ask.epoch != here.epoch or ask.round != here.round:
            return f"this node is at epoch {here.epoch}, round {here.round}"
        if self._parts.expects(ask):
            return self._parts.refusal(ask, push.host)
        if shard is None or shard.registered_round != here.round or shard.half_back:
            return f"shard of rank {ask.rank} is not registered here"
        if not shard.pushed:
            return f"a process of this node fills the shard of rank {ask.rank}"
        if here.noderanks.get(push.host) != shard.home:
            return f"node rank {shard.home} is the home of the shard of rank {ask.rank}"
        return ""

    # ---- in the push's thread --------------------------------------------------------------------------

    def _receive(self, push: _Push, loop: asyncio.AbstractEventLoop) -> None:
        """Receive versions until the other end has no more.

        Raises:
            LinkClosed: The sender violates the protocol or closes the connection.
            OSError: The connection fails.
        """

        def on_loop(work: Coroutine[Any, Any, T]) -> T:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        link = push.link
        assert link is not None
        while True:
            link.wait(None)
            if not link.sock.recv(1, socket.MSG_PEEK):
                return
            head = link.receive(peer.PushHead)
            if self._parts.expects(push.ask):
                self._receive_part(push, link, head, on_loop)
                continue
            taken = on_loop(self._begin(push, head))
            if isinstance(taken, str):
                link.send(peer.PushAnswer(taken))
                continue
            claimed: Committed | None = None
            found, counts = "", False
            try:
                link.send(peer.PushAnswer(there=taken.there))
                found = self._fill(link, taken, head.used)
                link.wait(None)
                digest = link.receive(peer.PushDone).digest
                if not is_digest(digest):
                    raise LinkClosed("not a digest")
                claimed = Committed(taken.stamp, head.used, digest)
            finally:
                taken.view.release()
                counts = on_loop(self._end(taken, claimed, found))
            if not counts and not taken.filled:  # the home must abort it too, or no newer version would be pushed
                raise LinkClosed("the digest differs")
            link.send(peer.PushAck(head.used))

    def _receive_part(self, push: _Push, link: BlockingLink, head: peer.PushHead, on_loop: _OnLoop) -> None:
        part = on_loop(self._begin_part(push, head))
        if isinstance(part, str):
            link.send(peer.PushAnswer(part))
            return
        digest, claimed, found, mark = "", "", "", UNKNOWN
        try:
            start, end = part.wanted
            rest = ((0, start), (end, head.used))
            link.send(peer.PushAnswer(there=tuple((a, b) for a, b in rest if a < b), part=True))
            found = self._parts.take(link, part, SILENCE_S)
            link.wait(None)
            done = link.receive(peer.PushDone)
            if not is_digest(done.digest) or not is_digest(done.part):
                raise LinkClosed("not a digest")
            digest, claimed, mark = done.digest, done.part, done.mark
        finally:
            self.bytes += on_loop(self._parts.end(part, digest, claimed, found, mark))
        link.send(peer.PushAck(head.used))

    def _fill(self, link: BlockingLink, taken: _Taken, used: int) -> str:
        """Receive the slot's missing bytes. Return the digest of all bytes in the slot.

        Arriving bytes are hashed at once, while they are in the processor's cache; the training is mostly not on the
        network then. The pool hashes the bytes that are present already. No other writer gets the slot meanwhile.
        """
        end, view, pieces = 0, taken.view, Pieces(used)
        memory, stays = taken.shard.memory[taken.index], deque(taken.there)
        there = [pieces.whole(*stay) for stay in stays]
        beside = [
            self._pool.hash(memory, pieces, *them, urgency=Urgency.ARRIVING) for them in there if them[0] < them[1]
        ]
        while True:
            while stays and end == stays[0][0]:
                _pass_over(view, pieces, *stays[0])
                end = stays.popleft()[1]
            if end >= used:
                break
            link.wait(None)  # a chunk is sent only when the training leaves bandwidth for it
            chunk = link.receive(peer.PushChunk)
            if chunk.offset != end or not 0 < chunk.length <= (stays[0][0] if stays else used) - end:
                raise LinkClosed(f"a chunk of {chunk.length} bytes at {chunk.offset}, after {end} of {used} bytes")
            with view[end : end + chunk.length] as part:
                link.fill(part, SILENCE_S, pieces.update)
            end += chunk.length
            link.send(peer.PushAck(end))
        for reading in beside:
            try:
                reading.result()
            except CancelledError:
                raise LinkClosed("this agent ends") from None
        return pieces.hexdigest()

    # ---- on the loop, for the thread -------------------------------------------------------------------

    async def _begin_part(self, push: _Push, head: peer.PushHead) -> Part | str:
        _check(head)
        return self._refusal(push) or await self._parts.begin(push.ask, push.host, head)

    async def _begin(self, push: _Push, head: peer.PushHead) -> _Taken | str:
        """Return a slot for this version, or the reason why there is none.

        Raises:
            LinkClosed: The version is impossible.
        """
        ask = push.ask
        _check(head)
        if reason := ranges.fault(head.kept, head.used):
            raise LinkClosed(reason)
        deadline = clock.monotonic() + SEAL_WAIT_S
        while True:
            if reason := self._refusal(push):
                return reason
            training, shard = self._sets.get(ask.set), self._store.get(ask.set, ask.rank)
            assert training is not None and shard is not None
            if head.bytes != shard.bytes:
                if reason := await self._grow(training, shard, head.bytes):
                    break
                continue
            fill = await replica_fills.awaited(shard, head.version)
            if isinstance(fill, str):
                reason = fill
                break
            if reason := self._refusal(push):
                return reason
            if fill is not None and self._store.get(ask.set, ask.rank) is shard:
                shard.pair.slots[fill.index].busy = True
                # a failed fill may have overwritten kept bytes
                have = [*fill.there, *self._kept(head, fill.before)] if fill.there else []
                view = shard.memory[fill.index].view()
                return _Taken(shard, fill.index, fill.stamp, view, self._within(have, head), bool(fill.there))
            before = list(shard.pair.slots)
            try:
                index = self._filling.begin_write(training, shard, head.version)
            except Refused as exc:
                reason, sealed = exc.reason, training.sealed or Stamp(0, 0)
                undecided = any(
                    s.busy or (s.state == "complete" and s.stamp is not None and s.stamp > sealed)
                    for s in shard.pair.slots
                )
                degraded = training.sealing is None or training.sealing.degraded
                if not undecided or degraded or clock.monotonic() > deadline:
                    break
                await asyncio.sleep(_RETRY_S)
                continue
            shard.pair.slots[index].busy = True
            there = self._within(self._kept(head, before[index]), head)
            return _Taken(
                shard, index, Stamp(self._membership.epoch, head.version), shard.memory[index].view(), there
            )
        self._log("skipped", version=head.version, detail=f"shard of rank {ask.rank}: {reason}")
        return reason

    def _kept(self, head: peer.PushHead, before: Slot) -> Sequence[Range]:
        """Return the ranges of this version that the slot already contained before it was assigned."""
        had = before.state == "complete" and before.stamp == Stamp(self._membership.epoch, head.base)
        return head.kept if had and head.kept and head.kept[-1][1] <= before.bytes_used else ()

    @staticmethod
    def _within(there: Sequence[Range], head: peer.PushHead) -> tuple[Range, ...]:
        found = ranges.largest(ranges.merged(there))
        return () if ranges.fault(found, head.used) else tuple(found)

    async def _grow(self, training: Training, shard: Shard, size_bytes: int) -> str:
        """Create larger slots here, because the shard has outgrown its slots at its home.

        Return the reason for a failure, or "".
        """
        number = self._membership.round
        try:
            larger = await self._store.make(shard.set, shard.rank, shard.world, shard.home, size_bytes)
        except NoMemory as exc:
            training.note = str(exc)
            return str(exc)
        if self._membership.round == number:  # else no rank has registered it in the new round
            larger.registered_round, larger.pushed = number, True
            training.page.set_grown(training.page.grown + 1)
            self._sets.recount(shard.set)
        return ""

    async def _end(self, taken: _Taken, claimed: Committed | None, found: str) -> bool:
        """End a push into a slot that has no writer any more. Return whether the copy counts.

        Args:
            taken: The slot.
            claimed: The version and its digest, as its home has read it. None if bytes are missing.
            found: Digest of the bytes that have arrived.
        """
        slot = taken.shard.pair.slots[taken.index]
        if slot.state != "filling" or slot.stamp != taken.stamp:
            return False
        if claimed is None:
            self._filling.void(taken.shard, taken.index)
            return False
        self.bytes += claimed.used_bytes - ranges.size(taken.there)
        counts = self._filling.arrived(taken.shard, taken.index, claimed, found)
        if taken.filled and found != claimed.digest:
            taken.shard.unlike = f"{local.UNLIKE} rank {taken.shard.rank} has"
            # The home keeps the version and sends the next one whole, so no rank waits for this one.
            self._filling.passed(taken.shard, taken.stamp.version)
        return counts


def _pass_over(view: memoryview, pieces: Pieces, start: int, end: int) -> None:
    """Move the digest past bytes that are present already. Bytes outside whole pieces are hashed here."""
    first, last = pieces.whole(start, end)
    if first == last:
        with view[start:end] as part:
            pieces.update(part)
        return
    with view[start : first * PIECE_BYTES] as head, view[min(end, last * PIECE_BYTES) : end] as tail:
        pieces.update(head)
        pieces.pass_to(last)
        pieces.update(tail)


def _check(head: peer.PushHead) -> None:
    """Check the plausibility of a version's header.

    Raises:
        LinkClosed: The version is impossible.
    """
    if not 0 < head.used <= head.bytes or not head.version:
        raise LinkClosed(f"impossible version {head.version}: {head.used} bytes in a slot of {head.bytes}")
