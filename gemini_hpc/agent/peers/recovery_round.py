"""Recovery rounds: how the agents of one incarnation agree on map, epoch and version before training goes on (R4).

A round runs along the tree over the positions of the host list; position 0 coordinates it:
collect (freeze, void what is half filled, verify, report) -> plan (void all but the chosen versions, take the
map) -> acknowledged by everyone -> go. The first round of an incarnation starts with its attach, later ones with
a new launch of the training in the same allocation. Every message names its round; a parent tells a child that
comes late, or comes back, where the round stands.

An agent may die at any point, and any message may be lost with a link or an agent. So what a message promises is on
disk before it leaves (`Host.begun`, `apply`, `live`, `bound`); what is waited for is asked for again (`tick`); every
message may come twice; and two agents that do not fit together say so until the coordinator begins a new round.
Nothing here reads a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import msgspec

from gemini_hpc.agent.peers import round_plan
from gemini_hpc.core import domains, node_ranks, recovery_plan
from gemini_hpc.core.sequence import Closed, Closing
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.votes import FANOUT, children, parent
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import peer, protocol
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Rejection, Tier

_NO_TIER = Tier()

# What is waited for is asked for again after so long, then after twice that, and so on.
SAY_AGAIN_S, SAY_AGAIN_MOST_S = 1.0, 16.0
TELL_S = 5.0  # without progress: then the job is told why it is not protected
# A plan that children do not acknowledge although they can be reached: then the round is begun anew; later each time.
ANEW_S, ANEW_MOST_S = 15.0, 240.0
_BAD_ONES = 8  # versions of the predecessor's on the tier that may turn out bad


class Host(Protocol):
    """What the rounds need of the agent that they serve."""

    @property
    def job(self) -> int:
        """The job's id."""

    @property
    def restart(self) -> int:
        """The incarnation that the agent is in."""

    @property
    def instance(self) -> str:
        """Tells this agent from its predecessors and successors."""

    @property
    def replicas(self) -> int:
        """Holders of a shard, as far as there are nodes."""

    @property
    def parity(self) -> int:
        """Blocks of it in a row; 0: whole copies."""

    @property
    def wanted(self) -> int:
        """Nodes of the allocation that are to train: all but its spares."""

    def send(self, host: str, message: Message) -> bool:
        """To one peer, if there is a link."""

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers of other launches, void what is half filled."""

    async def inventory(self) -> peer.InventoryRecord:
        """Verify what is held, and tell."""

    @property
    def domains(self) -> Mapping[str, str]:
        """Failure domains by host, as far as they are known; looked up before the coordinator's inventory."""

    async def outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """What agents hold on nodes that the job has left."""

    @property
    def after(self) -> int:
        """The predecessor: the job from which this one goes on, where it has nothing of its own; 0: none."""

    async def left(self) -> round_plan.Left:
        """What the predecessor's agents hold, as far as they can be reached."""

    @property
    def tier(self) -> bool:
        """Whether the job has a tier."""

    @property
    def chosen(self) -> Tier:
        """What the program has chosen of it."""

    def choose(self, tier: Tier) -> bool:
        """Take what a program has chosen; False where it changes nothing."""

    async def stored(
        self, without: Iterable[tuple[str, Stamp]], *, launched: bool, before: bool = False
    ) -> tuple[Manifest, ...]:
        """The newest version of each set on the tier, but for these. launched: ranks wait for it, else the prologs;
        before: of the predecessor's. Raises `TierFailed` where it cannot be seen in time."""

    def rejected(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Know of these rejected versions, too; all that are known."""

    def closed(self, found: Iterable[Closed], parts: Iterable[Closing]) -> tuple[Closed, ...]:
        """Know of these closed trainings, too; all that are known."""

    def begun(self, number: int, step: str) -> None:
        """Coordinator: keep on disk that this number is taken."""

    def apply(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch; keep on disk that it is so."""

    def live(self, plan: peer.PlanDown) -> None:
        """Everyone has acknowledged: keep it on disk, write the map, let trainers come."""

    def bound(self, plan: peer.PlanDown) -> None:
        """The round, which is live, serves this launch of the training: keep it on disk."""

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        """One event."""


class RecoveryRounds:
    """One agent's part in the rounds of one incarnation."""

    def __init__(
        self,
        host: Host,
        name: str,
        hosts: tuple[str, ...],
        spawn: Callable[[Coroutine[object, object, None]], object],
        fanout: int = FANOUT,
    ) -> None:
        self._host, self._name, self.hosts, self._spawn = host, name, hosts, spawn
        self._fanout = fanout
        position = hosts.index(name)
        above = parent(position, fanout)
        self.parent = None if above is None else hosts[above]
        self.children = tuple(hosts[c] for c in children(position, len(hosts), fanout))
        self.round = 0
        self.stage = "idle"
        self.step = ""
        self.plan: peer.PlanDown | None = None
        self._records: dict[str, tuple[peer.InventoryRecord, ...]] = {}
        self._acks: set[str] = set()
        self._searching = False
        self._misfit: int | None = None  # the parent's round, where it does not fit this agent's
        self._changed = asyncio.Event()
        self.trouble = ""  # why the round is not over, when it has waited too long
        self._mark: object = None  # as far as it had come at the last tick that saw progress
        self._since = self._again_at = 0.0
        self._pause_s, self._anew_s = SAY_AGAIN_S, ANEW_S

    @property
    def unseen(self) -> str:
        """Why this round serves no launch: it is not known what the tier has."""
        return self.plan.unseen if self.plan is not None else ""

    async def wait_live(self, step: str | None) -> None:
        """Return once a round (for this launch, unless None) is over."""
        while not (self.stage == "live" and (step is None or self.step == step)):
            await self.changed()

    async def changed(self) -> None:
        """Return after the next change of stage."""
        await self._changed.wait()

    def _stage(self, stage: str) -> None:
        self.stage = stage
        self.trouble = "" if stage == "live" else self.trouble
        self._changed.set()
        self._changed = asyncio.Event()

    def resume(self, plan: peer.PlanDown | None, *, live: bool, begun: int, step: str) -> None:
        """After this agent's own death: go on where its predecessor was. plan: that it took last; live: whether it
        had heard *go*; begun, step: the last round that it began as coordinator. Only what was on disk counts: an
        agent that was collecting is asked again, or begins again above all numbers that it has used."""
        if plan is not None:
            self.round, self.step, self.plan = plan.round, plan.step, plan
            self._stage("live" if live else "planned")
        if self.parent is None and begun > self.round:
            self.round = begun
            self.begin(step)
        elif self.parent is None and plan is None:
            self.begin(step)
        elif self.stage == "planned":
            self._acknowledged()

    # ---- waiting ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called a few times a second with a clock that does not go back: ask again for what is missing, and know
        when it has been missing for too long."""
        mark = (self.round, self.stage, frozenset(self._records), frozenset(self._acks), self._misfit)
        if mark != self._mark:
            self._mark, self._since = mark, now
            self._pause_s, self._again_at = SAY_AGAIN_S, now + SAY_AGAIN_S
        if self.stage == "closed" or (self.stage == "live" and self._misfit is None):
            self.trouble = ""
            self._anew_s = ANEW_S if self.stage == "live" else self._anew_s
            return
        if now >= self._again_at:
            self._pause_s = min(2 * self._pause_s, SAY_AGAIN_MOST_S)
            self._again_at = now + self._pause_s
            heard = self._say_again()
            if heard and self.parent is None and self.stage == "planned" and now - self._since >= self._anew_s:
                self._host.log("round_lost", detail=f"{self._waits()}: starting another round")
                self._anew_s = min(2 * self._anew_s, ANEW_MOST_S)
                self.begin(self.step)
        if now - self._since >= TELL_S:
            said, self.trouble = self.trouble, self._waits()
            if self.trouble != said:
                self._host.log("unprotected", detail=self.trouble)

    def _missing(self) -> tuple[str, ...]:
        """Return the children that have not answered."""
        heard = {"collect": set(self._records), "planned": self._acks}.get(self.stage, set(self.children))
        return tuple(child for child in self.children if child not in heard)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Name the hosts that the round may wait for. Of the coordinator: the children without an answer, and all
        below them; of another agent: its parent."""
        if self.parent is not None:
            return (self.parent,)
        found = [self.hosts.index(child) for child in self._missing()]
        for position in found:
            found.extend(children(position, len(self.hosts), self._fanout))
        return tuple(self.hosts[position] for position in found)

    def _waits(self) -> str:
        missing = ", ".join(self._missing())[:300]
        if missing and len(self.awaited) > len(self._missing()):
            missing += " or of a node below"
        if self._misfit is not None:
            what = f"{self.parent} to report that round {self._misfit} does not fit"
        elif self.stage == "idle":
            what = f"{self.parent} to say how far the round is"
        elif self.stage == "collect" and self._name not in self._records:
            what = "this agent's own inventory"
        elif missing:
            what = f"the {'inventory' if self.stage == 'collect' else 'acknowledgement'} of {missing}"
        elif self._searching:
            what = "the search on the tier and on nodes that the job has left"
        else:
            what = f"the {'plan' if self.stage == 'collect' else 'go'} of {self.parent}"
        return f"recovery round {self.round} waits for {what}"

    def _say_again(self) -> bool:
        """Of what may have been lost; whether all whose answer is missing could be reached."""
        heard = True
        if self.stage == "collect":
            for child in self.children:
                if child not in self._records:
                    heard &= self._host.send(child, peer.Collect(self.round, self.step))
        elif self.stage == "planned" and self.plan is not None:
            for child in self.children:
                if child not in self._acks:
                    heard &= self._host.send(child, self.plan)
        self._answer()
        return heard

    def _answer(self) -> None:
        """To the parent, what it may not have heard."""
        if self.parent is None:
            return
        if self._misfit is not None:
            self._host.send(self.parent, peer.RoundLost(self._misfit, self.round))
        elif self.stage == "idle":
            self._host.send(self.parent, peer.RoundLost(0, 0))
        elif self.stage == "collect":
            self._gathered()
        elif self.stage == "planned":
            self._acknowledged()

    def _tell(self, child: str) -> None:
        """Where the round stands."""
        if self.stage == "collect":
            self._host.send(child, peer.Collect(self.round, self.step))
        elif self.plan is not None:
            self._host.send(child, self.plan)
            if self.stage == "live":
                self._host.send(child, peer.Go(self.round, self.step))

    # ---- starting a round ------------------------------------------------------------------------------

    def begin(self, step: str) -> None:
        """Coordinator only: start the next round."""
        self._enter(self.round + 1, step)

    def need(self, after_round: int, step: str, again: bool, tier: Tier = _NO_TIER) -> None:
        """A launch wants to be served by a round after `after_round` (or by that one, if it serves nobody yet)."""
        if self.parent is not None:
            self._host.send(self.parent, peer.NeedRound(after_round, step, again, tier))
        elif self.stage == "live" and after_round == self.round:
            if self._host.choose(tier) or self.unseen:
                self.begin(step)
            elif not self.step:
                self._bind(step)
            elif again or self.step != step:
                self.begin(step)

    def _bind(self, step: str) -> None:
        """The first launch after an attach needs no round of its own; everyone hears which launch it is."""
        assert self.plan is not None
        self.step, self.plan = step, msgspec.structs.replace(self.plan, step=step)
        self._host.bound(self.plan)
        self._stage("live")
        for child in self.children:
            self._host.send(child, peer.Go(self.round, step))

    def _enter(self, number: int, step: str) -> None:
        self.round, self.step, self.plan = number, step, None
        self._records.clear()
        self._acks.clear()
        self._searching, self._misfit = False, None
        self._host.freeze(step)
        self._stage("collect")
        if self.parent is None:
            self._host.begun(number, step)
        for child in self.children:
            self._host.send(child, peer.Collect(number, step))
        self._spawn(self._collect_own(number))

    async def _collect_own(self, number: int) -> None:
        record = await self._host.inventory()
        if number == self.round and self.stage == "collect":
            self._records[self._name] = (record,)
            self._gathered()

    # ---- messages --------------------------------------------------------------------------------------

    def on_link(self, name: str) -> None:
        """A child that comes (back) hears where the round stands; a parent is told what it may have missed."""
        if name in self.children:
            self._tell(name)
        elif name == self.parent and self.stage != "idle":
            self._answer()

    def on_message(self, name: str, message: protocol.AnyMessage) -> bool:
        """Take a message of the rounds; False where it is of another kind."""
        if isinstance(message, (peer.Collect, peer.PlanDown, peer.Go)):
            if name == self.parent and self.stage != "closed":
                self._from_parent(message)
        elif isinstance(message, (peer.InventoryUp, peer.PlanAck, peer.RoundLost, peer.NeedRound)):
            if name in self.children and self.stage != "closed":
                self._from_child(name, message)
        else:
            return False
        return True

    def _from_parent(self, message: peer.Collect | peer.PlanDown | peer.Go) -> None:
        same = message.round == self.round
        if isinstance(message, peer.Collect):
            if message.round > self.round:
                self._enter(message.round, message.step)
            elif same and self.stage == "collect":
                self._misfit = None
                self._gathered()
            else:
                self._lost(message.round)
        elif isinstance(message, peer.PlanDown):
            if same and self.stage == "collect" and message.counted.get(self._name, me := self._host.instance) == me:
                self._misfit = None
                self._take(message)
            elif same and self.plan is not None and message == msgspec.structs.replace(self.plan, step=message.step):
                self._misfit = None
                if self.stage == "live":  # the ack died with the predecessor of one of the two
                    self._acknowledge()
                else:
                    self._acknowledged()
            else:
                self._lost(message.round)
        elif same and self._misfit is None:
            if self.stage == "planned":
                self._go()
            if self.stage == "live" and message.step and not self.step:
                self._bind(message.step)
            elif self.stage == "live" and message.step and message.step != self.step:
                self._lost(message.round)

    def _from_child(
        self, name: str, message: peer.InventoryUp | peer.PlanAck | peer.RoundLost | peer.NeedRound
    ) -> None:
        if isinstance(message, peer.NeedRound):
            if self.stage == "live" and (message.after_round, message.step) == (self.round, self.step):
                self._host.send(name, peer.Go(self.round, self.step))
            self.need(message.after_round, message.step, message.again, message.tier)
        elif isinstance(message, peer.RoundLost):
            if message.at == self.round:
                self._restart(message.at, message.mine)
            else:  # it speaks of where this agent, or its predecessor, was
                self._tell(name)
        elif message.round != self.round:
            return
        elif isinstance(message, peer.InventoryUp):
            if self.stage == "collect":
                self._records[name] = message.records
                self._gathered()
        elif self.plan is not None and message.map_hash == self.plan.map_hash:
            self._acks.add(name)
            if self.stage == "live":
                self._host.send(name, peer.Go(self.round, self.step))
            else:
                self._acknowledged()

    def _lost(self, at: int) -> None:
        """The parent's round does not fit; said until a round does."""
        self._misfit = at
        self._answer()

    def _restart(self, at: int, theirs: int) -> None:
        if self.parent is not None:
            self._host.send(self.parent, peer.RoundLost(at, max(theirs, self.round)))
        else:
            self._host.log(
                "round_lost",
                detail=f"an agent is already in round {theirs}, not in round {at}: starting another round",
            )
            self.round = max(self.round, theirs)
            self.begin(self.step)

    def close(self) -> None:
        """A newer incarnation has begun: this one answers nothing any more."""
        self.round, self.stage = -1, "closed"

    def _gathered(self) -> None:
        if self._records.keys() != {self._name, *self.children}:
            return
        records = tuple(r for part in self._records.values() for r in part)
        if self.parent is not None:
            self._host.send(self.parent, peer.InventoryUp(self.round, records))
            return
        plan, sure = self._decide(records)
        known = (sure and not any(r.doubt for r in records)) or (self._host.restart == 0 and self.round == 1)
        if known and not self._may_inherit(plan):
            self._take(plan)
        elif not self._searching:
            self._searching = True
            self._spawn(self._search(self.round, records, plan))

    async def _search(self, number: int, records: tuple[peer.InventoryRecord, ...], plan: peer.PlanDown) -> None:
        """Coordinator: the nodes of this incarnation cannot serve, or only what is older than the last seal. In the
        first round of a restart, look on those that the job has left; then on the tier."""
        sure = False
        if self._host.restart > 0 and self.round == 1 and not any(s.chosen for s in plan.sets):
            former = {host for r in records for host in r.noderanks or {}}
            more = await self._host.outside(tuple(sorted(former)))
            if any(r.copies for r in more):
                self._host.log("found_outside", detail=f"copies on {', '.join(r.host for r in more)[:300]}")
            records = (*records, *more)
            plan, sure = self._decide(records)
        # was ever sealed
        nothing = self._host.restart == 0 and all(
            r.unbroken and not (r.sealed or r.rejected or r.closed) for r in records
        )
        # Who took a plan that was made without a look at the tier may have forgotten what was newer.
        seen = nothing or (sure and not any(r.doubt for r in records))
        if self._host.tier and not seen:
            without = {bad for record in records for bad in record.unreadable}
            try:
                stored = await self._host.stored(without, launched=bool(plan.step))
                plan, seen = round_plan.from_tier(plan, stored), True
                plan = msgspec.structs.replace(plan, looked=True)
            except TierFailed as error:  # who went on without starts from nothing
                plan = msgspec.structs.replace(plan, unseen=str(error))
        if self._may_inherit(plan) and not plan.unseen:
            plan = await self._inherit(records, plan)
        if number == self.round and self.stage == "collect":
            self._take(msgspec.structs.replace(plan, doubt=not seen))

    def _may_inherit(self, plan: peer.PlanDown) -> bool:
        """Whether there is a predecessor, and nothing of the job's own."""
        return bool(self._host.after) and not any(s.chosen for s in plan.sets)

    async def _inherit(self, records: tuple[peer.InventoryRecord, ...], plan: peer.PlanDown) -> peer.PlanDown:
        """Coordinator: the plan, with what the job's predecessor has left."""
        host, unseen = self._host, ""
        left = await host.left()
        without: list[tuple[str, Stamp]] = []
        unreadable = {bad for record in records for bad in record.unreadable}
        for _ in range(_BAD_ONES if host.tier else 0):
            try:
                stored = await host.stored(without, launched=bool(plan.step), before=True)
            except TierFailed as error:
                unseen = str(error)
                break
            bad = [m for m in stored if round_plan.unwanted(m.set, m.stamp, plan.rejected, unreadable)]
            left = replace(left, stored=tuple(m for m in stored if m not in bad))
            if not bad:
                break
            without += [(m.set, m.stamp) for m in bad]
        ours = any(record.noderanks for record in records)
        plan = round_plan.take_over(
            plan,
            left,
            self.hosts,
            host.replicas,
            job=host.job,
            restart=host.restart,
            nodes=host.wanted,
            noderanks=plan.noderanks if ours else None,
            parity=host.parity,
            by_host=host.domains,
        )
        if unseen and not any(s.chosen for s in plan.sets):  # who went on without starts from nothing
            plan = msgspec.structs.replace(plan, unseen=unseen)
        return plan

    def _take(self, plan: peer.PlanDown) -> None:
        self.plan, self.step = plan, plan.step
        self._host.apply(plan)
        self._stage("planned")
        for child in self.children:
            self._host.send(child, plan)
        self._acknowledged()

    def _acknowledged(self) -> None:
        if self.stage != "planned" or not self._acks.issuperset(self.children):
            return
        if self.parent is None:
            self._go()
        else:
            self._acknowledge()

    def _acknowledge(self) -> None:
        assert self.parent is not None and self.plan is not None
        self._host.send(self.parent, peer.PlanAck(self.round, self.plan.map_hash))

    def _go(self) -> None:
        assert self.plan is not None
        self._host.live(self.plan)
        self._stage("live")
        for child in self.children:
            self._host.send(child, peer.Go(self.round, self.step))

    # ---- the coordinator's decision --------------------------------------------------------------------

    def _decide(self, records: tuple[peer.InventoryRecord, ...]) -> tuple[peer.PlanDown, bool]:
        """The plan, and whether it is what was sealed last, of every set."""
        rejected = self._host.rejected([found for r in records for found in r.rejected])
        plan = recovery_plan.plan(
            {r.host: round_plan.inventory(r, rejected) for r in records},
            self.hosts,
            self._host.replicas,
            min_epoch=recovery_plan.first_epoch(self._host.restart),
            nodes=self._host.wanted,
            parity=self._host.parity,
            by_host=self._host.domains,
        )
        for warning in plan.warnings:
            self._host.log("warning", detail=warning)
        found, pulls = round_plan.planned(plan, records)
        sets = list(found)
        if not plan.sets and not plan.survivable:
            reason = f"all copies are gone with {', '.join(plan.gone)}"
            sets.append(peer.SetPlan("default", None, (), None, 0, (), (reason,)))
        for name in sorted({found.set for found in rejected} - {s.name for s in sets}):
            reasons = tuple(found.sentence for found in rejected if found.set == name)
            sets.append(peer.SetPlan(name, None, (), None, 0, (), reasons))
        down = peer.PlanDown(
            round=self.round,
            step=self.step,
            epoch=plan.epoch,
            noderanks=plan.noderanks,
            map_hash=node_ranks.map_hash(plan.noderanks, self._host.job, self._host.restart, plan.order.ranks),
            ports={r.host: r.port for r in records},
            sets=tuple(sets),
            pulls=pulls,
            tier=self._host.chosen,
            counted={r.host: r.instance for r in records if r.host in self.hosts},
            rejected=rejected,
            closed=self._host.closed(
                [found for r in records for found in r.closed], [part for r in records for part in r.closing]
            ),
            order=plan.order.ranks,
            domains=domains.separation(
                self._host.domains, plan.noderanks, min(self._host.replicas, len(plan.noderanks)), plan.order
            ),
        )
        # what agents of an older incarnation have is not the newest where those of the last are all gone
        # nor is what stands before a rejected version, of which the tier may have more
        known = plan.survivable and plan.latest >= self._host.restart - 1 and not rejected
        return down, known and bool(plan.sets) and all(s.newest for s in plan.sets)
