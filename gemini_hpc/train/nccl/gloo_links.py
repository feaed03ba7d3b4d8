"""Links over gloo's point-to-point operations, for the data that do not go from GPU to GPU.

The links have process groups of their own. gloo keeps one connection for each pair of ranks and group, and messages
on one connection wait for each other. This includes acknowledgements, and gloo's notice that a receive was posted,
without which the other end sends no chunk. Between two ranks that hold each other's copies, these messages would wait
behind whole bursts of chunks.

Chunks to a higher rank therefore use one group, and chunks to a lower rank another. In each connection only small
messages go against the chunks.

Messages are tagged, and ordered for each rank and tag. A receiving end that gives up sends a notice in place of an
answer. Both ends therefore learn of a broken link, whichever of them found the fault.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections import deque
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from gemini_hpc.train.state.collectives import build_own_group
from gemini_hpc.train.transport.base import Head, LinkBroken, Outbox

MAX_CHUNKS = 1 << 20
AHEAD = 8  # receives of chunks posted at a time

_HEAD = struct.Struct("<8sQQQQQQQ")
_NUMBER = struct.Struct("<Q")
_MAGIC = b"GEMCHNK\x03"
_BYE, _VERSION = 0, 1
_NO, _YES, _GIVEN_UP = b"\x00", b"\x01", b"\x02"
_HEAD_TAG, _SIZES_TAG, _ANSWER_TAG, _CHUNK_TAG, _ACK_TAG, _DIGEST_TAG = range(1, 7)
REPLIES = frozenset((_ANSWER_TAG, _ACK_TAG))  # tags of the messages from an inbox to its outbox


def _find_sockets() -> dict[int, int]:
    """Return descriptor -> inode of all sockets of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _describe_error(error: RuntimeError) -> str:
    return str(error).split(". This is typically")[0]


class Message:
    """A message being sent or received."""

    def __init__(self, links: GlooLinks, work: dist.Work, keep: torch.Tensor) -> None:
        self._links, self._work, self._keep = links, work, keep

    def wait(self) -> None:
        """Wait until the message has arrived (receiving) or its memory may be changed (sending).

        Raises:
            LinkBroken: If the message fails.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkBroken(_describe_error(error)) from None

    def abandon(self) -> None:
        """Keep the message's memory alive for as long as gloo may use it.

        gloo cannot cancel a message, and a connection on which a half-sent message is destroyed carries no others.
        Hence the work is kept as it is. Of receives, only those of acknowledgements can be left while the connection
        lives.
        """
        if not self._links.interrupted:
            self._links.abandoned.append(self)


class _OnLink:
    """A message that breaks its link when it fails, and fails when its link is broken."""

    def __init__(self, link: _Link, message: Message, tensor: torch.Tensor) -> None:
        self._link, self._message, self._tensor = link, message, tensor

    def wait(self) -> None:
        self._link.check()
        try:
            self._message.wait()
        except LinkBroken as error:
            raise self._link.break_off(str(error)) from None
        self._link.under_way.discard(self._message)

    def read_bytes(self) -> bytes:
        return self._tensor.numpy().tobytes()


class _Link:
    def __init__(self, links: GlooLinks, rank: int) -> None:
        self._links, self._rank = links, rank
        self._broken = ""
        self.under_way: set[Message] = set()

    def check(self) -> None:
        """Check that the link works.

        Raises:
            LinkBroken: If the link is broken.
        """
        if self._broken:
            raise LinkBroken(self._broken)

    def break_off(self, reason: str) -> LinkBroken:
        """Break the link: every later call fails, and no message's memory is written to any more."""
        self._broken = self._broken or reason
        while self.under_way:
            self.under_way.pop().abandon()
        return LinkBroken(self._broken)

    def start(self, sending: bool, tensor: torch.Tensor, tag: int) -> _OnLink:
        if self._links.interrupted:
            raise self.break_off("interrupted")
        self.check()
        try:
            message = self._links.begin_transfer(sending, self._rank, tensor, tag)
        except LinkBroken as error:
            raise self.break_off(str(error)) from None
        self.under_way.add(message)
        if self._broken:  # broken by another thread meanwhile
            raise self.break_off(self._broken)
        return _OnLink(self, message, tensor)

    def send_bytes(self, data: bytes, tag: int) -> _OnLink:
        return self.start(True, torch.frombuffer(bytearray(data), dtype=torch.uint8), tag)

    def receive_bytes(self, count: int, tag: int) -> bytes:
        message = self.start(False, torch.empty(count, dtype=torch.uint8, device="cpu"), tag)
        message.wait()
        return message.read_bytes()


