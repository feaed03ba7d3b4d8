"""Execution of a program on one rank: its launching thread enqueues operations between the training's collectives.

The order prevents deadlocks. Every rank launches collective after collective, and our operations between the same two
of them. On the device, our operation waits for all collectives launched before it. The first collective launched
after it waits for our operation. Every device therefore runs the training's operations and ours in one and the same
order. This holds however many kernels fit on it at a time, and however far the host has run ahead. The second wait
costs nothing where the idle span was as long as planned.

    pack stream      chunk -> sub-buffer      after the send that last used the sub-buffer
    network stream   send, receive            after the packing, and after the copy that last used the sub-buffer
    copy stream      sub-buffer -> slot       after the receive

Whatever the state of this rank, it enqueues the whole program: a chunk that one end leaves out hangs the other. A
rank that has nothing to save sends the present contents of its sub-buffers. A rank that has no slot drops the bytes
that it receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gemini_hpc.train.device.interface import Broken, Communicator, Device, Event, Message, Stream
from gemini_hpc.train.nccl.collective_schedule import Chunk, Place, Program
from gemini_hpc.train.nccl.launch_log import EnqueuedOperation, LaunchLog
from gemini_hpc.train.nccl.progress import Arrival, Operation, Progress

SEND_PARTS = 2  # one is packed while one is sent


class ShardBytes(Protocol):
    """The source of the bytes of this rank's shard."""

    def put(self, stream: Stream, into: torch.Tensor, offset: int) -> None:
        """Enqueue a copy of bytes offset..offset+len(into) into a device buffer."""


@dataclass(frozen=True)
class Save:
    """A version to send.

    Attributes:
        version: The version.
        now: Source of its bytes until the first optimizer step after it. If `later` is None too, this rank has
            nothing of this version.
        later: Source from then on (a copy); None where a version never takes more than one iteration.
        find_destination: Returns the destination of the bytes of that rank's shard, as pinned host memory of their
            size; None: they are dropped.
    """

    version: int
    now: ShardBytes | None
    later: ShardBytes | None
    find_destination: Callable[[int], torch.Tensor | None]


@dataclass(frozen=True)
class Links:
    """The senders and receivers of all copies.

    Attributes:
        targets: For each rank, the ranks that keep copies of its shard, by replica.
        sizes: For each rank, the bytes of its shard.
    """

    targets: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def list_sources(self, rank: int, replica: int) -> list[int]:
        """Return the ranks whose copy number `replica` goes to `rank`."""
        return [r for r, t in enumerate(self.targets) if replica < len(t) and t[replica] == rank]

    def count_bytes(self, rank: int, chunk: Chunk) -> int:
        """Return the bytes of this chunk that the rank has."""
        return max(0, min(chunk.size, self.sizes[rank] - chunk.offset))


@dataclass
class SubBuffer:
    """A sub-buffer in device memory, through which chunks travel (GEMINI paper, section 5.2, Figure 5d).

    Attributes:
        bytes: Its memory.
        free: Event behind its last use; set by the code that takes the bytes out.
    """

    bytes: torch.Tensor
    free: Event | None = None


class SubBufferRing:
    """A ring of p sub-buffers. The host never waits for one: the stream that fills it does."""

    def __init__(self, device: Device, p: int, part_bytes: int) -> None:
        if p < 1 or part_bytes < 1:
            raise ValueError(f"{p} parts of {part_bytes} bytes: at least one of one byte is wanted")
        self._parts = [SubBuffer(device.allocate_buffer(part_bytes)) for _ in range(p)]
        self._next = 0

    def pick_next(self, stream: Stream) -> SubBuffer:
        """Return the next sub-buffer. Work enqueued on `stream` from now on begins after its last use."""
        part = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        if part.free is not None:
            stream.wait(part.free)
        return part


