"""Driver of copies over NCCL for the checkpointer, which reports steps, launches, gates and rounds to it.

What every rank must do alike follows from exchanged values only: the versions to save and their program (`set_route`,
from the ranks' rounds). A rank that cannot take part in a version sends what it has and drops what it receives. A
rank whose communicator fails stops at once, and the others notice. Each of them then sends its versions over gloo,
and reports so in the next round. After this round all ranks profile the training anew, for gloo.
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
from gemini_hpc.client.session import RankSession
from gemini_hpc.format.slot_header import TENSOR_ALIGN_BYTES
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.device.memory import TensorShardOwner
from gemini_hpc.train.nccl import own_copy
from gemini_hpc.train.nccl.collective_schedule import Joint, build_profiling_program
from gemini_hpc.train.nccl.exchange import Exchange, Save
from gemini_hpc.train.nccl.launch_log import describe_difference, pack
from gemini_hpc.train.nccl.negotiation import Joined
from gemini_hpc.train.nccl.own_copy import OwnCopy, OwnSlot, Piecework
from gemini_hpc.train.nccl.progress import Progress
from gemini_hpc.train.nccl.slot_prefetch import Grant, SlotPrefetch
from gemini_hpc.train.nccl.source import Piece, Tensors
from gemini_hpc.train.schedule.chunk_schedule import Route
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state.capture import Capture, CaptureJob

_WORDS = 5
_RATES = 8
_LOOK_S = 0.001  # short beside the operations, of milliseconds
QUIET_S = 2.0  # longest wait of a version that does not go over NCCL until the device has left its slots
_STOP_S = 2.0  # the thread's longest poll, many times over


@dataclass
class Carried:
    """A version that the device copies into the own slot and to the other holders.

    Attributes:
        job: The job of the version.
        grant: The grant of the own slot.
        own: The own slot as a source.
        settled: Set when its whole copy has been enqueued.
        void: Names of tensors that had changed by then.
        began: Event at the beginning of a copy that is enqueued all at once.
    """

    job: CaptureJob
    grant: Grant
    own: OwnSlot
    settled: threading.Event = field(default_factory=threading.Event)
    void: list[str] = field(default_factory=list)
    began: Event | None = None


class Driver:
    """The driver of one rank's copies over NCCL.

    The training's threads call `step`, `prepare_for_gate`, `fence`, `finish` and the monitor's hooks. The thread that
    saves calls `pop_carried` and `wait_until_filled`.
    """

    def __init__(
        self,
        joined: Joined,
        traffic: Traffic,
        session: RankSession,
        capture: Capture,
        pacer: Pacer,
    ) -> None:
        """Create a driver for a rank that has joined the communicator.

        Args:
            joined: The rank's end of the communicator.
            traffic: The user's settings.
            session: The rank's session with its agent.
            capture: Captures of the training's state.
            pacer: Pacer of the sending thread.
        """
        self._joined, self._traffic, self._session = joined, traffic, session
        self._capture, self._pacer = capture, pacer
        self._device, links = joined.device, joined.links
        self.meter = LinkMeter()
        self._progress = Progress(joined.communicator, links.sizes, self, self._report_loss)
        self._exchange = Exchange(
            self._device,
            joined.communicator,
            session.rank,
            links,
            traffic.buffers,
            traffic.device_chunk_bytes,
            self._progress,
        )
        self._own = OwnCopy(self._device, self._exchange.copies)
        self.desk = SlotPrefetch(session, self.locate_area, joined.platform.pin, self.fail)
        self._zeros = self._device.allocate_buffer(TENSOR_ALIGN_BYTES).zero_()
        self._watch: CollectiveMonitor | None = None
        self._active = False
        self._stepped = 0  # version of the newest `step`
        self._tensors: tuple[list[torch.Tensor], Tensors] | None = None
        self._work: tuple[Piecework, ...] = ()
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._open: Carried | None = None
        self._carried: dict[int, Carried] = {}
        self._undrained = self._closing = self._over = False
        self._announced = self._local = self._leaves = False
        # Where nothing is sealed, or a holder refuses, a rank's versions go over gloo until a round shows that all
        # ranks are well. Over gloo the ranks find a common version by asking each other, and a holder may have left
        # NCCL.
        self._linked = self._met = False
        self.small_capacity = joined.small_capacity  # bytes, of the own slot
        self.ended = ""  # reason, agreed by all ranks, why no version goes over NCCL any more

    # ---- arming ----------------------------------------------------------------------------------------

    def install_hooks(self, watch: CollectiveMonitor) -> None:
        """Install the hooks in the monitor of the training's collectives."""
        self._watch = watch
        watch.before_launch, watch.launched_on = self._on_launching, self._on_launched

    def open(self, keepers: Mapping[int, TensorShardOwner]) -> None:
        """Start, while the memory is being reserved."""
        self.desk.open(keepers)
        self._progress.start()

    def locate_area(self, rank: int) -> tuple[int, int]:
        """Return offset and size in bytes of the tensor area of a rank's shard."""
        return self._joined.offsets[rank], self._joined.links.sizes[rank]

    @property
    def rank(self) -> int:
        """Return this rank."""
        return self._session.rank

    @property
    def largest_bytes(self) -> int:
        """Return C of Algorithm 2: the bytes of the largest shard."""
        return max(self._joined.links.sizes)

    @property
    def problem(self) -> str:
        """Return the reason why this rank enqueues nothing any more; '' if there is none."""
        return self.ended or self._progress.problem

    # ---- the training's threads ------------------------------------------------------------------------

    def step(self, version: int, job: CaptureJob | None, *, saved: bool, following: bool) -> None:
        """Begin an iteration, once for each version and on all ranks alike.

        Args:
            version: Number of the training's step().
            job: This rank's job of the version; None if it has none.
            saved: Whether this version is saved.
            following: Whether the next version is saved, as far as is known.
        """
        if version <= self._stepped:
            return
        self._stepped = version
        self.flush_copy()
        if self._watch is not None and self._watch.problem:
            self.fail(self._watch.problem)
        if self.problem:
            if not self._undrained and not self._progress.busy:
                self.desk.record_failure(drained=True)
            return
        save = None
        if saved and self._active:
            save = self._prepare_save(version, job)
        self._exchange.step(save)
        if self._met:  # only now: by the next version all ranks have read the round
            self._linked = self._met = False
        self.desk.set_wanted(version + 1 if following and self._active else 0)

    def _prepare_save(self, version: int, job: CaptureJob | None) -> Save:
        into = partial(self.desk.claim_destination, version)
        self._exchange.finish()  # the rest of the version before, which may have the slot that is requested now
        self.desk.record_step(version)
        self._linked = self._linked or self._session.gate.degraded
        if job is None or self._linked:
            if job is not None:
                self.desk.hold_for_link(self.rank, version)
            return Save(version, None, None, into)
        job.streamed = True
        grant = self.desk.claim_slot(self.rank, version) if len(job.small) <= self.small_capacity else None
        if grant is None or not job.start():
            job.give_up()
            return Save(version, None, None, into)
        offset, size = self.locate_area(self.rank)
        tensors = self._gather_tensors(job)
        area = grant.slot.bytes[offset : offset + size]
        own = self._own.begin_copy(tensors, area, self._work)
        self._open = self._carried[version] = Carried(job, grant, own)
        for old in [v for v in self._carried if v < version - 8]:
            del self._carried[old]
        return Save(version, tensors, own, into)

    def _gather_tensors(self, job: CaptureJob) -> Tensors:
        views = self._capture.list_pieces(job)
        known = self._tensors
        if known is None or len(known[0]) != len(views) or any(map(is_not, known[0], views)):
            pieces: list[Piece] = []
            end = 0
            for piece, view in zip(self._capture.manifest.pieces, views, strict=True):
                if piece.start > end:  # gaps between tensors are sent too, because the digest covers them
                    pieces.append(Piece(end, self._zeros[: piece.start - end]))
                pieces.append(Piece(piece.start, view))
                end = piece.start + self._capture.manifest.count_bytes(piece)
            known = self._tensors = views, Tensors(pieces)
        return known[1]

    def flush_copy(self) -> None:
        """Enqueue the rest of the own copy, before the tensors may change."""
        carried, self._open = self._open, None
        if carried is None:
            return
        try:
            self._enqueue_rest(carried)
        finally:
            carried.settled.set()
            carried.job.left.set()

    def _enqueue_rest(self, carried: Carried) -> None:
        copies = self._exchange.copies
        if self._work and self._work[0].after < 0:  # all at once: this measures the path to host memory
            copies.wait(self._device.get_current_stream().record())
            carried.began = copies.record()
        self._own.enqueue_rest()
        carried.void = self._capture.find_moved(carried.job)

    def _on_launching(self, number: int) -> None:
        if not self.problem:
            self._exchange.on_launching()
        self._own.on_launching(number)

    def _on_launched(self, group: Hashable, backend: str, work: Any) -> None:
        if not self.problem:
            self._exchange.on_launched(group, work if backend == self._joined.platform.backend else None)

    def prepare_for_gate(self) -> None:
        """Prepare for the first optimizer step of an iteration."""
        self._run_guarded(self._exchange.prepare_for_gate)

    def fence(self) -> None:
        """Prepare for a change of the tensors by other code than the optimizer."""
        self._run_guarded(self._exchange.fence)

    def _run_guarded(self, then: Callable[[], None]) -> None:
        """Run `then` such that our own failure does not reach the training."""
        try:
            self.flush_copy()
            if not self.ended:
                then()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")

    def finish(self, *, orderly: bool) -> None:
        """End the copies, because the training is over. `orderly`: on all ranks."""
        self._run_guarded(self._exchange.finish if orderly else lambda: None)
        self._closing = True
        if not orderly:
            self.fail("the training has ended")

    def interrupt(self) -> None:
        """End all waits for our operations. Thread-safe."""
        self._over = True
        self.desk.end()

    def close(self) -> None:
        """End everything, after the threads that save and receive have ended or were told to end."""
        self.interrupt()
        self._progress.stop(_STOP_S)
        self._joined.communicator.abort()
        self.desk.close(drained=not self._undrained and not self._progress.busy)

    # ---- agreement of all ranks ------------------------------------------------------------------------

    def set_route(self, route: Route | None, s: int, *, active: bool) -> None:
        """Follow a route from the next saved version on, on all ranks alike.

        Args:
            route: The route; None: send everything before the optimizer.
            s: Iterations that a version may take.
            active: Whether versions go over NCCL at all.
        """
        former, self._active = self._active, active and not self.ended
        if self._active and not former:
            self._linked = False
            self.desk.allow_nccl(self._stepped)
        if not isinstance(route, Joint):
            route = None
        traffic, size = self._traffic, self.locate_area(self.rank)[1]
        self._exchange.set_program(
            build_profiling_program(
                self.largest_bytes, len(self._joined.links.targets[0]) + 1, traffic.device_chunk_bytes
            )
            if route is None
            else route.build_program(s)
        )
        rate = sorted(self._rates)[len(self._rates) // 2] if self._rates else 0.0
        if route is not None and rate > 0:
            self._work = own_copy.plan_copy(route.profile, size, traffic.device_chunk_bytes, rate, traffic.mu)
        else:
            self._work = tuple(
                Piecework(-1, at, min(traffic.device_chunk_bytes, size - at))
                for at in range(0, size, traffic.device_chunk_bytes)
            )

    def list_words(self) -> list[int]:
        """Return this rank's numbers for the round at this version."""
        return [] if self.ended else [1 if self.problem else 0, *pack(self._exchange.log.summarize())]

    def on_round(self, words: Sequence[int]) -> None:
        """Process the result of a round, by which all ranks may leave NCCL.

        The last numbers of the round are the driver's.
        """
        if self.ended:
            return
        ours = list(words)[-_WORDS:]
        wrong = describe_difference(ours[1:])
        if ours[0] or wrong:
            self.end(wrong if not ours[0] else self._progress.problem or "another rank has left NCCL")
        else:
            self._met = True
            self.desk.allow_nccl(self._stepped + 1)

    def has_just_left(self) -> bool:
        """Return True once, when all ranks have left NCCL."""
        leaves, self._leaves = self._leaves, False
        return leaves

    def end(self, reason: str) -> None:
        """Leave NCCL on all ranks, for a reason that all of them know at the same step()."""
        if not self.ended:
            self._local = bool(self._progress.problem)
            self.ended, self._leaves = reason, True
            if self.rank == 0:
                self._announce_end(reason)
            self._progress.fail(reason)
            self._active = False
            self.desk.set_wanted(0)

    def on_protection_lost(self, reason: str) -> None:
        """Leave NCCL on this rank, unless all ranks still have to agree that protection has ended. Thread-safe."""
        if not self._session.protected:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """Leave NCCL on this rank; the others notice, and learn of it in a round. Thread-safe."""
        self._progress.fail(reason)

    # ---- the thread that saves -------------------------------------------------------------------------

    def record_refusal(self) -> None:
        """Record that a holder does not accept a version over NCCL."""
        self._linked = True

    def pop_carried(self, version: int) -> Carried | None:
        """Return the version that the device copies, and forget it; None if there is none."""
        return self._carried.pop(version, None)

    def wait_until_filled(self, carried: Carried) -> bool:
        """Wait until the own slot has all of the tensors. Return False if it never will."""
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
            took_s = mark.count_seconds_since(carried.began)
            if took_s > 0:
                self._rates.append(self.locate_area(self.rank)[1] / took_s)
        self.desk.record_landing(carried.job.version, self.rank)
        return True

    # ---- results of the operations (see progress.ResultListener) ---------------------------------------

    def on_measured(self, size: int, seconds: float) -> None:
        """Add the duration of a message to the link's meter."""
        self.meter.record_spell(size, seconds)

    def on_sent(self, version: int) -> None:
        """Record progress: all of this rank's bytes of a version have left."""
        self._pacer.record_progress()

    def on_landed(self, version: int, rank: int) -> None:
        """Record that all bytes of a rank's shard are in the slot."""
        self._pacer.record_progress()
        self.desk.record_landing(version, rank)

    def on_failed(self, version: int, drained: bool) -> None:
        """Give up the version's slots, and the shards' protection if the device may still write into them."""
        self._undrained = self._undrained or not drained
        self.desk.record_failure(drained=drained)
        if self._closing:
            return
        self._session.gate.degrade(f"version {version} was on its way over NCCL")
        if not drained:
            self._session.end_protection("the device still has to copy into replica memory, and may never finish")

    def _report_loss(self, text: str) -> None:
        """Tell the user that the communicator is given up; called by the polling thread."""
        if not self._closing and (self._local or not self.ended):
            self._announce_end(self._progress.problem)

    def _announce_end(self, reason: str) -> None:
        """Tell the user once that copies leave NCCL."""
        was_announced, self._announced = self._announced, True
        if not was_announced:
            self._session.say(f"rank {self.rank}: copies go over gloo from here on, not over NCCL: {reason}")
