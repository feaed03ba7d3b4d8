"""The engine that brings versions to their holders. It runs from the first `step()` to `close()`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.client import stats_messages
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content, SlotMappings
from gemini_hpc.client.session import RankSession
from gemini_hpc.core.recovery_plan import INHERITED_EPOCH
from gemini_hpc.format.slot_header import HEADER_BYTES, parse_header
from gemini_hpc.node import priority
from gemini_hpc.train.device import pins, streams
from gemini_hpc.train.device.memory import TensorShard, TensorShardOwner, TensorSlot, register
from gemini_hpc.train.device.pins import Pins
from gemini_hpc.train.planning import FirstPlan, Planning
from gemini_hpc.train.replication.parity import StripeParity
from gemini_hpc.train.replication.replica import Replica
from gemini_hpc.train.replication.replicator import Replicator
from gemini_hpc.train.replication.rescuer import Frozen, Rescuer
from gemini_hpc.train.replication.reserved import Reserved
from gemini_hpc.train.schedule.async_collectives import AsyncCollectives
from gemini_hpc.train.schedule.capture_cost import find_costliest
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.interval_controller import IntervalController
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.planner import LEAST_CHUNK_BYTES, Planner
from gemini_hpc.train.schedule.stats_reporter import StatsReporter
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state import collectives
from gemini_hpc.train.state.capture import CaptureJob
from gemini_hpc.train.state.layout import Plan
from gemini_hpc.train.state.ownership import Ownership
from gemini_hpc.train.state.tree import StateTree
from gemini_hpc.train.transport.base import Outbox
from gemini_hpc.train.transport.host import HostTransport
from gemini_hpc.wire import local
from gemini_hpc.wire.progress_page import Progress

if TYPE_CHECKING:
    from gemini_hpc.train.nccl.driver import Driver
    from gemini_hpc.train.nccl.entry import OverNccl
    from gemini_hpc.train.nccl.receiver import Receiver

_ONE_LIVES = (
    "one replica: no copies are sent; a lost node's state is copied from the ranks of other nodes, but not after a "
    "failure while an optimizer steps (--gemini-replicas=2 keeps copies)"
)
_ONE_ALONE = (
    "one replica, and no other node has the same state: the loss of a node loses what is not on the tier "
    "(--gemini-replicas=2 keeps copies)"
)


class SaveEngine:
    """A rank's means of saving: its plan, and the engine that runs once all ranks have a plan.

    Attributes:
        planning: Plan of which rank keeps which state.
        pacer: Pacer of the thread that sends.
        transport: Links over the agents; None before they are connected, and where no other node keeps copies.
        over: This rank's end of copies from GPU to GPU, if NCCL is in use.
        group: Our own group for the main thread's collectives. In the training's group, a rank that calls another
            collective would join one of ours.
        own_copy: The loaded copy.
        running: The running engine; None before the first plan.
    """

    def __init__(
        self,
        session: RankSession,
        tree: StateTree,
        traffic: Traffic,
        *,
        ranks: collectives.TorchRanks,
        ownership: Ownership,
        max_repeated: int,
    ) -> None:
        self.session, self.traffic, self.ranks, self.max_repeated = session, traffic, ranks, max_repeated
        self.stateful = tree.stateful
        self.group: dist.ProcessGroup | None = None
        self.planning = Planning(session, tree, traffic, ownership, lambda: self.group)
        self.pacer = Pacer(traffic.chunk_bytes or LEAST_CHUNK_BYTES, traffic.buffers)
        self.transport: HostTransport | None = None
        self.over: OverNccl | None = None
        self.own_copy = Content()
        self.running: RunningEngine | None = None
        session.keepers = self._list_keepers

    @property
    def under_way(self) -> bool:
        """Return whether a version is still being copied or sent."""
        return self.running is not None and self.running.replicator.busy

    @property
    def pushed(self) -> bool:
        """Return whether the agents carry the copies."""
        return self.transport is not None and self.over is None

    def _list_keepers(self) -> list[TensorShardOwner]:
        """Return the replicator and the receivers, which hold memory of the agent."""
        return [] if self.running is None else [self.running.replicator, *self.running.receivers]

    def connect(self) -> None:
        """Create our group and the transport, if there are none yet. Collective, after the ranks have joined."""
        session = self.session
        if not session.protected or session.world == 1:
            return
        if self.group is None:
            self.group = collectives.build_own_group(self.ranks.group)
        if self.transport is None and session.welcome.replicas > 1:
            self.transport = HostTransport(session)
            if self.traffic.transport == "nccl" and session.redundancy.parity:
                odd = 'transport="nccl" has no effect with parity, whose bytes travel over host'
                session.record_finding(odd)
                session.say_once(odd)

    def start(self, first: FirstPlan, frozen: Frozen) -> RunningEngine:
        """Create all parts and reserve the memory in the background. Collective as far as NCCL is requested.

        Do not call it while another thread is inside a collective.

        Args:
            first: The first plan.
            frozen: Keeps the optimizers from changing tensors, see `Rescuer`.
        """
        if self.traffic.transport == "nccl" and self.transport is not None and not self.session.redundancy.parity:
            self._join_nccl(first)
        self.running = RunningEngine(self, first, frozen)
        self.running.arming.start()
        return self.running

    def _join_nccl(self, first: FirstPlan) -> None:
        """Create this rank's NCCL endpoint, or report once why copies do not go over NCCL. Collective."""
        from gemini_hpc.train.nccl import entry

        session = self.session
        gather_words = partial(collectives.gather_bytes, group=self.group)
        self.over, reason = entry.join(session, first.tensors, first.plan.layout, gather_words, self.ranks.group)
        if reason:
            session.record_finding(f"transport: {reason}")
            session.say_once(f"copies go over host, not over NCCL: {reason}")

    def arm(self) -> bool:
        """Agree that memory is reserved everywhere, and return whether the training is protected now.

        Collective, in each `step()` until memory is reserved everywhere. All ranks then begin with the same version:
        a version that some ranks skip can never be sealed.
        """
        session, verdict = self.session, self.session.verdict
        words = [verdict.vote]
        if session.world > 1:
            words = collectives.gather_word(verdict.vote, self.group)
        if all(word == 1 for word in words):
            if verdict.record_ready():
                session.state = "protected"
            return session.protected
        if -1 in words:
            session.state = "unprotected"
            if not verdict.reject():
                session.record_finding(f"rank {words.index(-1)} could not reserve its memory")
        return False

    def shut_down(self, patience_s: float) -> None:
        """Stop the threads, see `RunningEngine.shut_down`."""
        if self.running is not None:
            self.running.shut_down(patience_s)
        else:
            self.session.ending = True

    def wait_ended(self, patience_s: float) -> bool:
        """Wait for the threads, once neither links nor the agent block them. Return whether all have ended.

        Python aborts if it exits while a thread is at work in torch.

        Args:
            patience_s: Longest wait in seconds.
        """
        return self.running is None or self.running.wait_ended(patience_s)


