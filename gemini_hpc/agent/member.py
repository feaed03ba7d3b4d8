"""What an agent does at each step of a recovery round: the host that `rounds.Rounds` asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from gemini_hpc.agent import mapfile, outside, successor
from gemini_hpc.agent.ports import master_port
from gemini_hpc.core import placement
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import bounds, local, peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Rejection, Tier

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent


# How long the tier is looked for: while ranks wait, which then ask again; while the prologs wait.
_LAUNCHED_S, _PROLOG_S, _PROLOG_PART = 20.0, 3.0, 0.3


class Member:
    """One agent among those that agree on map, epoch and versions; it lives as long as the agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def job(self) -> int:
        """The job's id."""
        return self._agent.job

    @property
    def restart(self) -> int:
        """The incarnation that the agent is in."""
        return self._agent.restart

    @property
    def instance(self) -> str:
        """Tells this agent from its predecessors and successors."""
        return self._agent.instance

    @property
    def replicas(self) -> int:
        """Holders of a shard."""
        return self._agent.replicas

    def send(self, host: str, message: Message) -> bool:
        """To one peer, if there is a link."""
        return self._agent.send(host, message)

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        """One event."""
        self._agent.log(name, version=version, detail=detail)

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers of other launches, void what is half filled."""
        self._agent.sets.freeze()
        self._agent.scavenge.reset()
        self._agent.drains.freeze()
        self._agent.incoming.stop()
        self._agent.service.drop_others(step)

    async def inventory(self, *, verify: bool = True) -> peer.InventoryRecord:
        """Verify what is held (unless whoever pulls it will), and tell."""
        agent = self._agent
        await self.cease()
        for shard in list(agent.store):
            shard.pair.void_filling()
            for index in (0, 1):
                record = shard.record(index)
                if record is None or not verify:
                    continue
                digest = await asyncio.to_thread(shard.memory[index].digest, record.used)
                if not shard.settle(index, digest):
                    self.log("damaged", version=record.stamp[1], detail=f"shard {record.rank}: copy dropped")
        sealed = ((s.name, s.sealed) for s in agent.sets)
        return peer.InventoryRecord(
            host=agent.node,
            noderanks=agent.noderanks or None,
            map_restart=agent.map_restart,
            max_epoch=agent.epoch,
            copies=tuple(agent.store.copies()),
            sealed=tuple((name, (s.epoch, s.version)) for name, s in sealed if s is not None),
            port=agent.port,
            instance=agent.instance,
            unreadable=tuple(sorted(agent.drains.unreadable)),
            unbroken=not agent.again,
            doubt=agent.doubt,
            rejected=agent.rejections.all,
        )

    async def cease(self) -> None:
        """Nothing is written to, or read from, the slots by transfers when this returns."""
        agent = self._agent
        agent.incoming.stop()
        agent.outgoing.stop()
        await agent.pulls.cease()
        await agent.incoming.ended()
        await agent.outgoing.ended()

    async def outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """What agents hold on nodes that the job has left."""
        return await outside.inventories(self._agent, former)

    @property
    def tier(self) -> bool:
        """Whether the job has a tier."""
        return bool(self._agent.drains.tier)

    @property
    def chosen(self) -> Tier:
        """What the program has chosen of it."""
        return self._agent.drains.chosen

    def choose(self, tier: Tier) -> bool:
        """Take what a program has chosen; False where it changes nothing."""
        heeded = self._agent.drains.heeds(tier)
        if heeded:
            self._agent.drains.chosen = tier
            self._agent.spawn(self._agent.drains.glance())
        return heeded

    async def stored(self, without: Iterable[tuple[str, bounds.Stamp]], *, launched: bool) -> tuple[Manifest, ...]:
        """The newest version of each set on the tier, but for these. launched: ranks wait for it, else the prologs.
        Raises `TierFailed` where it cannot be seen in time."""
        within_s = _LAUNCHED_S if launched else min(_PROLOG_S, _PROLOG_PART * self._agent.settings.attach_timeout_s)
        return await self._agent.drains.stored(without, within_s)

    def rejected(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Know of these rejected versions, too; all that are known."""
        return self._agent.rejections.learn(found)

    def begun(self, number: int, step: str) -> None:
        """Coordinator: keep on disk that this number is taken."""
        state = self._agent.state.state
        if state is not None:
            self._keep(msgspec.structs.replace(state, begun=number, step=step))

    def apply(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, keep on disk that it is so, begin to pull."""
        agent = self._agent
        keep = {s.name: tuple(Stamp(*stamp) for stamp in s.keep) for s in plan.sets}
        for shard in agent.store:
            shard.registered_round = shard.resumed_round = 0  # round numbers begin anew with each incarnation
            shard.pair.void_except(*keep.get(shard.set, ()))
        self._adopt(plan)
        mine = agent.noderanks[agent.node]
        for shard in agent.store.shards.values():
            if mine in placement.holders(shard.home % len(agent.hosts), len(agent.hosts), agent.replicas):
                shard.resumed_round = plan.round
        self._took(plan, live=False)
        agent.pulls.start([o for o in plan.pulls if o.dest == agent.node])

    def _adopt(self, plan: peer.PlanDown) -> None:
        agent = self._agent
        assert agent.mesh is not None
        agent.drains.chosen, agent.doubt = plan.tier, plan.doubt
        agent.rejections.learn(plan.rejected)
        agent.drains.forget(agent.rejections.covers)
        agent.noderanks, agent.map_restart, agent.epoch = dict(plan.noderanks), agent.restart, plan.epoch
        agent.mesh.ports.update({h: p for h, p in plan.ports.items() if h != agent.node})
        by_rank = {rank: host for host, rank in agent.noderanks.items()}
        mine, n = agent.noderanks[agent.node], len(agent.hosts)
        group = set(placement.holders(mine, n, agent.replicas)) | set(placement.holds_for(mine, n, agent.replicas))
        agent.mesh.want(by_rank[rank] for rank in group)
        agent.sets.plan(plan)

    def live(self, plan: peer.PlanDown) -> None:
        """Everyone has acknowledged: keep it on disk, write the map, let trainers come."""
        self._took(plan, live=True)
        sets = self._agent.sets
        sets.open()
        for training in sets:
            sets.recount(training.name)
        self._write_map(plan)
        chosen = [f"{s.name}: version {s.chosen[1]}" for s in plan.sets if s.chosen is not None]
        lost = [f"{s.name}: {reason}" for s in plan.sets for reason in s.lost]
        version = max((s.chosen[1] for s in plan.sets if s.chosen is not None), default=0)
        self.log("agreed", version=version, detail="; ".join([f"epoch {plan.epoch}", *chosen, *lost]))

    def bound(self, plan: peer.PlanDown) -> None:
        """The round, which is live, serves this launch of the training: keep it on disk."""
        self._took(plan, live=True)

    def _took(self, plan: peer.PlanDown, *, live: bool) -> None:
        state = self._agent.state.state
        if state is not None:
            self._keep(msgspec.structs.replace(state, plan=plan, live=live, step=plan.step))

    def _keep(self, state: successor.State) -> None:
        """On disk before the messages leave that depend on it; where that fails, openly without."""
        file = self._agent.state
        before = file.problem
        if not file.write(state) and file.problem != before:
            self.log(
                "unwritten",
                detail=f"the state of the recovery round cannot be kept in {self._agent.directory}: {file.problem}; "
                "should this agent die, its part of the protection may end with it",
            )

    def attach(self, attach: local.Attach) -> None:
        """A new incarnation: a successor is to know of it before a peer does."""
        self._keep(successor.State(attach))

    def tend(self) -> None:
        """Called now and then: write what could not be written."""
        if self._agent.state.problem and self._agent.state.again():
            self.log("written", detail="the state of the recovery round is kept again")

    def succeed(self, state: successor.State) -> None:
        """Go on where this agent's dead predecessor was. Raises KeyError for a plan that has not this node."""
        agent, plan = self._agent, state.plan
        assert agent.rounds is not None
        if plan is not None:
            self._adopt(plan)
        agent.rounds.resume(plan, live=state.live, begun=state.begun, step=state.step)
        if plan is not None and state.live and agent.rounds.stage == "live":
            self._write_map(plan)
            agent.sets.open()
        elif agent.rounds.stage != "live":  # steps that are started now wait a moment for the map
            mapfile.wait(agent.directory)

    def _write_map(self, plan: peer.PlanDown) -> None:
        agent = self._agent
        text = mapfile.render(
            job=agent.job,
            restart=agent.restart,
            nodelist=agent.nodelist,
            hosts=agent.hosts,
            noderanks=plan.noderanks,
            host=agent.node,
            master_port=master_port(agent.job, agent.restart),
            socket_path=f"{agent.directory}/agent.sock",
            agent_port=agent.port,
            epoch=plan.epoch,
            map_hash=plan.map_hash,
        )
        try:
            mapfile.write(agent.directory, text)
        except OSError as exc:
            mapfile.settle(agent.directory)
            self.log("unmapped", detail=f"the map file cannot be written: {exc.strerror}")