class Exchange:
    """The enqueuer of one rank's operations.

    The training's launching threads call it; each call is short and never waits on the host. A failure of the
    communicator ends the exchange (`problem`), never the training. There are p sub-buffers to receive and SEND_PARTS
    to send.
    """

    def __init__(
        self,
        device: Device,
        communicator: Communicator,
        rank: int,
        links: Links,
        p: int,
        part_bytes: int,
        progress: Progress,
    ) -> None:
        self._device, self._communicator, self._rank, self._links = device, communicator, rank, links
        self._progress = progress
        self._pack, self._network = device.create_stream(), device.create_stream()
        self.copies = device.create_stream()  # the stream of all copies to host memory
        self._send_parts = SubBufferRing(device, SEND_PARTS, part_bytes)
        self._receive_parts = SubBufferRing(device, p, part_bytes)
        self.log = LaunchLog()
        self._lock = threading.Lock()
        self._program: Program | None = None
        self._next_program: Program | None = None
        self._save: Save | None = None
        self._sent = 0
        self._iteration = 0
        self._launched = 0
        self._gated = False
        self._stepped = False  # an optimizer has changed the tensors that `Save.now` reads
        self._into: dict[int, torch.Tensor | None] = {}
        self._packed: Event | None = None
        self._recent: dict[Hashable, Any] = {}  # newest collective of each group since our last operation
        self._ours: Operation | None = None  # our newest operation
        self._behind: set[Hashable] = set()  # streams that wait for it already

    @property
    def problem(self) -> str:
        """Return the reason why nothing more is enqueued; '' if there is none."""
        return self._progress.problem

    # ---- from the training's threads -------------------------------------------------------------------

    def set_program(self, program: Program | None) -> None:
        """Follow a program from the next version on; None: no version is sent.

        All ranks call this between the same two steps. Chunks must not be larger than a sub-buffer.
        """
        self._next_program = program

    def step(self, save: Save | None) -> None:
        """Begin an iteration, with all other ranks.

        Args:
            save: The version to send; None where this version is not saved.
        """
        with self._lock:
            if self._is_off():
                return
            self._iteration += 1
            self._launched, self._gated = 0, False
            self._catch_up()
            if save is None:
                return
            self._finish()
            self._program, self._save = self._next_program, save
            self._sent, self._iteration, self._stepped = 0, 0, False
            self._into, self._packed = {}, None
            self._pack.wait(self._device.get_current_stream().record())
            self._catch_up()

    def on_launching(self) -> None:
        """Make the current stream wait for our newest operation.

        Called before each collective of the training, in the thread that launches it.
        """
        with self._lock:
            if self._ours is None or self._is_off():
                return
            stream = self._device.get_current_stream()
            if stream.key not in self._behind:
                self._behind.add(stream.key)
                self._mark(stream)
                stream.wait(self._ours.done)

    def on_launched(self, group: Hashable, work: Any) -> None:
        """Count a collective after its launch, and enqueue what is due.

        Args:
            group: The process group.
            work: The collective's work, as `Stream.wait_work` takes it.
        """
        with self._lock:
            if self._is_off():
                return
            self._launched += 1
            self._recent[group] = work
            self._catch_up()

    def prepare_for_gate(self) -> None:
        """Enqueue what is due before the first optimizer step of an iteration.

        The optimizer may change the tensors that have been packed by then.
        """
        with self._lock:
            if self._gated or self._is_off():
                return
            self._gated = True
            if self._program is not None and self._iteration >= self._program.s - 1:
                self._finish()
            self._catch_up()
            self._release()

    def fence(self) -> None:
        """Allow the tensors to change from here on, before the optimizer: like the gate, but nothing is due."""
        with self._lock:
            if not self._is_off():
                self._release()

    def finish(self) -> None:
        """Enqueue the rest of the version in transfer, because the training is over on all ranks."""
        with self._lock:
            if not self._is_off():
                self._finish()

    # ---- enqueueing ------------------------------------------------------------------------------------

    def _is_off(self) -> bool:
        return bool(self.problem) or self._device.is_capturing()

    def _catch_up(self) -> None:
        if self._save is not None and self._program is not None and not self._device.is_grouping():
            self._enqueue(self._program.count_due(Place(self._iteration, self._gated, self._launched)))

    def _finish(self) -> None:
        if self._save is not None and self._program is not None:
            self._enqueue(len(self._program.chunks))

    def _release(self) -> None:
        """Make the training wait for the packing so far; later packing does not read the tensors."""
        if self._packed is not None and not self._stepped:
            stream = self._device.get_current_stream()
            self._mark(stream)
            stream.wait(self._packed)
        self._stepped = True

    def _mark(self, stream: Stream) -> None:
        """Record that from here on the training waits for our newest operation."""
        if self._ours is not None and self._ours.waited is None:
            self._ours.waited = stream.record()

    def _enqueue(self, until: int) -> None:
        program = self._program
        assert program is not None
        if self._sent >= until:
            return
        try:
            for work in self._recent.values():
                self._network.wait_work(work)
            self._recent.clear()
            self._network.wait(self._device.get_current_stream().record())
            while self._sent < until:
                self._sent += 1
                self._enqueue_chunk(program.chunks[self._sent - 1], len(program.chunks) - self._sent)
        except Broken as error:
            self._progress.fail(str(error))
        self._behind.clear()
        if self._sent == len(program.chunks):
            self._save = None

    def _enqueue_chunk(self, chunk: Chunk, left: int) -> None:
        save, links, network = self._save, self._links, self._network
        assert save is not None
        source = save.later if self._stepped else save.now
        sends: list[Message] = []
        outgoing: SubBuffer | None = None
        size = links.count_bytes(self._rank, chunk)
        if size and chunk.replica < len(links.targets[self._rank]):
            outgoing = self._send_parts.pick_next(self._pack)
            if source is not None:
                source.put(self._pack, outgoing.bytes[:size], chunk.offset)
            self._packed = self._pack.record()
            network.wait(self._packed)
            sends.append(Message(links.targets[self._rank][chunk.replica], outgoing.bytes[:size]))
        incoming: list[tuple[Message, SubBuffer]] = []
        for peer in links.list_sources(self._rank, chunk.replica):
            size = links.count_bytes(peer, chunk)
            if size:
                part = self._receive_parts.pick_next(network)
                incoming.append((Message(peer, part.bytes[:size]), part))
        self.log.add(EnqueuedOperation(save.version, self._iteration, self._gated, self._launched, *chunk))
        ready = network.record()
        if sends or incoming:
            self._communicator.exchange(network, sends, [message for message, _ in incoming])
        done = network.record()
        if outgoing is not None:
            outgoing.free = done
        arrivals = []
        for message, part in incoming:
            copied = self._enqueue_copy(chunk, message, done)
            part.free = copied or done
            arrivals.append(Arrival(message.peer, message.bytes.numel(), copied))
        self._ours = Operation(save.version, chunk.size, left, ready, done, arrivals)
        self._progress.record_operation(self._ours)

    def _enqueue_copy(self, chunk: Chunk, message: Message, done: Event) -> Event | None:
        """Enqueue the copy from the sub-buffer into the slot. Return the event behind the copy."""
        save = self._save
        assert save is not None
        if message.peer not in self._into:
            self._into[message.peer] = save.find_destination(message.peer)
        into = self._into[message.peer]
        if into is None:
            return None
        self.copies.wait(done)
        self.copies.copy(into[chunk.offset : chunk.offset + message.bytes.numel()], message.bytes)
        return self.copies.record()
