"""What an agent does at each step of a recovery round: the host that `RecoveryRounds` asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gemini_hpc.agent import outside_inventory, restart_state
from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.failure_domains import FailureDomains
from gemini_hpc.agent.peers.identity import Identity
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.round_plan import Left
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.agent.predecessor import Predecessor
from gemini_hpc.agent.rank_requests import RankRequests
from gemini_hpc.agent.replicas.closings import Closings
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.replicas.seal_notes import Within
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.agent.transfer.transfers import Transfers
from gemini_hpc.core import hostlist
from gemini_hpc.core.placement import Order
from gemini_hpc.core.sequence import Closed, Closing
from gemini_hpc.core.slots import Stamp
from gemini_hpc.node import map_file
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.ports import master_port
from gemini_hpc.wire.stored import Rejection, Tier

# How long the tier is looked for: while ranks wait, which then ask again; while the prologs wait.
_LAUNCHED_S, _PROLOG_S, _PROLOG_PART = 20.0, 3.0, 0.3


class RecoveryMember:
    """One agent among those that agree on map, epoch and versions; it lives as long as the agent."""

    def __init__(
        self,
        identity: Identity,
        membership: Membership,
        state: restart_state.StateFile,
        store: Store,
        sets: Trainings,
        transfers: Transfers,
        saver: Saver,
        salvage: Salvage,
        tier: TierChoice,
        rejections: Rejections,
        closings: Closings,
        service: RankRequests,
        controller: outside_inventory.Holders,
        predecessor: Predecessor,
        log: Log,
        spawn: Spawn,
    ) -> None:
        self._identity, self._membership, self._state = identity, membership, state
        self._store, self._sets, self._transfers = store, sets, transfers
        self._saver, self._salvage, self._tier, self._rejections = saver, salvage, tier, rejections
        self._closings = closings
        self._service, self._controller, self._log, self._spawn = service, controller, log, spawn
        self._predecessor = predecessor
        self._domains = FailureDomains(
            identity.settings.failure_domains, lambda problem: self.log("warning", detail=problem)
        )

    @property
    def job(self) -> int:
        """The job's id."""
        return self._identity.job

    @property
    def restart(self) -> int:
        """The incarnation that the agent is in."""
        return self._membership.restart

    @property
    def instance(self) -> str:
        """Tells this agent from its predecessors and successors."""
        return self._identity.instance

    @property
    def replicas(self) -> int:
        """Holders of a shard, as far as there are nodes."""
        return max(1, self._current().attach.replicas)

    @property
    def parity(self) -> int:
        """Blocks of it in a row; 0: whole copies."""
        return self._current().attach.parity

    @property
    def wanted(self) -> int:
        """Nodes of the allocation that are to train: all but its spares."""
        return self._current().view.wanted

    def send(self, host: str, message: Message) -> bool:
        """To one peer, if there is a link."""
        return self._membership.send(host, message)

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        """One event."""
        self._log(name, version=version, detail=detail)

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers of other launches, void what is half filled."""
        self._sets.freeze()
        self._salvage.reset()
        self._saver.freeze()
        self._transfers.incoming.stop()
        self._service.drop_all()

    async def inventory(self, *, verify: bool = True) -> peer.InventoryRecord:
        """Verify what is held (unless whoever pulls it will), and tell."""
        me, here = self._identity, self._membership
        await self._transfers.cease()
        if here.incarnation is not None and here.incarnation.leads:
            await self._domains.look(here.hosts)
        for shard in self._store.every():
            shard.pair.void_filling()
            if shard.parity is not None:
                shard.parity.fill = None
        if verify:
            for lost in await self._store.verify():
                self.log("damaged", version=lost.stamp.version, detail=f"shard {lost.rank}: copy dropped")
        sealed = ((s.name, s.sealed) for s in self._sets)
        return peer.InventoryRecord(
            host=me.node,
            noderanks=here.noderanks or None,
            map_restart=here.map_restart,
            max_epoch=here.epoch,
            copies=tuple(self._store.copies()),
            sealed=tuple((name, s) for name, s in sealed if s is not None),
            port=me.port,
            instance=me.instance,
            unreadable=tuple(sorted(self._transfers.pulls.unreadable)),
            unbroken=not me.again,
            doubt=here.doubt,
            rejected=self._rejections.all,
            order=here.placed.ranks,
            closed=self._closings.all,
            closing=self._closings.own,
        )

    @property
    def domains(self) -> Mapping[str, str]:
        """Failure domains by host, as far as they are known."""
        return self._domains.by_host

    async def outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """What agents hold on nodes that the job has left."""
        incarnation = self._membership.incarnation
        if incarnation is None:
            return ()
        return await outside_inventory.inventories(self._identity, incarnation, self._controller, former)

    @property
    def after(self) -> int:
        """The predecessor: the job from which this one goes on, where it has nothing of its own; 0: none."""
        return self._predecessor.job

    async def left(self) -> Left:
        """What the predecessor's agents hold, as far as they can be reached."""
        return await self._predecessor.left()

    @property
    def tier(self) -> bool:
        """Whether the job has a tier."""
        return bool(self._tier.directory)

    @property
    def chosen(self) -> Tier:
        """What the program has chosen of it."""
        return self._tier.chosen

    def choose(self, tier: Tier) -> bool:
        """Take what a program has chosen; False where it changes nothing."""
        heeded = self._tier.heeds(tier)
        if heeded:
            self._tier.chosen = tier
            self._spawn(self._saver.glance())
        return heeded

    async def stored(
        self, without: Iterable[tuple[str, Stamp]], *, launched: bool, before: bool = False
    ) -> tuple[Manifest, ...]:
        """The newest version of each set on the tier, but for these. launched: ranks wait for it, else the prologs;
        before: of the predecessor's. Raises `TierFailed` where it cannot be seen in time."""
        within_s = (
            _LAUNCHED_S if launched else min(_PROLOG_S, _PROLOG_PART * self._identity.settings.attach_timeout_s)
        )
        return await self._saver.stored(without, within_s, self.after if before else 0)

    def rejected(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Know of these rejected versions, too; all that are known."""
        return self._rejections.learn(found)

    def closed(self, found: Iterable[Closed], parts: Iterable[Closing]) -> tuple[Closed, ...]:
        """Know of these closed trainings, too; all that are known."""
        return self._closings.learn(found, parts)

    def begun(self, number: int, step: str) -> None:
        """Coordinator: keep on disk that this number is taken."""
        state = self._state.state
        if state is not None:
            self._keep(msgspec.structs.replace(state, begun=number, step=step))

    def apply(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, keep on disk that it is so, begin to pull."""
        keep = {s.name: tuple(stamp for stamp in s.keep) for s in plan.sets}
        for shard in self._store.every():
            # round numbers begin anew with each incarnation
            shard.registered_round = shard.resumed_round = shard.rescued_round = 0
            shard.pair.void_except(*keep.get(shard.set, ()))
        here = self._membership
        self._adopt(self._current(), plan)
        mine, n = here.noderanks.get(self._identity.node), here.nodes
        for shard in (*self._store.shards.values(), *self._store.parities.values()):
            if mine in here.redundancy.holders(shard.home % n):
                shard.resumed_round = plan.round
        self._took(plan, live=False)
        self._predecessor.taking(plan)
        self._transfers.pulls.start([o for o in plan.pulls if o.dest == self._identity.node])

    def _current(self) -> Incarnation:
        incarnation = self._membership.incarnation
        assert incarnation is not None  # whose rounds call
        return incarnation

    def _adopt(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        node, here = self._identity.node, self._membership
        self._tier.chosen, here.doubt = plan.tier, plan.doubt
        here.heritage = plan.heritage or here.heritage
        self._rejections.learn(plan.rejected)
        self._closings.learn(plan.closed)
        self._saver.forget()
        here.noderanks, here.map_restart, here.epoch = dict(plan.noderanks), here.restart, plan.epoch
        here.placed = Order(plan.order)
        incarnation.mesh.ports.update({h: p for h, p in plan.ports.items() if h != node})
        by_rank = {rank: host for host, rank in here.noderanks.items()}
        mine = here.noderanks.get(node)
        if mine is not None:
            incarnation.mesh.want(by_rank[rank] for rank in here.redundancy.peers(mine))
        self._sets.plan(plan)

    def live(self, plan: peer.PlanDown) -> None:
        """Everyone has acknowledged: keep it on disk, write the map, let trainers come."""
        incarnation = self._current()
        self._took(plan, live=True)
        self._sets.open(incarnation)
        for training in self._sets:
            self._sets.recount(training.name)
        self._write_map(incarnation, plan)
        chosen = [f"{s.name}: version {s.chosen[1]}" for s in plan.sets if s.chosen is not None]
        lost = [f"{s.name}: {reason}" for s in plan.sets for reason in s.lost]
        version = max((s.chosen[1] for s in plan.sets if s.chosen is not None), default=0)
        if plan.heritage is not None and incarnation.leads:
            self._tell_of(plan, plan.heritage)
        self.log("agreed", version=version, detail="; ".join([f"epoch {plan.epoch}", *chosen, *lost]))

    def _tell_of(self, plan: peer.PlanDown, heritage: peer.Heritage) -> None:
        """Once for the whole job: what has become of its predecessor's state."""
        places = {s.name: "the tier" if s.stored else "memory" for s in plan.sets}
        taken = [f"{name}: version {s.version} from {places[name]}" for name, s in heritage.stamps.items()]
        version = max((s.version for s in heritage.stamps.values()), default=0)
        detail = "; ".join(filter(None, (f"job {heritage.job}", *taken, heritage.lost)))
        self.log("took_over" if taken else "not_taken_over", version=version, detail=detail)

    def bound(self, plan: peer.PlanDown) -> None:
        """The round, which is live, serves this launch of the training: keep it on disk."""
        self._took(plan, live=True)

    def _took(self, plan: peer.PlanDown, *, live: bool) -> None:
        state = self._state.state
        if state is not None:
            self._keep(msgspec.structs.replace(state, plan=plan, live=live, step=plan.step))

    def _keep(self, state: restart_state.State) -> None:
        """On disk before the messages leave that depend on it; where that fails, openly without."""
        file = self._state
        before, where = file.problem, self._identity.directory
        if not file.write(state) and file.problem != before:
            self.log(
                "unwritten",
                detail=f"cannot write the state of the recovery round to {where}: {file.problem}; "
                "if this agent dies, the protection of this node may end with it",
            )

    def attach(self, attach: local.Attach) -> None:
        """A new incarnation: a successor is to know of it before a peer does."""
        self._keep(restart_state.State(attach))

    def tend(self) -> None:
        """Called now and then: write what could not be written."""
        if self._state.problem and self._state.again():
            self.log("written", detail="the state of the recovery round can be written again")

    def succeed(self, incarnation: Incarnation, state: restart_state.State) -> None:
        """Go on where this agent's dead predecessor was. Raises KeyError for a plan that has not this node."""
        plan, rounds = state.plan, incarnation.rounds
        if plan is not None:
            self._adopt(incarnation, plan)
            self._sets.recall(Within(incarnation.restart, plan.round, plan.epoch))
        rounds.resume(plan, live=state.live, begun=state.begun, step=state.step)
        if plan is not None and state.live and rounds.stage == "live":
            self._write_map(incarnation, plan)
            self._sets.open(incarnation)
        elif rounds.stage != "live":  # steps that are started now wait a moment for the map
            map_file.wait(self._identity.directory)

    def _write_map(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        me, nodelist = self._identity, incarnation.attach.nodelist
        hosts = tuple(host for host in incarnation.hosts if host in plan.noderanks)
        text = map_file.render(
            job=me.job,
            restart=incarnation.restart,
            nodelist=hostlist.compress(hosts) if incarnation.view.spares else nodelist,
            hosts=hosts,
            noderanks=plan.noderanks,
            host=me.node,
            master_port=master_port(me.job, incarnation.restart),
            socket_path=f"{me.directory}/agent.sock",
            agent_port=me.port,
            epoch=plan.epoch,
            map_hash=plan.map_hash,
        )
        try:
            map_file.write(me.directory, text)
        except OSError as exc:
            map_file.settle(me.directory)
            self.log("unmapped", detail=f"the map file cannot be written: {exc.strerror}")
