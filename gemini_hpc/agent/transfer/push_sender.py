"""Versions of this node's own shards on their way to other holders: raw bytes, sent directly from the slot.

In a grant page a training rank says how many bytes may go, and until when. One thread of the channel sends them over
the connections with the holder's agent (`stripes`). The other thread reads the acknowledgements.

No bytes are copied or kept here: the kernel sends the slot's own pages. These pages do not change until the holder
has verified the version, or the version is void. The digest sent to the holder is this agent's own, made while the
bytes are sent.

A version travels in these steps:

1. The rank offers it when its slot has all its bytes, and this agent sends `PushHead`.
2. Granted bytes go chunk by chunk. No chunk begins that would arrive after the grant's end. A collective that the
   training launches before then ends the grant.
3. Several chunks may be under way. The holder acknowledges them cumulatively.
4. With the rank's `PushDone` all that is left goes at once, then the digests of the whole and of the pieces.
5. The holder answers `PushVerified`, or asks once for the pieces that differ. Bytes that a rank there has filled, and
   parity, are not asked for again.

The own slot is complete with the rank's `Landed`, after the last holder's acknowledgement.

A version is lost if the channel or a connection ends, or if an acknowledgement is late. Between chunks there is no
limit: TCP probes, and the agents, notice a lost host. The next version dials anew, after a pause where the holder
could not be reached.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any, TypeVar

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import PendingDigest, Shard, Store
from gemini_hpc.agent.transfer import stripes
from gemini_hpc.agent.transfer.rdma import Rdma, RdmaError, Writer
from gemini_hpc.agent.transfer.stripes import Stripes
from gemini_hpc.agent.transfer.threads import run_beside
from gemini_hpc.core import ranges
from gemini_hpc.core.digest import Digest, Pieces
from gemini_hpc.core.ranges import Range
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import HEADER_BYTES, read_moment
from gemini_hpc.wire import grant_page, local, peer, protocol
from gemini_hpc.wire.grant_page import GrantReader, Spell
from gemini_hpc.wire.handshake import HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed
from gemini_hpc.wire.local_server import LocalClient
from gemini_hpc.wire.message import Message

SILENCE_S = 5.0  # a holder that owes an acknowledgement for this long is lost
DIAL_S, ANSWER_S = 2.0, 2.0  # time limits to connect, and for the holder's answer
READ_S = 8.0  # wait for the digest after the last byte; it comes long before, unless the pool gets no processor
_LOOK_S = 0.25  # interval of checks while no acknowledgement arrives
_GRANT_S = 0.02  # interval of looks at the grant page: a call of the rank may miss a thread that falls asleep
_ROOM_S = 0.0005  # least wait for acknowledgements that make room in a grant
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.25, 2.0  # pause after a failed connection, doubled up to the longest
_HASHED_BYTES_S = 1e9  # a holder hashes at least so much a second: one thread reads several GB from memory
_PIECE_BYTES = 1 << 20
_STEP_BYTES = 4 << 20  # on each connection between two looks at the grant page
_MOST_LIST_BYTES = 8 << 20  # digests of the pieces of half a TiB; a frame takes 16 MiB
_Kinds = type[Message] | tuple[type[Message], ...]
T = TypeVar("T")


class PushLost(Exception):
    """A failure after which the current version does not arrive."""


class PushSender:
    """The pushes from this node."""

    def __init__(self, membership: Membership, store: Store, filling: SlotWrites, rdma: Rdma, spawn: Spawn) -> None:
        self.membership, self.store, self.filling, self.rdma = membership, store, filling, rdma
        self._spawn = spawn
        self._channels: dict[tuple[str, int, str], Channel] = {}

    def open(self, client: LocalClient, shard: Shard, host: str) -> list[int]:
        """Return the training rank's end of a new channel, and its grant page.

        An older channel for the same shard and holder ends.
        """
        key = (shard.training, shard.rank, host)
        if (older := self._channels.get(key)) is not None:
            older.stop()
        page = grant_page.make()
        own_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = self._channels[key] = Channel(self, client, shard, host, own_end, GrantReader(page))
        self._spawn(self._carry(key, channel))
        return [theirs.detach(), page]

    async def _carry(self, key: tuple[str, int, str], channel: Channel) -> None:
        try:
            await run_beside(f"gemini-push-{channel.rank}", channel.run)
        finally:
            if self._channels.get(key) is channel:
                del self._channels[key]

    def stop_channels(self, client: LocalClient) -> None:
        """Stop the channels of a training rank whose connection has ended."""
        for channel in self._channels.values():
            if channel.client is client:
                channel.stop()

    def stop(self) -> None:
        """Stop all channels, at a new round or at the end. Wait for the end with `wait_stopped`."""
        for channel in self._channels.values():
            channel.stop()

    async def wait_stopped(self) -> None:
        """Return when no channel sends any more."""
        while self._channels:
            self.stop()
            await asyncio.sleep(0.002)


class Channel:
    """The channel of one shard to one holder."""

    def __init__(
        self,
        sender: PushSender,
        client: LocalClient,
        shard: Shard,
        host: str,
        sock: socket.socket,
        page: GrantReader,
    ) -> None:
        self._membership, self._store = sender.membership, sender.store
        self._filling, self._rdma = sender.filling, sender.rdma
        self._loop = asyncio.get_running_loop()
        self.client, self.training, self.rank, self.host = client, shard.training, shard.rank, host
        self._sock, self._page = sock, page
        self._lock = threading.Lock()  # guards the fields from here to _stopped
        self._link: Stripes | None = None  # None also after its reader has seen its end
        self._on_loop: Future[Any] | None = None  # the call that the thread waits for
        self._awaited: deque[_Kinds] = deque()
        self._taken = False  # the holder waits for the version, of which `_total` bytes have to go
        self._total = 0
        self._sent = self._arrived = 0  # bytes of the version
        self._spell_from, self._spell_at = 0, 0.0  # first byte in flight, and when it was sent
        self._progress = 0.0
        self._stopped = False
        self._reader: tuple[threading.Thread, Stripes] | None = None
        self._file: FileIO | None = None  # the slot
        self._used = self._offset = 0
        self._reading: PendingDigest | None = None  # of the whole slot
        self._part: Digest | None = None  # digest of the bytes sent, if the holder wants only a part of the shard
        self._there: deque[Range] = deque()  # ranges that the holder has, still to be skipped
        self._pause_s, self._not_before = _LEAST_PAUSE_S, 0.0
        self._is_offered = self._is_tried = False  # RDMA, by the holder of these connections
        self._writer: Writer | None = None  # of the version, if it may go by RDMA
        self._hashing_s = 0.0  # what the holder hashes only when all bytes have been written takes so long at most

    def stop(self) -> None:
        """Stop the channel, from any thread. A version on its way is lost."""
        with self._lock:
            self._stopped = True
            if self._link is not None:
                self._link.shut()
            if self._on_loop is not None:
                self._on_loop.cancel()
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _reply(self, message: local.Message) -> None:
        with suppress(OSError):  # the rank has gone or does not read; the answer is dropped
            self._sock.send(local.encode(message), socket.MSG_DONTWAIT)

    # ---- from the channel to the connection ------------------------------------------------------------

    def run(self) -> None:
        """Carry versions until the training rank closes the channel, or a version is lost."""
        try:
            while data := self._receive_request():
                request = local.push_decoder.decode(data)
                if isinstance(request, local.PushOffer):
                    self._offer(request)
                elif isinstance(request, local.PushDone):
                    self._finish_version()
        except (PushLost, LinkClosed, OSError, msgspec.MsgspecError) as exc:
            self._fail(f"{self.host}: {exc}")
        finally:
            self.stop()
            self._forget_link()
            self._forget_writer()
            self._forget_slot()
            self._sock.close()
            self._page.close()

    def _receive_request(self) -> bytes:
        """Return the rank's next message; b"" at the end. What the rank grants is sent before."""
        while True:
            try:
                self._page.publish_asleep(True)  # before the look: a grant that comes behind it is called
                pause_s = self._send_granted()
                self._sock.settimeout(pause_s)
                return self._sock.recv(local.MAX_PACKET_BYTES)
            except TimeoutError:
                continue
            finally:
                self._page.publish_asleep(False)

    def _send_granted(self) -> float | None:
        """Send what may go now. Return the seconds until the next look at the grant; None: no bytes are left."""
        while self._count_left():
            grant, now = self._page.grant(self._total), clock.monotonic()
            with self._lock:
                in_flight = self._sent - self._arrived
            room = grant.compute_room(self._sent, in_flight, now)
            if not room:
                crowded = in_flight > 0 and grant.rate > 0 and grant.until > self._sent and grant.before > now
                return min(_GRANT_S, max(_ROOM_S, in_flight / grant.rate)) if crowded else _GRANT_S
            self._page.publish_asleep(False)
            self._send(room)
            self._page.publish_asleep(True)
        return None

    def _count_left(self) -> int:
        """Return how many bytes of the version have to go yet."""
        return max(0, self._total - self._sent)

    def _offer(self, m: local.PushOffer) -> None:
        with self._lock:
            if self._sent != self._arrived:
                raise PushLost("the rank has not waited for its bytes")
            self._taken, self._total, self._sent, self._arrived = False, 0, 0, 0
            self._page.publish_progress(0, 0)
        self._forget_writer()
        self._forget_slot()
        self._used = self._offset = 0
        self._hashing_s = 0.0
        self._part = self._reading = None
        self._there.clear()
        with self._lock:
            if self._stopped:
                raise PushLost("the transfer was stopped")
            if self._link is not None and not self._awaited and self._link.lead.find_ready(self._link.links, 0):
                self._link = None  # only its end can arrive, which the reader is about to see
        try:
            head, self._file, memory, self._reading, links = self._wait_for(self._prepare(m))
        except PushLost as exc:
            if self._stopped:
                raise
            self._reply(local.Refused(f"{self.host}: {exc}"))
            return
        if links:
            self._use_links(links)
        if self._is_tried and (writer := self._rdma.open_writer(memory)) is not None:
            self._writer, head = writer, msgspec.structs.replace(head, pair=writer.pair)
        self._used = head.used
        link = self._expect(peer.PushAnswer)
        link.restart_counts()
        link.lead.send(head)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and wait for its result.

        Raises:
            PushLost: The channel has been stopped.
        """
        with self._lock:
            if self._stopped:
                work.close()
                raise PushLost("the transfer was stopped")
            self._on_loop = awaited = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return awaited.result()
        except CancelledError:
            raise PushLost("the transfer was stopped") from None

    def _send(self, most: int) -> None:
        """Send the next bytes of the version: at most so many, and no more than one step."""
        self._pass_over()
        link = self._link
        step = _STEP_BYTES * (len(link.links) if link is not None else 1)
        length = min(most, step, (self._there[0][0] if self._there else self._used) - self._offset)
        link = self._expect(length)
        assert self._file is not None
        if self._writer is not None and self._writer.is_connected:
            self._write(self._writer, length)
        else:
            link.send(self._file, self._offset, length)
        if self._part is not None:  # the slot's pages do not change meanwhile
            for at in range(self._offset, self._offset + length, _PIECE_BYTES):
                self._part.update(os.pread(self._file.fileno(), min(_PIECE_BYTES, self._offset + length - at), at))
        self._offset += length

    def _write(self, writer: Writer, length: int) -> None:
        """Write the next bytes into the holder's slot, and wait until they are there."""
        with self._rest_on_failure():
            writer.write(self._offset, length, self._check_wanted)
        self._hashing_s = self._used / _HASHED_BYTES_S
        self._acknowledge(self._sent)

    @contextmanager
    def _rest_on_failure(self) -> Iterator[None]:
        """Leave the holder to TCP after a failure of RDMA.

        Raises:
            PushLost: RDMA has failed.
        """
        try:
            yield
        except RdmaError as exc:
            self._rdma.rest(self.host, str(exc))
            raise PushLost(str(exc)) from None

    def _check_wanted(self) -> None:
        with self._lock:
            if self._stopped or self._link is None:
                raise PushLost("the transfer was stopped")

    def _forget_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _pass_over(self) -> None:
        """Skip the ranges that the holder has already."""
        while self._there and self._offset == self._there[0][0]:
            self._offset = self._there.popleft()[1]

    def _finish_version(self) -> None:
        link = self._link
        if link is None or self._file is None or self._reading is None or not self._taken:
            raise PushLost("the rank ended a version that the holder has not accepted")
        while left := self._count_left():
            self._send(left)
        link.wait_acknowledged()
        digest, pieces = self._wait_for(self._await_digest(self._reading.found)), self._reading.pieces
        mark = read_moment(os.pread(self._file.fileno(), HEADER_BYTES, 0)).mark
        part = self._part.to_hex() if self._part is not None else ""
        known = b"" if part or len(pieces.found) > _MOST_LIST_BYTES else pieces.found
        done = peer.PushDone(digest, part, mark, known)
        self._forget_writer()
        link = self._expect((peer.PushVerified, peer.PushAgain))
        link.lead.send(done)
        answer = link.wait_for_answer()
        if isinstance(answer, peer.PushAgain):
            self._send_again(answer.pieces, pieces)
            link.lead.send(done)
            link.wait_for_answer()
        with self._lock:
            self._taken = False
        self._reply(local.Ok())
        self._forget_slot()
        self._used = self._offset = 0

    def _send_again(self, numbers: Sequence[int], pieces: Pieces) -> None:
        """Send the pieces that differ at the holder. They are few, so they do not wait for the training.

        Raises:
            PushLost: There are no such pieces.
        """
        if list(numbers) != sorted(set(numbers)) or numbers[-1] >= pieces.count:
            raise PushLost("the rank asks for pieces that do not exist")
        link = self._expect(peer.PushVerified)
        assert self._file is not None
        for number in numbers:
            for _, start, end in pieces.enumerate_bounds(number, number + 1):
                link.send(self._file, start, end - start)
        link.wait_acknowledged()

    def _expect(self, awaited: _Kinds | int) -> Stripes:
        """Return the connections, on which a message or bytes now go.

        Args:
            awaited: The possible answers to the message, or the number of bytes.
        """
        with self._lock:
            link = self._link
            if link is None or self._stopped:
                raise PushLost("the connection has ended")
            now = clock.monotonic()
            if not self._awaited and self._sent == self._arrived:
                self._progress = now
                self._spell_from, self._spell_at = self._sent, now
            if isinstance(awaited, int):
                self._sent += awaited
                self._page.publish_progress(self._sent, self._arrived)
            else:
                self._awaited.append(awaited)
        return link

    def _forget_slot(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _forget_link(self) -> None:
        if self._reader is not None:
            thread, link = self._reader
            link.shut()
            thread.join()  # before its descriptors are closed
            link.close()
            self._reader = None

    def _fail(self, reason: str) -> None:
        with self._lock:
            if not self._stopped:
                self._reply(local.Error(reason[:500]))
        self.stop()

    # ---- on the loop, for the thread -------------------------------------------------------------------

    @staticmethod
    async def _await_digest(reading: asyncio.Future[str]) -> str:
        """Return the slot's digest.

        Raises:
            PushLost: The digest is not ready within `READ_S` seconds.
        """
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.shield(reading)
        except TimeoutError:
            raise PushLost(f"its bytes have not been read within {READ_S:g} s") from None

    async def _prepare(
        self, m: local.PushOffer
    ) -> tuple[peer.PushHead, FileIO, Memfd, PendingDigest, list[BlockingLink]]:
        """Return the offer, its slot (twice), the reading of its bytes, and new connections if there were none.

        Raises:
            PushLost: The version cannot be sent, or the holder cannot be reached.
        """
        shard, incarnation = self._store.get(self.training, self.rank), self._membership.training
        if shard is None or incarnation is None:
            raise PushLost("no training of the job runs on this node now")
        epoch = self._membership.epoch
        index = shard.pair.find_slot(Stamp(epoch, m.version))
        if index is None or shard.pair.slots[index].state != "filling" or not 0 < m.used <= shard.bytes:
            raise PushLost(f"this node is not filling version {m.version} of {m.used} bytes")
        if reason := ranges.find_fault(m.kept, m.used):
            raise PushLost(reason)
        if self.host in incarnation.mesh.dead:
            raise PushLost("the node is dead")
        head = peer.PushHead(m.version, m.used, shard.bytes, m.base, m.kept)
        links: list[BlockingLink] = []
        slot = FileIO(shard.memory[index].open_read_only())  # closed with its last reference
        try:
            reading = self._filling.read(shard, index, m.used)
        except ValueError as exc:
            raise PushLost(str(exc)) from None
        if self._link is None:
            ask = peer.PushAsk(self.training, self.rank, epoch, incarnation.rounds.round)
            links = await self._dial(incarnation.mesh, ask)
        return head, slot, shard.memory[index], reading, links

    async def _dial(self, mesh: Mesh, ask: peer.PushAsk) -> list[BlockingLink]:
        """Return the leading connection and the other ones.

        Raises:
            PushLost: One of them cannot be made, or is refused.
        """
        if clock.monotonic() < self._not_before:
            raise PushLost("the node could not be reached a moment ago")
        self._not_before = clock.monotonic() + DIAL_S + ANSWER_S + self._pause_s
        links: dict[int, BlockingLink] = {}
        try:
            answer = await self._join(mesh, ask, links, 0)
            self._is_offered = answer.rdma is True
            count = min(answer.stripes, stripes.compute_share(sum(not shard.pushed for shard in self._store)))
            asks = {k: peer.PushStripe(self.training, self.rank, answer.push, k) for k in range(1, count)}
            async with asyncio.TaskGroup() as joining:  # none of them goes on after a failure
                for k, more in asks.items():
                    joining.create_task(self._join(mesh, more, links, k))
        except BaseException as exc:
            for link in links.values():
                link.close()
            first = exc.exceptions[0] if isinstance(exc, BaseExceptionGroup) else exc
            if not isinstance(first, (OSError, TimeoutError, HandshakeError, LinkClosed, PushLost)):
                raise
            self._not_before = clock.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
            raise PushLost(str(first) or type(first).__name__) from None
        self._pause_s, self._not_before = _LEAST_PAUSE_S, 0.0
        return [links[number] for number in sorted(links)]

    async def _join(
        self, mesh: Mesh, ask: peer.PushAsk | peer.PushStripe, links: dict[int, BlockingLink], number: int
    ) -> peer.PushAnswer:
        """Add a connection to `links`. Return the holder's answer.

        Raises:
            OSError: The holder cannot be reached.
            TimeoutError: It does not answer.
            HandshakeError: It refuses the connection, or does not authenticate.
            LinkClosed: It closes the connection.
            PushLost: It refuses the push.
        """
        link = await mesh.dial(self.host, "push", DIAL_S)
        try:
            async with asyncio.timeout(ANSWER_S):
                link.send(ask)
                answer = await link.receive()
            if not isinstance(answer, peer.PushAnswer) or answer.reason:
                raise PushLost(answer.reason if isinstance(answer, peer.PushAnswer) else "unexpected answer")
            links[number] = await link.block()
        except BaseException:
            link.abort()
            raise
        return answer

    # ---- from the connection to the channel ------------------------------------------------------------

    def _use_links(self, links: list[BlockingLink]) -> None:
        self._forget_link()
        for one in links:
            one.limit_silence(SILENCE_S)
        link = Stripes(links, f"gemini-push-{self.rank}")
        thread = threading.Thread(target=self._read, args=(link,), name=f"gemini-acks-{self.rank}", daemon=True)
        with self._lock:
            self._link = link  # `stop` ends it from here on
            self._awaited.clear()
        try:
            self._is_tried = self._is_offered and self._rdma.try_holder(link.lead, self.host)
        except BaseException:
            link.close()
            raise
        self._reader = thread, link
        thread.start()

    def _read(self, link: Stripes) -> None:
        reason = ""
        try:
            while True:
                if not (ready := link.lead.find_ready(link.links, _LOOK_S)):
                    self._check_holder()
                for one in ready:
                    message = one.receive_any()
                    if isinstance(message, peer.PushAck):
                        self._acknowledge(link.record_acknowledged(one, message.arrived))
                    elif one is link.lead:
                        self._answer(message, link)
                    else:
                        raise PushLost(f"unexpected message {type(message).__name__}")
        except (PushLost, LinkClosed, OSError) as exc:
            reason = link.failure = link.failure or str(exc)
        link.shut()  # unblock a sender that waits for the silent other end
        with self._lock:
            self._link = None  # the next version gets a new link
            lost = bool(self._awaited or self._taken or self._sent != self._arrived)
        if lost:
            self._fail(f"{self.host}: {reason}")

    def _answer(self, message: protocol.AnyMessage, link: Stripes) -> None:
        """Pass the holder's answer to the rank, or to the thread that sends.

        Raises:
            PushLost: No such answer is awaited.
        """
        with self._lock:
            wanted = self._awaited.popleft() if self._awaited and self._sent == self._arrived else None
            self._progress = clock.monotonic()
        if wanted is None or not isinstance(message, wanted):
            raise PushLost(f"unexpected message {type(message).__name__}")
        if isinstance(message, (peer.PushVerified, peer.PushAgain)):
            link.deliver_answer(message)
        elif isinstance(message, peer.PushAnswer) and message.reason:
            self._reply(local.Refused(f"{self.host}: {message.reason}"))
        elif isinstance(message, peer.PushAnswer):
            with self._lock:
                self._taken = True  # from here on the rank learns of a failure
            if reason := ranges.find_fault(message.present, self._used):
                raise PushLost(reason)
            if isinstance(message.window, peer.WriteWindow):
                if self._writer is None:
                    raise PushLost("the holder sent an RDMA window without a request")
                with self._rest_on_failure():
                    self._writer.connect(message.window)
            self._part = Digest() if message.part else None
            self._there.extend(message.present)
            with self._lock:
                self._total = self._used - ranges.count_bytes(message.present)  # the sending thread waits for this
            self._reply(local.PresentRanges(message.present) if message.present or message.part else local.Ok())

    def _acknowledge(self, arrived: int) -> None:
        """Tell the rank that so many bytes of the version have arrived, and when."""
        with self._lock:
            self._progress = now = clock.monotonic()
            # pieces that are sent again do not count
            self._arrived = max(self._arrived, min(arrived, self._sent))
            self._page.publish_progress(self._sent, self._arrived)
            if self._arrived == self._sent > self._spell_from:
                self._page.add(Spell(self._sent - self._spell_from, self._spell_at, now))
                self._spell_from = self._sent

    def _check_holder(self) -> None:
        """Check that the holder may still answer.

        Raises:
            PushLost: Waiting is useless: the channel is stopped, the holder is dead, or it does not acknowledge.
        """
        incarnation = self._membership.incarnation
        with self._lock:
            if self._stopped:
                raise PushLost("the transfer was stopped")
            if not self._awaited and self._sent == self._arrived:
                return
            silent_s = clock.monotonic() - self._progress
        if incarnation is None or self.host in incarnation.mesh.dead:
            raise PushLost("the node is dead")
        if silent_s > SILENCE_S + self._hashing_s:
            raise PushLost(f"no acknowledgement for {SILENCE_S + self._hashing_s:g} s")
