"""The background thread that brings each captured version into the own slot and to the other holders."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import SlotRequests
from gemini_hpc.core.ranges import Range, choose_largest, merge_ranges
from gemini_hpc.core.ranges import count_bytes as size_of
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.slot_header import SlotLayout, pack_header
from gemini_hpc.train.device.memory import TensorShard, TensorShardOwner, TensorSlot, register
from gemini_hpc.train.device.pins import Pins
from gemini_hpc.train.replication.replica import Replica
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.state.layout import Plan, choose_small_capacity
from gemini_hpc.train.transport.base import GrantOutbox, Head, LinkBroken, Outbox, VersionLost
from gemini_hpc.wire import local

_LOOK_S = 0.02  # interval of looks whether all nodes and agents are there
_WELL_S = 0.25  # they are, for so long: a broken connection is seen before the death of its node


@dataclass
class Counters:
    """Counts of versions by outcome, with the time and bytes they took."""

    saved: int = 0
    skipped: int = 0
    void: int = 0
    copy_s: float = 0.0
    send_s: float = 0.0
    spilled_bytes: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0  # not sent: holders had them, from an earlier version or from their own tensors
    reasons: dict[str, int] = field(default_factory=dict)


class Replicator(TensorShardOwner):
    """The thread that saves jobs of the training, one at a time."""

    def __init__(
        self,
        session: RankSession,
        plan: Plan,
        outboxes: dict[int, Outbox],
        pacer: Pacer,
        *,
        max_repeated: int,
        catch_up: Callable[[], None],
        pins: Pins | None = None,
    ) -> None:
        """Create the thread; `start` starts it.

        Args:
            session: This rank's session with its agent.
            plan: Capture, manifest and layout of this rank's shard.
            outboxes: Links to the other holders, by rank.
            pacer: Decides when chunks go.
            max_repeated: With more than 1, a save waits until the last saved version is sealed.
            catch_up: Called with every version.
            pins: Pins the own slots for copies from a device.
        """
        super().__init__()
        self._session, self._client, self._gate = session, session.require_agent(), session.gate
        self._slots, self._outboxes = SlotRequests(session, session.rank), outboxes
        self._capture, self._manifest, self._layout = plan.capture, plan.packed, plan.layout
        self._pacer, self._max_repeated = pacer, max_repeated
        self._catch_up, self._pins = catch_up, pins
        self.counters = Counters()
        self._jobs: queue.SimpleQueue[CaptureJob | Plan | None] = queue.SimpleQueue()
        self._current: CaptureJob | None = None
        self._last_saved = 0
        self._copied_s = 0.0  # duration of the last copy into the own slot
        self._refused: str | None = None  # why a holder does not take the version under way
        self._peer_lost = False  # the holder had begun to take it
        self._left_out: tuple[int, str] | None = None  # the version that a holder has not taken, and why
        self._base = 0  # the version that the slot being filled had before
        self._kept: tuple[Range, ...] = ()  # ranges of the slot unchanged since version _base
        self._replicas: Sequence[Replica] = ()
        self._own, self._sends_outlines = plan.own, bool(plan.live)
        self._capture.watches_all = self._sends_outlines
        self._begun = self._before = 0  # the last version begun, and the one before
        self._thread = threading.Thread(target=self._run, name="gemini-replicator", daemon=True)

    def adopt_replicas(self, replicas: Sequence[Replica]) -> None:
        """Set the other ranks' shards that this rank fills as far as it can. Call before `start`."""
        self._replicas = replicas
        for replica in replicas:
            replica.pin_with(self.pin if self._pins is not None else None)
        self._capture.watches_all = bool(replicas) or self._sends_outlines

    def pin(self, shard: TensorShard) -> None:
        """Pin a shard's slots for copies from a device.

        Pinning takes some 0.1 s per GiB. Two calls must not run at the same time.
        """
        if self._pins is not None:
            self._pins.add(shard.slots)

    def start(self, shard: TensorShard) -> None:
        """Begin to take jobs, with the slots of `shard`."""
        self.shard = shard
        for replica in self._replicas:
            replica.adopt_plan(self._own, 0)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether an earlier version is still under way."""
        return self._current is not None and not self._current.done.is_set()

    def submit(self, job: CaptureJob) -> None:
        """Queue a job. The training calls this; at most one job waits behind the one in work."""
        self._current = job
        self._jobs.put(job)

    def adopt_plan(self, plan: Plan) -> None:
        """Adopt a plan for all later jobs. Its slots are no smaller. The training calls this."""
        plan.capture.watches_all = bool(self._replicas) or bool(plan.live)
        self._jobs.put(plan)

    def stop(self, timeout_s: float) -> bool:
        """Finish the queued jobs and say goodbye to the other holders.

        Returns:
            False if that took longer than timeout_s seconds.
        """
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._pins is not None:
            self._pins.close()
        return True

    def _run(self) -> None:
        while (job := self._wait_for_job()) is not None:
            if isinstance(job, Plan):
                self._adopt(job)
                continue
            try:
                self._save(job)
            except Exception as error:  # a failure of ours must not reach the training
                job.give_up()
                self._session.end_protection(f"{type(error).__name__}: {error}")
                return
            finally:
                job.left.set()
                job.done.set()
        for rank, box in list(self._outboxes.items()):
            try:
                box.announce_end()
            except LinkBroken as error:
                self._drop_link(rank, error, 0)

    def _wait_for_job(self) -> CaptureJob | Plan | None:
        """Return the next job.

        Meanwhile report a version that a holder has not taken, so that no rank waits for its seal. The report comes
        once nothing is missing any more: of a dead group's last version, living ranks may still make the copies.
        """
        well_since = clock.monotonic()
        while (left_out := self._left_out) is not None and self._session.protected:
            with suppress(queue.Empty):
                job = self._jobs.get(timeout=_LOOK_S)
                if not isinstance(job, Plan):
                    self._left_out = None  # the next version makes this one impossible
                return job
            now = clock.monotonic()
            well_since = now if self._gate.is_stuck() else well_since
            if now - well_since >= _WELL_S:
                self._session.report_version("skipped", *left_out)
                self._left_out = None
        return self._jobs.get()

    def _adopt(self, plan: Plan) -> None:
        assert self.shard is not None
        for replica in self._replicas:
            replica.adopt_plan(plan.own, plan.since)
        self._capture, self._manifest, self._layout = plan.capture, plan.packed, plan.layout
        self._sends_outlines = bool(plan.live)
        for slot in self.shard.slots:
            slot.has_manifest = False

    def _give_up(self, job: CaptureJob, reason: str, *, peer_lost: bool = False) -> None:
        job.give_up(peer_lost=peer_lost)
        self.counters.skipped += 1
        self.counters.reasons[reason] = self.counters.reasons.get(reason, 0) + 1

    def _skip(self, job: CaptureJob, reason: str) -> None:
        self._give_up(job, reason)
        self._session.record_incident("skipped", job.version, reason)

    def _save(self, job: CaptureJob) -> None:
        session = self._session
        if self._max_repeated > 1 and self._last_saved:
            self._gate.wait(self._last_saved, lambda: job.cancelled or job.urgent)
        try:
            slot_index, slot = self._begin_version(job)
        except (AgentLost, AgentRefused) as error:
            return self._skip(job, str(error))
        has_outline = self._sends_outlines and job.gaps is None and slot.has_manifest
        if has_outline:
            self._report_outline(job, slot_index, slot)
        if job.ready is None:  # no device: a device's copies run beside everything else
            self._pacer.wait_for_lull(job.version, self._copied_s, lambda: job.wanted or job.cancelled)
        if not job.start():
            self._slots.abort(job.version, slot_index)
            return self._skip(job, "the training did not wait for the slot")
        layout = self._layout
        area = slot.bytes[layout.tensor_offset : layout.tensor_offset + max(layout.tensor_bytes, 1)]
        stays = self._capture.find_unchanged(self._base) if self._base else frozenset()
        found = [(layout.tensor_offset + a, layout.tensor_offset + b) for a, b in self._capture.list_ranges(stays)]
        if self._base:
            found.append((layout.manifest_offset, layout.manifest_offset + layout.manifest_bytes))
        self._kept = tuple(choose_largest(merge_ranges(found)))
        # While ranks go on with different versions, a slot begun here would be missing for the home's version.
        together = not self._gate.degraded and self._gate.sealed >= (session.epoch, self._before)
        sharing = self._replicas if together else ()
        if self._replicas and not together:
            self._client.post(local.Unfilled(training=session.name, rank=session.rank, version=job.version))
        if not slot.has_manifest:
            self._capture.clear_padding(area)
        took_s = self._capture.copy(job, slot_index, area, stays)
        replicas = [replica for replica in sharing if replica.begin_fill(job, self._capture)]
        took_s += sum(replica.copy_pieces(job, self._capture) for replica in replicas)
        ended = clock.monotonic()
        began = ended - took_s
        self._pacer.copies.append((began, ended, layout.tensor_bytes))
        changed = self._capture.find_changed(job, slot_index, area)
        for replica in replicas:
            replica.end_fill(job, unchanged=not changed and job.is_untouched())
        self._copied_s = clock.monotonic() - began
        if changed:
            return self._declare_void(job, slot_index, changed)
        job.left.set()
        self._put_directory(job, slot)
        if self._sends_outlines and not has_outline:
            self._report_outline(job, slot_index, slot)
        return self._commit(job, slot_index, slot, began)

    def _put_directory(self, job: CaptureJob, slot: TensorSlot) -> None:
        """Put the manifest and the small state into the own slot."""
        if not slot.has_manifest:
            slot.put(self._layout.manifest_offset, self._manifest)
            slot.has_manifest = True
        slot.put(self._layout.small_offset, job.small)

    def _report_outline(self, job: CaptureJob, slot_index: int, slot: TensorSlot) -> None:
        """Send the agent the version's directory and small state, of which only the tensors are missing.

        Nodes that have the tensors as well need them, should all holders die before this version is complete.
        """
        layout = self._layout
        slot.put(layout.small_offset, job.small)
        self._client.post(
            local.OutlineWritten(
                training=self._session.name,
                rank=self._session.rank,
                version=job.version,
                slot=slot_index,
                small_bytes=len(job.small),
                areas=(layout.manifest_bytes, layout.tensor_bytes, layout.small_capacity),
                moment=job.moment,
            )
        )

    def _declare_void(self, job: CaptureJob, slot_index: int, changed: Sequence[str]) -> None:
        """Give the version up, because these tensors changed too early."""
        job.give_up()
        self._slots.abort(job.version, slot_index)
        self.counters.void += 1
        self._session.record_incident(
            "void",
            job.version,
            f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''}: changed "
            "after step() by something other than the optimizer; copied at step() from now on",
        )

    def _commit(self, job: CaptureJob, slot_index: int, slot: TensorSlot, began: float) -> None:
        """Complete the own slot with its header, bring it to the other holders and report the copy to the agent."""
        session, layout = self._session, self._layout
        stamp, used = Stamp(session.epoch, job.version), layout.small_offset + len(job.small)
        slot.put(0, pack_header(layout, len(job.small), stamp, session.rank, session.world, job.moment))
        self._pacer.begin_version(job.version)
        if self._gate.degraded or job.urgent:  # nobody waits, or it is urgent: send at once
            self._pacer.hurry()
        elif job.hurried:
            self._pacer.record_wait()
        self.counters.copy_s += clock.monotonic() - began
        began = job.copied_at = clock.monotonic()
        digest = self._send_to_holders(job.version, slot, used)
        job.arrived_at = clock.monotonic()
        self.counters.send_s += job.arrived_at - began
        if self._refused is not None:
            # The holder's slot pair may not have begun this version. The holder then cannot prove that the version
            # will never arrive. A copy completed here could never be abandoned, and no later version could begin.
            self._slots.abort(job.version, slot_index)
            self._left_out = job.version, self._refused
            return self._give_up(job, self._refused, peer_lost=self._peer_lost)
        # digest "": the commit record will have it
        slot.content = Content(session.epoch, job.version, used, digest)
        try:
            self._slots.report_landed(job.version, slot_index, used, digest)
        except (AgentLost, AgentRefused) as error:
            return self._skip(job, str(error))
        self._last_saved = job.version
        self.counters.saved += 1
        self.counters.spilled_bytes += self._pacer.spilled_bytes
        self._pacer.record_progress()
        return None

    def _begin_version(self, job: CaptureJob) -> tuple[int, TensorSlot]:
        """Return the version's slot and its index.

        Raises:
            AgentLost: The agent is gone.
            AgentRefused: The agent refuses.
        """
        assert self.shard is not None
        self._catch_up()
        if len(job.small) > self._layout.small_capacity:
            self._enlarge_for_small(len(job.small))
        elif self._layout.total != self.shard.total_bytes:
            self._enlarge_slots(self._layout)
        index = self._slots.begin(job.version)
        self.release(self._gate.sealed)
        self._before, self._begun = self._begun, job.version
        if self._pins is not None:
            others = [shard for replica in self._replicas for shard in replica.shards]
            self._pins.release_others([slot for shard in (self.shard, *self.former, *others) for slot in shard.slots])
        slot = self.shard.slots[index]
        known = slot.content
        self._base = known.version if slot.has_manifest and known.epoch == self._session.epoch else 0
        slot.content = Content()
        return index, slot

    def _enlarge_for_small(self, small_bytes: int) -> None:
        """Get larger slots, because the small state has outgrown its place."""
        old = self._layout
        self._enlarge_slots(SlotLayout.plan(old.manifest_bytes, old.tensor_bytes, choose_small_capacity(small_bytes)))

    def _enlarge_slots(self, layout: SlotLayout) -> None:
        """Get slots of this layout from the agent.

        Raises:
            AgentLost: The agent is gone.
            AgentRefused: The agent refuses.
        """
        shard = register(self._session, self._session.rank, layout.total)
        shard.populate()
        self.pin(shard)
        self.outgrow(shard)
        self._layout = layout

    def _drop_link(self, rank: int, error: LinkBroken, version: int) -> None:
        box = self._outboxes.get(rank) if isinstance(error, VersionLost) else self._outboxes.pop(rank, None)
        if box is not None:
            self._session.record_incident("degraded", version, f"the link to rank {rank} broke: {error}")
            if version:
                self._gate.degrade(f"nothing can be sealed without rank {rank}'s copies", gone=True)
        if isinstance(error, VersionLost):
            # Not for a link that is broken for good: this may be the version to resume from.
            self._refused, self._peer_lost = f"rank {rank} has lost this version", True

    def _record_refusal(self, rank: int, version: int) -> None:
        self._refused = f"rank {rank} could not take this version"
        self._session.record_incident("refused", version, self._refused)
        self._gate.degrade(f"version {version} cannot be sealed without rank {rank}'s copy")

    def _send_to_holders(self, version: int, slot: TensorSlot, used: int) -> str:
        """Send the slot's used bytes to every holder that accepts them, one holder after the other.

        This is Algorithm 2, lines 21 to 23.

        Returns:
            The digest of the bytes; "" where the agents alone make it.
        """
        pacer = self._pacer
        for replica, rank, box in self._offer_to_holders(version, used):
            assert isinstance(box, GrantOutbox)
            total = used - size_of(box.present)
            self.counters.kept_bytes += used - total
            try:
                pacer.deliver(replica, total, box)
                box.finish("")
                pacer.record_delivery(replica)
                self._count_sent(total)
            except LinkBroken as error:
                self._drop_link(rank, error, version)
            pacer.record_progress()
        return ""

    def _count_sent(self, sent: int) -> None:
        self.counters.sent_bytes += sent
        self._pacer.sent.append(sent)

    def _offer_to_holders(self, version: int, used: int) -> Sequence[tuple[int, int, Outbox]]:
        """Offer the version to every holder.

        Returns:
            (replica, rank, box) of each holder that accepts the version.
        """
        accepting = []
        self._refused, self._peer_lost = None, False
        for replica, (rank, box) in enumerate(list(self._outboxes.items())):
            try:
                if box.offer(self._build_head(replica, version, used)):
                    accepting.append((replica, rank, box))
                else:
                    self._record_refusal(rank, version)
            except LinkBroken as error:
                self._drop_link(rank, error, version)
            self._pacer.record_progress()
        return accepting

    def _build_head(self, replica: int, version: int, used: int) -> Head:
        """Return what is offered to the holder of this replica."""
        return Head(version, used, self._layout.total, base=self._base, kept=self._kept)