class Sent:
    """A sent chunk whose acknowledgement is awaited."""

    def __init__(self, link: _Link, sent: _OnLink, ack: _OnLink, number: int) -> None:
        self._link, self._sent, self._ack, self._number = link, sent, ack, number

    def wait(self) -> None:
        """Wait until the chunk has arrived: the network is free and the chunk's memory may be changed.

        Raises:
            LinkBroken: The link broke.
        """
        self._ack.wait()
        (number,) = _NUMBER.unpack(self._ack.read_bytes())
        if number != self._number:
            raise self._link.break_off(f"chunk {self._number} was acknowledged as {number}")
        self._sent.wait()


class MessageOutbox(_Link, Outbox):
    """The sending end of a link to one rank, see Outbox. `sizes` are those of the offered version's chunks.

    `send` raises ValueError for a chunk whose size differs from the head's. gloo would end the process at the other
    end, which gets more bytes than it asked for.
    """

    sizes: tuple[int, ...] = ()
    _next = 0

    def offer(self, head: Head) -> bool:
        """Offer a version to the other end. Return whether it is accepted."""
        sizes = struct.pack(f"<{len(head.sizes)}Q", *head.sizes)
        packed = _HEAD.pack(
            _MAGIC, _VERSION, head.version, head.used_bytes, head.total_bytes, len(head.sizes), *head.apart
        )
        self.send_bytes(packed, _HEAD_TAG).wait()
        announced = self.send_bytes(sizes, _SIZES_TAG) if sizes else None
        answer = self.receive_bytes(1, _ANSWER_TAG)
        if answer not in (_NO, _YES):
            raise self.break_off(
                "the other rank has ended the transfer" if answer == _GIVEN_UP else f"{answer!r} is an unknown answer"
            )
        if announced:
            announced.wait()
        self.sizes, self._next = head.sizes, 0
        return answer == _YES

    def send(self, chunk: torch.Tensor) -> Sent:
        """Send the next chunk of the offered version.

        The chunk must not change until the result's `wait` has returned. Several chunks may be under way; they are
        waited for in order.

        Raises:
            ValueError: If the chunk's size is not the announced one.
        """
        k = self._next
        if k >= len(self.sizes) or chunk.numel() != self.sizes[k]:
            announced = f"of {self.sizes[k]} bytes" if k < len(self.sizes) else "none more"
            raise ValueError(f"chunk {k} has {chunk.numel()} bytes; announced was {announced}")
        self._next += 1
        ack = self.start(False, torch.empty(_NUMBER.size, dtype=torch.uint8, device="cpu"), _ACK_TAG)
        return Sent(self, self.start(True, chunk, _CHUNK_TAG), ack, k)

    def finish(self, digest: str) -> None:
        """Send the digest, which ends the version."""
        self.send_bytes(bytes.fromhex(digest), _DIGEST_TAG).wait()

    def announce_end(self) -> None:
        """Tell the other end that nothing more will come."""
        self.send_bytes(_HEAD.pack(_MAGIC, _BYE, 0, 0, 0, 0, 0, 0), _HEAD_TAG).wait()


