"""What an agent does at each step of a recovery round: the host that `rounds.Rounds` asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gemini_hpc.agent import mapfile, outside, successor
from gemini_hpc.agent.ports import master_port
from gemini_hpc.core import placement
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import bounds, peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Tier

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

    def apply(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, begin to pull."""
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
        self.bound(plan)
        agent.pulls.start([o for o in plan.pulls if o.dest == agent.node])

    def _adopt(self, plan: peer.PlanDown) -> None:
        agent = self._agent
        assert agent.mesh is not None
        agent.drains.chosen, agent.doubt = plan.tier, plan.doubt
        agent.noderanks, agent.map_restart, agent.epoch = dict(plan.noderanks), agent.restart, plan.epoch
        agent.mesh.ports.update({h: p for h, p in plan.ports.items() if h != agent.node})
        by_rank = {rank: host for host, rank in agent.noderanks.items()}
        mine, n = agent.noderanks[agent.node], len(agent.hosts)
        group = set(placement.holders(mine, n, agent.replicas)) | set(placement.holds_for(mine, n, agent.replicas))
        agent.mesh.want(by_rank[rank] for rank in group)
        agent.sets.plan(plan)

    def live(self, plan: peer.PlanDown) -> None:
        """Everyone has acknowledged: trainers may come."""
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
        """The round now serves this launch of the training."""
        attach = self._agent.attached_as
        if attach is not None:
            successor.write(self._agent.directory, successor.State(attach, plan))

    def succeed(self, plan: peer.PlanDown) -> None:
        """Go on in the round that this agent's dead predecessor was in."""
        agent = self._agent
        assert agent.rounds is not None
        self._adopt(plan)
        agent.rounds.resume(plan)
        self._write_map(plan)
        agent.sets.open()

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