class RunningEngine:
    """The threads that copy, send and receive, with the controller that schedules them.

    Attributes:
        plan: The plan that is followed now.
        replicator: Sender of this rank's shard to its holders.
        receivers: Receivers of other ranks' shards.
        controller: Schedule of versions and chunks.
        driver: Copies from GPU to GPU, if NCCL is in use.
        arming: Thread that reserves the memory and starts the others.
    """

    def __init__(self, engine: SaveEngine, first: FirstPlan, frozen: Frozen) -> None:
        session, plan, over, transport = engine.session, first.plan, engine.over, engine.transport
        self._session, self._engine, self.plan = session, engine, plan
        self.driver: Driver | None = None
        replicates: Callable[..., Replicator] = Replicator
        outboxes: Mapping[int, Outbox] = {}
        if over is not None:
            self.driver = over.drive(engine.traffic, plan.capture, engine.pacer)
            session.on_lost.append(self.driver.on_protection_lost)
            replicates, outboxes = over.replicator, over.build_outboxes()
        elif transport is not None:
            outboxes = {rank: transport.build_outbox(rank) for rank in session.outgoing}
        self.replicator = replicates(
            session,
            plan,
            dict(outboxes),
            engine.pacer,
            max_repeated=engine.max_repeated,
            catch_up=self._map_larger_slots,
            pins=self._create_pins() if over is None else None,
        )
        if over is None:
            engine.planning.allow_replanning(first.gathered, plan.alone, self.adopt_plan)
        self._parity: StripeParity | None = None
        self.receivers: list[Receiver | Reserved] = []
        self.controller = self._create_controller()
        if session.redundancy.parity:
            self._parity = StripeParity(session)
            session.on_rejoin.append(self._parity.register_again)
        elif over is not None:
            self.receivers = [*over.build_receivers()]
        elif transport is not None:
            reserved = [Reserved(session, rank) for rank in session.incoming]
            self.receivers = [*reserved]
            self.replicator.adopt_replicas([Replica(session, one, self._record_difference) for one in reserved])
        self._rescuer: Rescuer | None = None
        if plan.live and over is None:
            self._rescuer = Rescuer(session, frozen, self._hurry_copy, lambda: self.plan)
        self._report_live_nodes()
        if session.welcome.replicas == 1 and len(set(session.homes)) > 1:
            session.say_once(_ONE_LIVES if self._rescuer is not None else _ONE_ALONE)
        if self.driver is not None:
            keepers = {r.rank: r for r in self.receivers}
            self.driver.open({session.rank: self.replicator, **keepers})
        self.arming = threading.Thread(target=self._reserve, args=(first.totals,), name="gemini-arming", daemon=True)
        self._listening = False

    def _create_pins(self) -> Pins | None:
        """Return the pinned buffers for copies from a device, or None."""
        pin = pins.choose_pin(self.plan.capture.device)

        def report_refusal(reason: str) -> None:
            slow = f"copies from the device are slow, because they pass through other memory: {reason}"
            message = f"rank {self._session.rank}: {slow}"
            self._session.record_finding(message)
            self._session.say(message)

        return Pins(pin, report_refusal) if pin is not None else None

    def _create_controller(self) -> IntervalController:
        session, engine, over, on_device = self._session, self._engine, self._engine.over, self.plan.capture.on_device
        places = dict(zip(engine.ranks.members, session.homes, strict=True))
        monitor = CollectiveMonitor(
            lambda ranks: len({places.get(rank, -1 - rank) for rank in ranks}) != 1,
            device=streams.choose_streams(on_device),
            savers=frozenset(engine.ranks.members),
        )
        session.collectives = lambda: Progress(
            launched=monitor.launched,
            flying=monitor.count_in_flight(),
            usual=monitor.launched_before,
            collective=monitor.newest,
        )
        build_planner: Callable[..., Planner] = partial(Planner, whole=engine.pushed, on_host=not on_device)
        if over is not None:
            build_planner = over.install_planner(monitor)
        reporter = StatsReporter(session.require_agent(), session.name, session.rank, self._build_profile_key())
        kept = reporter.recall() if session.outgoing else None
        copy_bytes, meter = self._compute_copy_bytes(), engine.pacer.meter
        words = None
        if engine.group is not None:
            words = AsyncCollectives(engine.group, monitor.track_round, monitor.has_caught_up)
        return IntervalController(
            session,
            build_planner(engine.traffic, session.rank, session.outgoing, copy_bytes, meter, kept),
            words,
            monitor,
            engine.pacer,
            reporter,
            engine.planning.replanning,
            partial(find_costliest, engine.stateful),
        )

    def _build_profile_key(self) -> str:
        """Return the key under which a training profile is stored.

        The key uses places, not node names: a replacement is a node of the same kind. If it is not, the profile does
        not hold.
        """
        over = "nccl " if self.driver is not None else ""
        return stats_messages.build_profile_key(over + self.plan.packed.hex(), map(str, self._session.homes))

    def _compute_copy_bytes(self) -> int:
        """Return the network bytes of one copy.

        With parity, return the average bytes that go to one other rank of the group.
        """
        stays = self.plan.frozen_bytes if self._engine.pushed else 0
        whole = self.plan.layout.small_offset + self.plan.layout.small_capacity // 2 - stays
        blocks = self._session.redundancy.parity
        return whole * blocks // len(self._session.outgoing) if blocks else whole

    def _report_live_nodes(self) -> None:
        """Report to the agent the nodes whose ranks have this rank's shard in their tensors."""
        if self._rescuer is None:
            return
        session = self._session
        nodes = sorted({session.homes[rank] for rank in self.plan.live} - {session.node_rank})
        after = [n for n in nodes if n > session.node_rank]
        nearest = [*after, *(n for n in nodes if n < session.node_rank)][: local.MAX_LIVE_NODES]
        self._rescuer.report_live_replicas(tuple(nearest))

    def _hurry_copy(self, job: CaptureJob) -> None:
        """Hurry the copy of a version. Called from the rescuer's thread."""
        job.urgent = job.wanted = True
        self._engine.pacer.hurry()

    def adopt_plan(self, plan: Plan) -> None:
        """Follow another plan, from the next version on."""
        self.plan = plan
        self.replicator.adopt_plan(plan)
        self._report_live_nodes()
        self.controller.resize(self._compute_copy_bytes(), self._build_profile_key())

    def _map_larger_slots(self) -> None:
        for receiver in self.receivers:
            if isinstance(receiver, Reserved):
                with suppress(AgentLost, AgentRefused):  # a later version fills the shard
                    receiver.catch_up()

    def _record_difference(self, why: str) -> None:
        """Record that a copy made here differs from its home's shard. Called from the saving thread."""
        self._session.record_incident("differs", self._session.version, why)
        if self._engine.planning.replanning is not None:
            self._engine.planning.replanning.request_comparison()

    # ---- memory ----------------------------------------------------------------------------------------

    def _reserve(self, totals: list[int]) -> None:
        """Reserve and map the memory of all shards that this rank fills, and start the threads.

        The slots that no version fills at first are mapped last, when the training is protected already.
        """
        session, on_device = self._session, self.plan.capture.on_device
        mappings, later = SlotMappings(), list[TensorSlot]()

        def add(shard: TensorShard) -> TensorShard:
            """Begin to map what the first versions fill at home, while the agent takes memory for the next shard."""
            if not shard.pushed:
                slots = shard.list_slots_by_age()
                first = len(slots) if on_device else 1  # a device copies to pinned slots only
                mappings.start(slots[:first])
                later.extend(slots[first:])
            return shard

        try:
            try:
                shards = [add(register(session, session.rank, totals[session.rank]))]
                if self._parity is not None:
                    self._parity.reserve(totals)
                for receiver in self.receivers:
                    if session.ending:
                        return
                    rank, pushed = receiver.rank, isinstance(receiver, Reserved)
                    shards.append(add(register(session, rank, totals[rank], pushed=pushed)))
            finally:
                mappings.wait()
            if session.ending:
                return
            self.replicator.pin(shards[0])
            self._recognise(shards[0])
        except Exception as error:
            if self._listen([]):
                known = isinstance(error, (AgentLost, AgentRefused, ValueError, OSError))
                session.end_protection(str(error) if known else f"{type(error).__name__}: {error}")
            return
        if self._listen(shards):
            session.verdict.record_prepared()
            priority.lower()
            for slot in later:
                if session.ending:
                    return
                slot.populate(awaited=False)

    def _listen(self, shards: list[TensorShard]) -> bool:
        """Start the threads, unless the end came first.

        A thread that starts waiting for others after the end would still be blocked when Python exits, and Python
        would abort the process.
        """
        with self._session.verdict.lock:
            if self._session.ending:
                return False
            if shards:
                self.replicator.start(shards[0])
            if shards and self._rescuer is not None:
                self._rescuer.start()
            for number, receiver in enumerate(self.receivers, 1):
                receiver.start(shards[number] if shards else None)
            self._listening = True
        return True

    def _recognise(self, shard: TensorShard) -> None:
        """Recognise the resumed version in a slot, for a hand-back.

        After a resume, the memory mapped again may hold the version resumed from.
        """
        known = self._engine.own_copy
        for slot in shard.slots:
            if known.digest and slot.bytes.numel() >= known.used:
                try:
                    header = parse_header(slot.bytes[:HEADER_BYTES].numpy().tobytes(), slot.bytes.numel())
                except ValueError:
                    continue
                taken = known.epoch == INHERITED_EPOCH and header.stamp.version == known.version
                if taken or header.stamp == (known.epoch, known.version):
                    slot.content = Content(known.epoch, known.version, known.used, known.digest)

    # ---- the end ---------------------------------------------------------------------------------------

    def shut_down(self, patience_s: float) -> None:
        """Stop the threads: first peacefully (the other ranks say goodbye too), then by cutting the links.

        Args:
            patience_s: Seconds for the peaceful part.
        """
        deadline, transport, over = clock.monotonic() + patience_s, self._engine.transport, self._engine.over
        self.controller.close()
        if self.driver is not None:
            self.driver.finish(orderly=patience_s > 0)
        if self.arming.is_alive():
            self.arming.join(patience_s)
        with self._session.verdict.lock:
            self._session.ending = True
            quiet = patience_s > 0 and self._listening
        self._engine.pacer.end()
        quiet = self.replicator.stop(max(0.0, deadline - clock.monotonic())) and quiet
        for receiver in self.receivers:
            quiet = receiver.join(max(0.0, deadline - clock.monotonic())) and quiet
        if not quiet:
            for part in (transport, over, self.driver):
                if part is not None:
                    part.interrupt()
            self.replicator.stop(1.0)
            for receiver in self.receivers:
                receiver.join(1.0)
        if self._rescuer is not None:
            self._rescuer.close(1.0)
        if self.driver is not None:
            self.driver.close()

    def wait_ended(self, patience_s: float) -> bool:
        """Wait for the threads, see `SaveEngine.wait_ended`."""
        deadline = clock.monotonic() + patience_s

        def count_seconds_left() -> float:
            return max(0.0, deadline - clock.monotonic())

        if self.arming.is_alive():
            self.arming.join(count_seconds_left())
        ended = self.replicator.stop(count_seconds_left()) and not self.arming.is_alive()
        ended = self.controller.await_round(count_seconds_left()) and ended
        ended = (self._rescuer is None or self._rescuer.close(count_seconds_left())) and ended
        return all(receiver.join(count_seconds_left()) for receiver in self.receivers) and ended
