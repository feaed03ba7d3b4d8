"""Copies over NCCL as the checkpointer sees them: told of steps, launches, gates and rounds, it drives the rest.

What every rank must do alike follows from what was exchanged only: which versions are saved and under which program
(`follow`, from the ranks' rounds). A rank that cannot take part in a version sends what it has and drops what
it gets; one whose communicator fails stops at once, and the others notice. Then each of them sends its versions over
gloo, and says so in the next round, after which all profile the training anew for that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from typing import Any

import torch

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentClient
from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.format.slot_header import TENSOR_ALIGN_BYTES
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.device.memory import Keeper
from gemini_hpc.train.nccl import own_copy
from gemini_hpc.train.nccl.collective_schedule import whole
from gemini_hpc.train.nccl.exchange import Exchange, Save
from gemini_hpc.train.nccl.launch_log import pack, unequal
from gemini_hpc.train.nccl.negotiation import Joined
from gemini_hpc.train.nccl.own_copy import OwnCopy, OwnSlot, Piecework
from gemini_hpc.train.nccl.progress import Progress
from gemini_hpc.train.nccl.route import Joint
from gemini_hpc.train.nccl.slot_prefetch import Grant, SlotPrefetch
from gemini_hpc.train.nccl.source import Piece, Tensors
from gemini_hpc.train.replication.registration import Identity
from gemini_hpc.train.schedule.chunk_schedule import Route
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state.capture import Capture, Job

_WORDS = 5
_RATES = 8
_LOOK_S = 0.001
_STOP_S = 2.0


@dataclass
class Carried:
    """A version that the device brings into the own slot and to the other holders. settled: its copy has been
    enqueued to its end; void: names of tensors that had changed by then."""

    job: Job
    grant: Grant
    own: OwnSlot
    settled: threading.Event = field(default_factory=threading.Event)
    void: list[str] = field(default_factory=list)
    began: Event | None = None


class Driver:
    """Of one rank. `step`, `gate`, `fence` and `finish` are called by the training's threads, as are the hooks in the
    watch; `carried` and `filled` by the thread that saves."""

    def __init__(
        self,
        joined: Joined,
        traffic: Traffic,
        me: Identity,
        client: AgentClient,
        capture: Capture,
        gate: SealGate,
        pacer: Pacer,
        say: Callable[[str], None],
        broken: Callable[[str], None],
    ) -> None:
        """say: tells the user; broken: told where this rank's shards can no longer be protected at all."""
        self._joined, self._traffic, self._me = joined, traffic, me
        self._capture, self._gate, self._pacer = capture, gate, pacer
        self._say, self._broken = say, broken
        self._device, links = joined.device, joined.links
        self.meter = LinkMeter()
        self._progress = Progress(joined.communicator, links.sizes, self, self._tell)
        self._exchange = Exchange(
            self._device,
            joined.communicator,
            me.rank,
            links,
            traffic.buffers,
            traffic.device_chunk_bytes,
            self._progress,
        )
        self._own = OwnCopy(self._device, self._exchange.copies)
        self.desk = SlotPrefetch(me, client, gate, self.area, joined.platform.pin, self._unpinned)
        self._zeros = self._device.buffer(TENSOR_ALIGN_BYTES).zero_()
        self._watch: CollectiveMonitor | None = None
        self._active = False
        self._stepped = 0  # the newest version that `step` has been told of
        self._tensors: tuple[list[torch.Tensor], Tensors] | None = None
        self._work: tuple[Piecework, ...] = ()
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._open: Carried | None = None
        self._carried: dict[int, Carried] = {}
        self._undrained = self._closing = self._over = False
        self._told = self._local = self._leaves = False
        # Where nothing is sealed, or a holder refuses, a rank's versions go over gloo until all ranks have met and
        # are well: over gloo they find a common version by asking each other, and a holder may have left NCCL.
        self._linked = self._met = False
        self.small_capacity = joined.small_capacity  # of the own slot
        self.ended = ""  # agreed by all ranks: why no version goes this way any more

    # ---- arming ----------------------------------------------------------------------------------------

    def hook(self, watch: CollectiveMonitor) -> None:
        """It sees the training's collectives."""
        self._watch = watch
        watch.before_launch, watch.launched_on = self._launching, self._launched

    def open(self, keepers: Mapping[int, Keeper]) -> None:
        """Begin: the memory is being reserved."""
        self.desk.open(keepers)
        self._progress.start()

    def area(self, rank: int) -> tuple[int, int]:
        """Offset and size in bytes of the tensor area of a rank's shard."""
        return self._joined.offsets[rank], self._joined.links.sizes[rank]

    @property
    def rank(self) -> int:
        return self._me.rank

    @property
    def largest_bytes(self) -> int:
        """C of Algorithm 2."""
        return max(self._joined.links.sizes)

    @property
    def problem(self) -> str:
        """Why this rank enqueues nothing any more; '' if all is well."""
        return self.ended or self._progress.problem

    # ---- the training's threads ------------------------------------------------------------------------

    def step(self, version: int, job: Job | None, *, saved: bool, following: bool) -> None:
        """At each step(), on all ranks alike, once. job: what this rank has of the version, None for nothing. saved:
        whether this version is; following: whether, as far as is known, the next one is."""
        if version <= self._stepped:
            return
        self._stepped = version
        self.settle()
        if self._watch is not None and self._watch.problem:
            self.fail(self._watch.problem)
        if self.problem:
            if not self._undrained and not self._progress.busy:
                self.desk.failed(drained=True)
            return
        save = None
        if saved and self._active:
            save = self._save(version, job)
        self._exchange.step(save)
        if self._met:  # only now: by the next version all ranks have heard it
            self._linked = self._met = False
        self.desk.want(version + 1 if following and self._active else 0)

    def _save(self, version: int, job: Job | None) -> Save:
        into = partial(self.desk.into, version)
        self._exchange.finish()  # what is left of the version before: it may have the slot that is asked for now
        self.desk.reach(version)
        self._linked = self._linked or self._gate.degraded
        if job is None or self._linked:
            if job is not None:
                self.desk.link(self._me.rank, version)
            return Save(version, None, None, into)
        job.streamed = True
        grant = self.desk.take(self._me.rank, version) if len(job.small) <= self.small_capacity else None
        if grant is None or not job.start():
            job.give_up()
            return Save(version, None, None, into)
        offset, size = self.area(self._me.rank)
        tensors = self._found(job)
        area = grant.slot.bytes[offset : offset + size]
        own = self._own.begin(tensors, area, self._work)
        self._open = self._carried[version] = Carried(job, grant, own)
        for old in [v for v in self._carried if v < version - 8]:
            del self._carried[old]
        return Save(version, tensors, own, into)

    def _found(self, job: Job) -> Tensors:
        views = self._capture.pieces(job)
        known = self._tensors
        if known is None or len(known[0]) != len(views) or any(map(is_not, known[0], views)):
            pieces: list[Piece] = []
            end = 0
            for piece, view in zip(self._capture.manifest.pieces, views, strict=True):
                if piece.at > end:  # what is between tensors is sent as well, and has a digest
                    pieces.append(Piece(end, self._zeros[: piece.at - end]))
                pieces.append(Piece(piece.at, view))
                end = piece.at + self._capture.manifest.nbytes(piece)
            known = self._tensors = views, Tensors(pieces)
        return known[1]

    def settle(self) -> None:
        """The tensors may change: the rest of the own copy is enqueued before that."""
        carried, self._open = self._open, None
        if carried is None:
            return
        try:
            self._rest(carried)
        finally:
            carried.settled.set()
            carried.job.left.set()

    def _rest(self, carried: Carried) -> None:
        copies = self._exchange.copies
        if self._work and self._work[0].after < 0:  # all of it goes now: shows what the way to host memory can do
            copies.wait(self._device.current().record())
            carried.began = copies.record()
        self._own.gate()
        carried.void = self._capture.moved(carried.job)

    def _launching(self, number: int) -> None:
        if not self.problem:
            self._exchange.launching()
        self._own.launching(number)

    def _launched(self, group: Hashable, backend: str, work: Any) -> None:
        if not self.problem:
            self._exchange.launched(group, work if backend == self._joined.platform.backend else None)

    def gate(self) -> None:
        """Before the first optimizer after step()."""
        self._guarded(self._exchange.gate)

    def fence(self) -> None:
        """Before something else changes the tensors."""
        self._guarded(self._exchange.fence)

    def _guarded(self, then: Callable[[], None]) -> None:
        """Our own failure must not reach the training."""
        try:
            self.settle()
            if not self.ended:
                then()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")

    def finish(self, *, in_peace: bool) -> None:
        """The training is over; in peace: on all ranks."""
        self._guarded(self._exchange.finish if in_peace else lambda: None)
        self._closing = True
        if not in_peace:
            self.fail("the training has ended")

    def interrupt(self) -> None:
        """Nobody waits for anything of ours any more. From any thread."""
        self._over = True
        self.desk.end()

    def close(self) -> None:
        """After the threads that save and receive have ended, or been told to."""
        self.interrupt()
        self._progress.stop(_STOP_S)
        self._joined.communicator.abort()
        self.desk.close(drained=not self._undrained and not self._progress.busy)

    # ---- what is agreed --------------------------------------------------------------------------------

    def follow(self, route: Route | None, s: int, *, active: bool) -> None:
        """From the next saved version on, on all ranks alike: under `route` within s iterations; None: all of it
        before the optimizer. active: versions go this way at all."""
        former, self._active = self._active, active and not self.ended
        if self._active and not former:
            self._linked = False
            self.desk.meet(self._stepped)
        if not isinstance(route, Joint):
            route = None
        traffic, size = self._traffic, self.area(self._me.rank)[1]
        self._exchange.follow(
            whole(self.largest_bytes, len(self._joined.links.targets[0]) + 1, traffic.device_chunk_bytes)
            if route is None
            else route.program(s)
        )
        rate = sorted(self._rates)[len(self._rates) // 2] if self._rates else 0.0
        if route is not None and rate > 0:
            self._work = own_copy.plan(route.profile, size, traffic.device_chunk_bytes, rate, traffic.mu)
        else:
            self._work = tuple(
                Piecework(-1, at, min(traffic.device_chunk_bytes, size - at))
                for at in range(0, size, traffic.device_chunk_bytes)
            )

    def words(self) -> list[int]:
        """For the ranks' round at this version."""
        return [] if self.ended else [1 if self.problem else 0, *pack(self._exchange.log.word())]

    def hear(self, words: Sequence[int]) -> None:
        """What came out of a round, of which the last words are ours: all ranks may leave NCCL by it."""
        if self.ended:
            return
        ours = list(words)[-_WORDS:]
        wrong = unequal(ours[1:])
        if ours[0] or wrong:
            self.end(wrong if not ours[0] else self._progress.problem or "another rank has left NCCL")
        else:
            self._met = True
            self.desk.meet(self._stepped + 1)

    def left(self) -> bool:
        """True once, when all ranks have left NCCL."""
        leaves, self._leaves = self._leaves, False
        return leaves

    def end(self, reason: str) -> None:
        """All ranks leave NCCL, for a reason that all of them see at the same step()."""
        if not self.ended:
            self._local = bool(self._progress.problem)
            self.ended, self._leaves = reason, True
            if self._me.rank == 0:
                self._tell_end(reason)
            self._progress.fail(reason)
            self._active = False
            self.desk.want(0)

    def fail(self, reason: str) -> None:
        """This rank leaves NCCL; the others will notice, and hear of it. From any thread."""
        self._progress.fail(reason)

    # ---- the thread that saves -------------------------------------------------------------------------

    def refused(self) -> None:
        """A holder does not take a version that goes over NCCL."""
        self._linked = True

    def carried(self, version: int) -> Carried | None:
        """What the device brings of a version; None: nothing."""
        return self._carried.pop(version, None)

    def filled(self, carried: Carried) -> bool:
        """Wait until the own slot has all of the tensors; False where it never will."""
        while not carried.settled.wait(0.1):
            if self._over or (self._closing and not carried.settled.is_set()):
                return False
        mark = carried.own.filled
        if mark is None:
            return False
        while not mark.query():
            if self._undrained or self._over:
                return False
            clock.sleep(_LOOK_S)
        if carried.began is not None and carried.began.query():
            took_s = mark.seconds_since(carried.began)
            if took_s > 0:
                self._rates.append(self.area(self._me.rank)[1] / took_s)
        self.desk.landed(carried.job.version, self._me.rank)
        return True

    # ---- what became of the operations (see progress.Listener) -----------------------------------------

    def measured(self, size: int, seconds: float) -> None:
        self.meter.sent(0.0)
        self.meter.landed(size, seconds)

    def sent(self, version: int, whole: bool) -> None:
        self._pacer.moved()

    def landed(self, version: int, rank: int) -> None:
        self._pacer.moved()
        self.desk.landed(version, rank)

    def failed(self, version: int, drained: bool) -> None:
        self._undrained = self._undrained or not drained
        self.desk.failed(drained=drained)
        if self._closing:
            return
        self._gate.degrade(f"version {version} was on its way over NCCL")
        if not drained:
            self._broken("the device still has to copy into replica memory, and may never finish")

    def _unpinned(self, reason: str) -> None:
        self.fail(reason)

    def _tell(self, text: str) -> None:
        """From the thread that looks, when the communicator is given up."""
        if not self._closing and (self._local or not self.ended):
            self._tell_end(self._progress.problem)

    def _tell_end(self, reason: str) -> None:
        """Once."""
        told, self._told = self._told, True
        if not told:
            self._say(f"rank {self._me.rank}: copies go over gloo from here on, not over NCCL: {reason}")
