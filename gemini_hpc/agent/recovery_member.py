"""An agent's actions in its recovery rounds: the effects of `RecoveryRounds`, carried out."""

from __future__ import annotations

from typing import Any

import msgspec

from gemini_hpc.agent import restart_state
from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.peers import round_events as events
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.predecessor import Predecessor
from gemini_hpc.agent.rank_requests import RankRequests
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.seal_notes import Within
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.agent.transfer.transfers import Transfers
from gemini_hpc.core import hostlist
from gemini_hpc.core.placement import PlacementOrder
from gemini_hpc.node import map_file
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.ports import compute_master_port


class RecoveryMember:
    """An agent among those that agree on map, epoch and versions. The object lives as long as the agent."""

    def __init__(
        self,
        context: AgentContext,
        state: restart_state.StateFile,
        replicas: Replicas,
        transfers: Transfers,
        tier: TierParts,
        service: RankRequests,
        coordinator: Coordinator,
        predecessor: Predecessor,
    ) -> None:
        self._identity, self._membership = context.identity, context.membership
        self._log, self._spawn, self._state = context.log, context.spawn, state
        self._store, self._trainings, self._transfers = replicas.store, replicas.trainings, transfers
        self._rejections, self._closings = replicas.rejections, replicas.closings
        self._saver, self._salvage, self._tier = tier.saver, tier.salvage, tier.choice
        self._service, self._coordinator, self._predecessor = service, coordinator, predecessor

    def perform(self, incarnation: Incarnation, effect: events.Effect) -> None:
        """Carry out an effect of the rounds of an incarnation."""
        match effect:
            case events.Send(host, message):
                incarnation.send(host, message)
            case events.Log(name, detail, version):
                self._log(name, version=version, detail=detail)
            case events.Change():
                incarnation.changed.set()
                incarnation.changed.clear()
            case events.Freeze():
                self._freeze()
            case events.TakeInventory(number):
                self._spawn(self._take_inventory(incarnation, number))
            case events.StoreBegin(number, step):
                self._write_changes(begun=number, step=step)
            case events.StorePlan(plan, live):
                self._write_changes(plan=plan, live=live, step=plan.step)
            case events.Decide():
                self._coordinator.decide(incarnation, effect)
            case events.ApplyPlan(plan):
                self._apply_plan(incarnation, plan)
            case events.AdmitRanks(plan):
                self._admit_ranks(incarnation, plan)
            case events.ChooseTier(tier):
                self._tier.chosen = tier
                self._spawn(self._saver.check_once())

    def _freeze(self) -> None:
        self._trainings.freeze()
        self._salvage.reset()
        self._saver.freeze()
        self._transfers.incoming.stop()
        self._service.drop_all()

    async def _take_inventory(self, incarnation: Incarnation, number: int) -> None:
        record = await self.build_inventory()
        incarnation.step(events.Heard(self._identity.node, peer.InventoryUp(number, (record,))))

    async def build_inventory(self, *, verify: bool = True) -> peer.InventoryRecord:
        """Verify the copies on this node and return their inventory.

        Args:
            verify: False if the agent that pulls a copy verifies it.
        """
        identity, membership = self._identity, self._membership
        await self._transfers.cease()
        if membership.incarnation is not None and membership.incarnation.leads:
            await self._coordinator.domains.read_domains(membership.hosts)
        for shard in self._store.list_all():
            shard.pair.empty_filling()
            if shard.parity is not None:
                shard.parity.fill = None
        if verify:
            for lost in await self._store.verify():
                self._log("damaged", version=lost.stamp.version, detail=f"shard {lost.rank}: copy dropped")
        sealed = ((s.name, s.sealed) for s in self._trainings)
        return peer.InventoryRecord(
            host=identity.node,
            noderanks=membership.noderanks or None,
            map_restart=membership.map_restart,
            max_epoch=membership.epoch,
            copies=tuple(self._store.list_copies()),
            sealed=tuple((name, s) for name, s in sealed if s is not None),
            port=identity.port,
            instance=identity.instance,
            unreadable=tuple(sorted(self._transfers.pulls.unreadable)),
            unbroken=not identity.again,
            doubt=membership.doubt,
            rejected=self._rejections.all,
            order=membership.placed.ranks,
            closed=self._closings.all,
            closing=self._closings.own,
            stop=self._build_stop(),
        )

    def _build_stop(self) -> peer.Stop:
        """Return the last stop, with the newest step that ranks here have completed."""
        stop = self._membership.stop
        reached = {
            training.name: max(training.reached, stop.reached.get(training.name, 0)) for training in self._trainings
        }
        return msgspec.structs.replace(stop, reached=stop.reached | {name: v for name, v in reached.items() if v})

    def _apply_plan(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, and begin to pull."""
        keep = {s.name: tuple(stamp for stamp in s.keep) for s in plan.trainings}
        for shard in self._store.list_all():
            # round numbers begin again with each incarnation
            shard.registered_round = shard.resumed_round = shard.rescued_round = 0
            shard.pair.empty_except(*keep.get(shard.training, ()))
        membership = self._membership
        self._adopt_plan(incarnation, plan)
        own_noderank, n = membership.noderanks.get(self._identity.node), membership.nodes
        for shard in (*self._store.shards.values(), *self._store.parities.values()):
            if own_noderank in membership.redundancy.list_holders(shard.home % n):
                shard.resumed_round = plan.round
        self._predecessor.note_plan(plan)
        self._transfers.pulls.start([o for o in plan.pulls if o.dest == self._identity.node])

    def _adopt_plan(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        node, membership = self._identity.node, self._membership
        self._tier.chosen, membership.doubt, membership.stop = plan.tier, plan.doubt, plan.stop
        membership.takeover = plan.takeover or membership.takeover
        self._rejections.learn(plan.rejected)
        self._closings.learn(plan.closed)
        self._saver.forget()
        membership.noderanks, membership.placed = dict(plan.noderanks), PlacementOrder(plan.order)
        membership.map_restart, membership.epoch = membership.restart, plan.epoch
        incarnation.mesh.ports.update({h: p for h, p in plan.ports.items() if h != node})
        by_rank = {rank: host for host, rank in membership.noderanks.items()}
        own_noderank = membership.noderanks.get(node)
        if own_noderank is not None:
            incarnation.mesh.want(by_rank[rank] for rank in membership.redundancy.list_peers(own_noderank))
        self._trainings.apply_plan(plan)

    def _admit_ranks(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        """Let trainers come and write the map: all agents have acknowledged."""
        self._trainings.open(incarnation)
        for training in self._trainings:
            self._trainings.recount(training.name)
        self._write_map(incarnation, plan)
        chosen = [f"{s.name}: version {s.chosen[1]}" for s in plan.trainings if s.chosen is not None]
        lost = [f"{s.name}: {reason}" for s in plan.trainings for reason in s.lost]
        version = max((s.chosen[1] for s in plan.trainings if s.chosen is not None), default=0)
        if plan.takeover is not None and incarnation.leads:
            self._log_takeover(plan, plan.takeover)
        self._log("agreed", version=version, detail="; ".join([f"epoch {plan.epoch}", *chosen, *lost]))

    def _log_takeover(self, plan: peer.PlanDown, takeover: peer.Takeover) -> None:
        """Log, once for the whole job, the fate of its predecessor's state."""
        places = {s.name: "the tier" if s.stored else "memory" for s in plan.trainings}
        taken = [f"{name}: version {s.version} from {places[name]}" for name, s in takeover.stamps.items()]
        version = max((s.version for s in takeover.stamps.values()), default=0)
        detail = "; ".join(filter(None, (f"job {takeover.job}", *taken, takeover.lost)))
        self._log("took_over" if taken else "not_taken_over", version=version, detail=detail)

    def _write_changes(self, **changes: Any) -> None:
        state = self._state.state
        if state is not None:
            self._write_state(msgspec.structs.replace(state, **changes))

    def _write_state(self, state: restart_state.State) -> None:
        """Write the state to disk before the messages that depend on it are sent.

        If the write fails, log the risk and go on.
        """
        file = self._state
        before, where = file.problem, self._identity.directory
        if not file.write(state) and file.problem != before:
            self._log(
                "unwritten",
                detail=f"cannot write the state of the recovery round to {where}: {file.problem}; "
                "if this agent dies, the protection of this node may end with it",
            )

    def store_attach(self, attach: local.Attach) -> None:
        """Store a new incarnation on disk: a successor must know it before a peer does."""
        self._write_state(restart_state.State(attach))

    def tend(self) -> None:
        """Repeat a failed write of the state. Called now and then."""
        if self._state.problem and self._state.write_again():
            self._log("written", detail="the state of the recovery round can be written again")

    def succeed(self, incarnation: Incarnation, state: restart_state.State) -> None:
        """Continue where this agent's dead predecessor was.

        Raises:
            KeyError: The plan lacks this node.
        """
        plan, rounds = state.plan, incarnation.rounds
        if plan is not None:
            self._adopt_plan(incarnation, plan)
            self._trainings.recall(Within(incarnation.restart, plan.round, plan.epoch))
        incarnation.step(events.Resume(plan, state.live, state.begun, state.step))
        if plan is not None and state.live and rounds.stage == "live":
            self._write_map(incarnation, plan)
            self._trainings.open(incarnation)
        elif rounds.stage != "live":  # steps that are started now wait a moment for the map
            map_file.begin_wait(self._identity.directory)

    def _write_map(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        identity, nodelist = self._identity, incarnation.attach.nodelist
        hosts = tuple(host for host in incarnation.hosts if host in plan.noderanks)
        by_rank = {rank: name for name, rank in plan.noderanks.items()}
        fields = {
            "job": identity.job,
            "restart": incarnation.restart,
            "nodes": len(hosts),  # those that train, in the order of Slurm's node list
            "nodelist": hostlist.compress(hosts) if incarnation.view.spares else nodelist,
            "noderanks": ",".join(str(plan.noderanks[host]) for host in hosts),
            "noderank": plan.noderanks.get(identity.node, "spare"),
            "master_addr": by_rank[0],
            "master_port": compute_master_port(identity.job, incarnation.restart),
            "socket": f"{identity.directory}/agent.sock",
            "agent_port": identity.port,
            "epoch": plan.epoch,
            "hash": plan.map_hash,
        }
        try:
            map_file.write(identity.directory, fields)
        except OSError as exc:
            map_file.end_wait(identity.directory)
            self._log("unmapped", detail=f"the map file cannot be written: {exc.strerror}")
