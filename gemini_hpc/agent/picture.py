"""One agent's part of what `gemini-hpc inspect` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gemini_hpc import clock
from gemini_hpc.wire import page, picture

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent
    from gemini_hpc.agent.trainingset import TrainingSet

_STATES = {
    page.STATE_ARMING: "arming",
    page.STATE_PROTECTED: "protected",
    page.STATE_DEGRADED: "degraded",
    page.STATE_FROZEN: "recovering",
}


def _set(agent: Agent, training: TrainingSet) -> picture.SetState:
    sealed = training.sealed
    state = "finished" if training.succeeded else _STATES.get(training.page.state, "unknown")
    rejected = agent.rejections.sentences(training.name)
    trouble = training.trouble if state in ("arming", "protected", "degraded") else ""
    return picture.SetState(
        name=training.name,
        world=training.world or training.chosen_world,
        sealed=None if sealed is None else (sealed.epoch, sealed.version),
        state="degraded" if trouble else state,
        ranks=tuple(sorted(training.greeted)),
        note="; ".join(filter(None, (trouble, training.note or "; ".join(training.lost)[:500], *rejected))),
        traffic=agent.tellings.states(training.name, training.greeted),
        tier=agent.drains.state(training.name),
        pace=_pace(agent, training),
    )


def _pace(agent: Agent, training: TrainingSet) -> picture.PaceState | None:
    state = training.pace.state() if training.present and not agent.detached else None
    return None if state is None else msgspec.structs.replace(state, stalled_s=agent.settings.stalled_s)


def inspect_part(agent: Agent, request: int, record: picture.RecordAsk | None = None) -> picture.InspectPart:
    """Everything that this node can tell of the job; beside it, if asked for, what one rank has recorded."""
    held = []
    for shard in agent.store:
        for index, slot in enumerate(shard.pair.slots):
            held.append(
                picture.HeldSlot(
                    set=shard.set,
                    rank=shard.rank,
                    world=shard.world,
                    home=shard.home,
                    slot=index,
                    state=slot.state,
                    stamp=None if slot.stamp is None else (slot.stamp.epoch, slot.stamp.version),
                    bytes=shard.bytes,
                    used=slot.bytes_used,
                    since=shard.since[index],
                    verified=shard.verified[index],
                )
            )
    rounds, mesh = agent.rounds, agent.mesh
    unwritten = f"its recovery state cannot be written: {agent.state.problem}" if agent.state.problem else ""
    kept = agent.detached and agent.budget.taken_bytes > 0
    return picture.InspectPart(
        host=agent.node,
        job=agent.job,
        uid=agent.uid,
        restart=max(agent.restart, 0),
        replicas=agent.replicas,
        epoch=agent.epoch,
        round=rounds.round if rounds is not None else 0,
        state="detached" if agent.detached else (rounds.stage if rounds is not None else "idle"),
        hosts=agent.hosts,
        noderanks=agent.noderanks,
        address=agent.address or agent.address_of(agent.node),
        interface=agent.interface,
        port=agent.port,
        memory_bytes=agent.budget.taken_bytes,
        memory_cap_bytes=agent.budget.cap_bytes,
        sets=tuple(_set(agent, t) for t in agent.sets),
        held=tuple(held),
        events=tuple(agent.events[-200:]),
        suspects=tuple(sorted(mesh.silent() - mesh.dead)) if mesh is not None else (),
        dead=tuple(sorted(mesh.dead)) if mesh is not None else (),
        request=request,
        record=None if record is None else agent.tellings.record(record),
        problem="; ".join(filter(None, (unwritten, agent.drains.problem))),
        unprotected=rounds.trouble if rounds is not None and not agent.detached else "",
        kept_until=clock.time() + max(0.0, agent.detached_at + agent.kept_s - clock.monotonic()) if kept else 0.0,
    )
