"""An agent's actions at each step of a recovery round: the host that `RecoveryRounds` calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gemini_hpc.agent import outside_inventory, restart_state
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.failure_domains import FailureDomains
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.round_plan import PredecessorState
from gemini_hpc.agent.predecessor import Predecessor
from gemini_hpc.agent.rank_requests import RankRequests
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.seal_notes import Within
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.agent.transfer.transfers import Transfers
from gemini_hpc.core import hostlist
from gemini_hpc.core.placement import PlacementOrder
from gemini_hpc.core.sequence import Closed, Closing
from gemini_hpc.core.slots import Stamp
from gemini_hpc.node import map_file
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.ports import compute_master_port
from gemini_hpc.wire.stored import Rejection, Tier

# Seconds to look for the tier: while ranks wait, which then ask again; while the prologs wait.
_LAUNCHED_S, _PROLOG_S, _PROLOG_PART = 20.0, 3.0, 0.3


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
        controller: outside_inventory.HolderSource,
        predecessor: Predecessor,
    ) -> None:
        self._identity, self._membership = context.identity, context.membership
        self._log, self._spawn, self._state = context.log, context.spawn, state
        self._store, self._trainings, self._transfers = replicas.store, replicas.trainings, transfers
        self._rejections, self._closings = replicas.rejections, replicas.closings
        self._saver, self._salvage, self._tier = tier.saver, tier.salvage, tier.choice
        self._service, self._controller, self._predecessor = service, controller, predecessor
        self._domains = FailureDomains(
            context.settings.failure_domains, lambda problem: self.log("warning", detail=problem)
        )

    @property
    def job(self) -> int:
        """Return the job's id."""
        return self._identity.job

    @property
    def restart(self) -> int:
        """Return the number of the incarnation that the agent is in."""
        return self._membership.restart

    @property
    def instance(self) -> str:
        """Return the id that distinguishes this agent from its predecessors and successors."""
        return self._identity.instance

    @property
    def replicas(self) -> int:
        """Return the number of a shard's holders, limited by the number of nodes."""
        return max(1, self._require_incarnation().attach.replicas)

    @property
    def parity(self) -> int:
        """Return the number of parity blocks in a row, 0 for whole copies."""
        return self._require_incarnation().attach.parity

    @property
    def wanted(self) -> int:
        """Return the number of nodes that should train: all of the allocation but its spares."""
        return self._require_incarnation().view.wanted

    def send(self, host: str, message: Message) -> bool:
        """Send to one peer. Return whether there is a link to it."""
        return self._membership.send(host, message)

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        """Log one event."""
        self._log(name, version=version, detail=detail)

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers of other launches, void half-filled slots."""
        self._trainings.freeze()
        self._salvage.reset()
        self._saver.freeze()
        self._transfers.incoming.stop()
        self._service.drop_all()

    async def build_inventory(self, *, verify: bool = True) -> peer.InventoryRecord:
        """Verify the copies on this node and return their inventory.

        Args:
            verify: False if the agent that pulls a copy verifies it.
        """
        identity, membership = self._identity, self._membership
        await self._transfers.cease()
        if membership.incarnation is not None and membership.incarnation.leads:
            await self._domains.read_domains(membership.hosts)
        for shard in self._store.list_all():
            shard.pair.empty_filling()
            if shard.parity is not None:
                shard.parity.fill = None
        if verify:
            for lost in await self._store.verify():
                self.log("damaged", version=lost.stamp.version, detail=f"shard {lost.rank}: copy dropped")
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

    @property
    def domains(self) -> Mapping[str, str]:
        """Return the known failure domains by host."""
        return self._domains.by_host

    async def gather_outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """Return the inventories of agents on nodes that the job has left."""
        incarnation = self._membership.incarnation
        if incarnation is None:
            return ()
        return await outside_inventory.gather_inventories(self._identity, incarnation, self._controller, former)

    @property
    def after(self) -> int:
        """Return the predecessor: the job that this one continues if it has no state of its own. 0 means none."""
        return self._predecessor.job

    async def gather_predecessor_state(self) -> PredecessorState:
        """Return the copies of the predecessor's agents, as far as they can be reached."""
        return await self._predecessor.gather_state()

    @property
    def tier(self) -> bool:
        """Return whether the job has a tier."""
        return bool(self._tier.directory)

    @property
    def chosen(self) -> Tier:
        """Return the tier that the program has chosen."""
        return self._tier.chosen

    def choose_tier(self, tier: Tier) -> bool:
        """Take the tier that a program has chosen. Return whether this changes anything."""
        heeded = self._tier.accepts(tier)
        if heeded:
            self._tier.chosen = tier
            self._spawn(self._saver.check_once())
        return heeded

    async def find_stored(
        self, without: Iterable[tuple[str, Stamp]], *, launched: bool, before: bool = False
    ) -> tuple[VersionManifest, ...]:
        """Return the newest version of each training on the tier.

        Args:
            without: Versions to leave out, by training and stamp.
            launched: Ranks wait for the answer, otherwise the prologs do.
            before: Look at the predecessor's versions.

        Raises:
            TierFailed: The tier cannot be seen in time.
        """
        within_s = (
            _LAUNCHED_S if launched else min(_PROLOG_S, _PROLOG_PART * self._identity.settings.attach_timeout_s)
        )
        return await self._saver.find_stored(without, within_s, self.after if before else 0)

    def learn_rejections(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Add rejected versions to those known, and return all of them."""
        return self._rejections.learn(found)

    def learn_closings(self, found: Iterable[Closed], parts: Iterable[Closing]) -> tuple[Closed, ...]:
        """Add closed trainings to those known, and return all of them."""
        return self._closings.learn(found, parts)

    def store_round_begin(self, number: int, step: str) -> None:
        """Store on disk that the coordinator has used this round number."""
        state = self._state.state
        if state is not None:
            self._write_state(msgspec.structs.replace(state, begun=number, step=step))

    def apply_plan(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, store this on disk, and begin to pull."""
        keep = {s.name: tuple(stamp for stamp in s.keep) for s in plan.trainings}
        for shard in self._store.list_all():
            # round numbers begin again with each incarnation
            shard.registered_round = shard.resumed_round = shard.rescued_round = 0
            shard.pair.empty_except(*keep.get(shard.training, ()))
        membership = self._membership
        self._adopt_plan(self._require_incarnation(), plan)
        own_noderank, n = membership.noderanks.get(self._identity.node), membership.nodes
        for shard in (*self._store.shards.values(), *self._store.parities.values()):
            if own_noderank in membership.redundancy.list_holders(shard.home % n):
                shard.resumed_round = plan.round
        self._store_plan(plan, live=False)
        self._predecessor.note_plan(plan)
        self._transfers.pulls.start([o for o in plan.pulls if o.dest == self._identity.node])

    def _require_incarnation(self) -> Incarnation:
        incarnation = self._membership.incarnation
        assert incarnation is not None  # the incarnation's rounds are the caller
        return incarnation

    def _adopt_plan(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        node, membership = self._identity.node, self._membership
        self._tier.chosen, membership.doubt, membership.stop = plan.tier, plan.doubt, plan.stop
        membership.takeover = plan.takeover or membership.takeover
        self._rejections.learn(plan.rejected)
        self._closings.learn(plan.closed)
        self._saver.forget()
        membership.noderanks, membership.map_restart, membership.epoch = (
            dict(plan.noderanks),
            membership.restart,
            plan.epoch,
        )
        membership.placed = PlacementOrder(plan.order)
        incarnation.mesh.ports.update({h: p for h, p in plan.ports.items() if h != node})
        by_rank = {rank: host for host, rank in membership.noderanks.items()}
        own_noderank = membership.noderanks.get(node)
        if own_noderank is not None:
            incarnation.mesh.want(by_rank[rank] for rank in membership.redundancy.list_peers(own_noderank))
        self._trainings.apply_plan(plan)

    def admit_ranks(self, plan: peer.PlanDown) -> None:
        """Let trainers come: all agents have acknowledged. Store this on disk and write the map."""
        incarnation = self._require_incarnation()
        self._store_plan(plan, live=True)
        self._trainings.open(incarnation)
        for training in self._trainings:
            self._trainings.recount(training.name)
        self._write_map(incarnation, plan)
        chosen = [f"{s.name}: version {s.chosen[1]}" for s in plan.trainings if s.chosen is not None]
        lost = [f"{s.name}: {reason}" for s in plan.trainings for reason in s.lost]
        version = max((s.chosen[1] for s in plan.trainings if s.chosen is not None), default=0)
        if plan.takeover is not None and incarnation.leads:
            self._log_takeover(plan, plan.takeover)
        self.log("agreed", version=version, detail="; ".join([f"epoch {plan.epoch}", *chosen, *lost]))

    def _log_takeover(self, plan: peer.PlanDown, takeover: peer.Takeover) -> None:
        """Log, once for the whole job, the fate of its predecessor's state."""
        places = {s.name: "the tier" if s.stored else "memory" for s in plan.trainings}
        taken = [f"{name}: version {s.version} from {places[name]}" for name, s in takeover.stamps.items()]
        version = max((s.version for s in takeover.stamps.values()), default=0)
        detail = "; ".join(filter(None, (f"job {takeover.job}", *taken, takeover.lost)))
        self.log("took_over" if taken else "not_taken_over", version=version, detail=detail)

    def store_launch(self, plan: peer.PlanDown) -> None:
        """Store on disk that the live round serves this launch of the training."""
        self._store_plan(plan, live=True)

    def _store_plan(self, plan: peer.PlanDown, *, live: bool) -> None:
        state = self._state.state
        if state is not None:
            self._write_state(msgspec.structs.replace(state, plan=plan, live=live, step=plan.step))

    def _write_state(self, state: restart_state.State) -> None:
        """Write the state to disk before the messages that depend on it are sent.

        If the write fails, log the risk and go on.
        """
        file = self._state
        before, where = file.problem, self._identity.directory
        if not file.write(state) and file.problem != before:
            self.log(
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
            self.log("written", detail="the state of the recovery round can be written again")

    def succeed(self, incarnation: Incarnation, state: restart_state.State) -> None:
        """Continue where this agent's dead predecessor was.

        Raises:
            KeyError: The plan lacks this node.
        """
        plan, rounds = state.plan, incarnation.rounds
        if plan is not None:
            self._adopt_plan(incarnation, plan)
            self._trainings.recall(Within(incarnation.restart, plan.round, plan.epoch))
        rounds.resume(plan, live=state.live, begun=state.begun, step=state.step)
        if plan is not None and state.live and rounds.stage == "live":
            self._write_map(incarnation, plan)
            self._trainings.open(incarnation)
        elif rounds.stage != "live":  # steps that are started now wait a moment for the map
            map_file.begin_wait(self._identity.directory)

    def _write_map(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        identity, nodelist = self._identity, incarnation.attach.nodelist
        hosts = tuple(host for host in incarnation.hosts if host in plan.noderanks)
        text = map_file.render(
            job=identity.job,
            restart=incarnation.restart,
            nodelist=hostlist.compress(hosts) if incarnation.view.spares else nodelist,
            hosts=hosts,
            noderanks=plan.noderanks,
            host=identity.node,
            master_port=compute_master_port(identity.job, incarnation.restart),
            socket_path=f"{identity.directory}/agent.sock",
            agent_port=identity.port,
            epoch=plan.epoch,
            map_hash=plan.map_hash,
        )
        try:
            map_file.write(identity.directory, text)
        except OSError as exc:
            map_file.end_wait(identity.directory)
            self.log("unmapped", detail=f"the map file cannot be written: {exc.strerror}")