class MessageInbox(_Link):
    """The receiving end of a link from one rank. Where a call raises, the link is broken at the other end too."""

    _sizes: tuple[int, ...] = ()
    _last: Message | None = None

    def receive_head(self) -> Head | None:
        """Wait for the head of the next version, without a limit. Return None when nothing more will come."""
        magic, kind, version, used, total, chunks, *apart = _HEAD.unpack(self.receive_bytes(_HEAD.size, _HEAD_TAG))
        if magic != _MAGIC or kind not in (_BYE, _VERSION) or max(used, sum(apart)) > total or chunks > MAX_CHUNKS:
            raise self._refuse_for_good("sent something that is no head of a version")
        if kind == _BYE:
            return None
        sizes = struct.unpack(f"<{chunks}Q", self.receive_bytes(8 * chunks, _SIZES_TAG)) if chunks else ()
        head = Head(version, used, total, sizes, (apart[0], apart[1]))
        if sum(sizes) != head.sent_bytes or sum(apart) > used:
            raise self._refuse_for_good(f"announced {head.sent_bytes} bytes in chunks of {sum(sizes)} bytes")
        self._sizes = sizes
        return head

    def answer(self, accept: bool) -> None:
        """Answer an offer, once after each `receive_head`."""
        self.send_bytes(_YES if accept else _NO, _ANSWER_TAG).wait()

    def receive(self, into: torch.Tensor) -> None:
        """Fill `into` (exactly `sent_bytes`) chunk by chunk, after a positive answer.

        Return when all chunks have arrived.
        """
        if into.numel() != sum(self._sizes):
            raise ValueError(f"{into.numel()} bytes of room for chunks of {sum(self._sizes)} bytes")
        coming: deque[_OnLink] = deque()
        acks: deque[_OnLink] = deque()
        landed = 0
        for chunk in torch.split(into, list(self._sizes)):
            if len(coming) == AHEAD:
                landed = self._land(coming, acks, landed)
            coming.append(self.start(False, chunk, _CHUNK_TAG))
        while coming:
            landed = self._land(coming, acks, landed)
        for ack in acks:
            ack.wait()

    def _land(self, coming: deque[_OnLink], acks: deque[_OnLink], number: int) -> int:
        """Wait for the next chunk and acknowledge it. Return the number of the chunk after it."""
        coming.popleft().wait()
        acks.append(self.send_bytes(_NUMBER.pack(number), _ACK_TAG))
        if len(acks) > AHEAD:
            acks.popleft().wait()
        return number + 1

    def receive_digest(self) -> str:
        """Return the digest made at the source; called last."""
        return self.receive_bytes(16, _DIGEST_TAG).hex()

    def _refuse_for_good(self, why: str) -> LinkBroken:
        """Break the link, and notify the other end without waiting, because it may not be listening."""
        word = torch.frombuffer(bytearray(_GIVEN_UP), dtype=torch.uint8)
        with suppress(LinkBroken):
            self._last = self._links.begin_transfer(True, self._rank, word, _ANSWER_TAG)
        return self.break_off(f"rank {self._rank} {why}")


class GlooLinks:
    """The links of one rank over gloo."""

    def __init__(self, within: dist.ProcessGroup | None = None) -> None:
        """Create the two process groups. Collective over the training's ranks.

        gloo ends a process that gets a longer message than it asked for. The sending end therefore checks the sizes
        of its chunks.

        Args:
            within: Process group of the training's ranks; None: the default group.
        """
        self.interrupted = False
        before = _find_sockets()
        up, down = build_own_group(within), build_own_group(within)
        self._up: Any = up._get_backend(torch.device("cpu"))
        self._down: Any = down._get_backend(torch.device("cpu"))
        self._rank = up.rank()
        self._sockets = {fd: inode for fd, inode in _find_sockets().items() if before.get(fd) != inode}
        self.abandoned: list[Message] = []

    def build_outbox(self, rank: int) -> MessageOutbox:
        """Create the link to a rank; called once for each."""
        return MessageOutbox(self, rank)

    def build_inbox(self, rank: int) -> MessageInbox:
        """Create the link from a rank; called once for each."""
        return MessageInbox(self, rank)

    def begin_transfer(self, sending: bool, rank: int, tensor: torch.Tensor, tag: int) -> Message:
        """Begin to send a tensor's bytes to a rank, or to receive exactly as many bytes from it.

        The message keeps the tensor alive. No call may begin once `interrupted` is set.

        Raises:
            LinkBroken: If the link is broken.
        """
        chunks_leave = sending != (tag in REPLIES)  # direction of the chunks on this message's link
        backend = self._up if chunks_leave == (rank > self._rank) else self._down
        try:
            # directly to the backend: hooks on the training's collectives must not see this traffic
            work = (backend.send if sending else backend.recv)([tensor], rank, tag)
        except RuntimeError as error:
            raise LinkBroken(_describe_error(error)) from None
        return Message(self, work, tensor)

    def interrupt(self) -> None:
        """Make every blocked and every later call raise LinkBroken soon. Thread-safe; may be called repeatedly.

        gloo has no call that ends a blocked receive (abort and shutdown do not). A thread that is blocked in a
        receive when Python exits aborts the process. Shutting down the connections ends the receive.
        """
        self.interrupted = True
        for fd, inode in self._sockets.items():
            with suppress(OSError):
                if os.fstat(fd).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):
                        continue  # another thread's socket, made at the same time as the group
                    sock.getpeername()  # raises for a listening socket, whose shutdown would end the process
                    sock.shutdown(socket.SHUT_RDWR)
        self.abandoned.clear()
