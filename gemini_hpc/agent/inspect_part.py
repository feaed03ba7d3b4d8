"""An agent's part of the output of `gemini-hpc inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.cpu_use import CpuUse
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.restart_state import StateFile
from gemini_hpc.agent.stats_store import StatsStore
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.agent.transfer.rdma import Rdma
from gemini_hpc.wire import control_page, inspect_schema

_EVENTS = 200
_STATES = {
    control_page.STATE_ARMING: "arming",
    control_page.STATE_PROTECTED: "protected",
    control_page.STATE_DEGRADED: "degraded",
    control_page.STATE_FROZEN: "recovering",
}


class InspectView:
    """An agent's view of the job, as `gemini-hpc inspect` shows it."""

    def __init__(
        self,
        context: AgentContext,
        replicas: Replicas,
        saver: Saver,
        stats: StatsStore,
        cpu: CpuUse,
        state: StateFile,
        rdma: Rdma,
        *,
        list_live_ranks: Callable[[str], tuple[int, ...]],
    ) -> None:
        """Create the view.

        Args:
            context: The agent's context.
            replicas: The agent's copies.
            saver: Saver of versions to the tier.
            stats: Statistics of the ranks.
            cpu: The processors that the agent uses.
            state: File of the recovery state.
            rdma: The agent's device for RDMA.
            list_live_ranks: Returns the ranks of a training whose shards could be copied from live state here.
        """
        self._identity, self._membership, self._log = context.identity, context.membership, context.events
        self._trainings, self._store, self._rejections = replicas.trainings, replicas.store, replicas.rejections
        self._saver, self._stats, self._cpu, self._state = saver, stats, cpu, state
        self._rdma, self._list_live_ranks = rdma, list_live_ranks

    def _describe_training(self, training: Training) -> inspect_schema.TrainingState:
        sealed, pace = training.sealed, None
        state = "finished" if training.succeeded else _STATES.get(training.page.state, "unknown")
        rejected = self._rejections.list_sentences(training.name)
        trouble = training.trouble if state in ("arming", "protected", "degraded") else ""
        if training.present and not self._membership.detached:
            pace = training.pace.build_state()
        if pace is not None:
            pace = msgspec.structs.replace(pace, stalled_s=self._identity.settings.stalled_s)
        return inspect_schema.TrainingState(
            name=training.name,
            world=training.world or training.chosen_world,
            sealed=sealed,
            state="degraded" if trouble else state,
            ranks=tuple(sorted(training.greeted)),
            note="; ".join(filter(None, (trouble, training.note or "; ".join(training.lost)[:500], *rejected))),
            traffic=self._stats.list_summaries(training.name, training.greeted),
            tier=self._saver.describe_saves(training.name),
            pace=pace,
            hung=training.hung[:500],
            live=self._list_live_ranks(training.name),
        )

    def _list_held_slots(self) -> Iterable[inspect_schema.HeldSlot]:
        for shard in self._store.list_all():
            for index, slot in enumerate(shard.pair.slots):
                if shard.memory[index].fd < 0:
                    continue  # the slot was trimmed
                yield inspect_schema.HeldSlot(
                    training=shard.training,
                    rank=shard.rank,
                    world=shard.world,
                    home=shard.home,
                    slot=index,
                    state=slot.state,
                    stamp=slot.stamp,
                    bytes=shard.bytes,
                    used=slot.bytes_used,
                    since=shard.since[index],
                    verified=shard.verified[index],
                    members=tuple(sorted(shard.parity.homes.items())) if shard.parity is not None else (),
                    blocks=shard.parity.blocks if shard.parity is not None else 1,
                )

    def build_part(
        self, request: int, kept_until: float, record: inspect_schema.RecordAsk | None = None
    ) -> inspect_schema.InspectPart:
        """Return this node's view of the job and, on request, the record of one rank.

        The memory is freed at `kept_until`, unless the job comes back (monotonic seconds).
        """
        identity, membership, budget = self._identity, self._membership, self._store.budget
        incarnation = membership.incarnation
        mesh = incarnation.mesh if incarnation is not None else None
        stage = incarnation.rounds.stage if incarnation is not None else "idle"
        plan = incarnation.rounds.plan if incarnation is not None else None
        trouble = incarnation.rounds.trouble if incarnation is not None and not membership.detached else ""
        unwritten = f"the agent cannot write its recovery state: {self._state.problem}" if self._state.problem else ""
        kept = membership.detached and budget.taken_bytes > 0
        return inspect_schema.InspectPart(
            host=identity.node,
            job=identity.job,
            uid=identity.uid,
            restart=max(membership.restart, 0),
            replicas=membership.replicas,
            parity=membership.redundancy.parity,
            epoch=membership.epoch,
            round=membership.round,
            state="detached" if membership.detached else stage,
            hosts=membership.hosts,
            noderanks=membership.noderanks,
            address=identity.address or identity.settings.format_address(identity.node),
            interface=identity.interface,
            port=identity.port,
            memory_bytes=budget.taken_bytes,
            memory_cap_bytes=budget.cap_bytes,
            trainings=tuple(self._describe_training(t) for t in self._trainings),
            held=tuple(self._list_held_slots()),
            events=tuple(self._log.events[-_EVENTS:]),
            suspects=tuple(sorted(mesh.list_silent() - mesh.dead)) if mesh is not None else (),
            dead=tuple(sorted(mesh.dead)) if mesh is not None else (),
            request=request,
            record=None if record is None else self._stats.build_record(record),
            problem="; ".join(filter(None, (unwritten, self._saver.problem))),
            unprotected=trouble,
            kept_until=clock.time() + max(0.0, kept_until - clock.monotonic()) if kept else 0.0,
            spares=incarnation.view.spares if incarnation is not None else 0,
            without=membership.lost,
            after=incarnation.attach.after if incarnation is not None else 0,
            taken=tuple(sorted(membership.takeover.stamps.items())) if membership.takeover is not None else (),
            not_taken=membership.takeover.lost if membership.takeover is not None else "",
            domains=plan.domains if plan is not None else None,
            cpu=self._cpu.build_state(),
            rdma=self._rdma.state,
        )
