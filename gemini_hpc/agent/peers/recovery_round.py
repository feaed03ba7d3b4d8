"""Recovery rounds: the agents of one incarnation agree on map, epoch and version before training goes on (R4).

A round runs along the tree over the positions of the host list. Position 0 coordinates it. The stages are:

1. collect: freeze, void half-filled slots, verify, report;
2. plan: void all but the chosen versions, take the map;
3. acknowledgement by every agent;
4. go.

The first round of an incarnation starts with its attach. Later rounds start with a new launch of the training in the
same allocation. Every message names its round. A parent reports the state of the round to a child that comes late or
comes back.

An agent may die at any point, and any message may be lost with a link or an agent. Hence four rules hold. The promise
of a message is on disk before it is sent (`Host.store_round_begin`, `apply_plan`, `admit_ranks`, `store_launch`). A
missing answer is requested again (`tick`). Every message may arrive twice. Two agents whose rounds do not fit report
so until the coordinator begins a new round. The module reads no clock.
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
from gemini_hpc.core.votes import FANOUT, find_parent, list_children
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import peer, protocol
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Rejection, Tier

_NO_TIER = Tier()

# Seconds until the first repeated request; each following pause is twice as long, up to the second number.
SAY_AGAIN_S, SAY_AGAIN_MOST_S = 1.0, 16.0
TELL_S = 5.0  # after this long without progress, tell the job why it is not protected
# Begin the round again if reachable children do not acknowledge a plan for this long; double it each time.
ANEW_S, ANEW_MOST_S = 15.0, 240.0
_BAD_ONES = 8  # limit of the predecessor's versions on the tier that may turn out bad


class Host(Protocol):
    """The agent, as far as the rounds need it."""

    @property
    def job(self) -> int:
        """Return the job's id."""

    @property
    def restart(self) -> int:
        """Return the number of the incarnation that the agent is in."""

    @property
    def instance(self) -> str:
        """Return the id that distinguishes this agent from its predecessors and successors."""

    @property
    def replicas(self) -> int:
        """Return the number of a shard's holders, limited by the number of nodes."""

    @property
    def parity(self) -> int:
        """Return the number of parity blocks in a row, 0 for whole copies."""

    @property
    def wanted(self) -> int:
        """Return the number of nodes that should train: all of the allocation but its spares."""

    def send(self, host: str, message: Message) -> bool:
        """Send to one peer. Return whether there is a link to it."""

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers of other launches, void half-filled slots."""

    async def build_inventory(self) -> peer.InventoryRecord:
        """Verify the copies on this node and return their inventory."""

    @property
    def domains(self) -> Mapping[str, str]:
        """Return the known failure domains by host. The domains are read before the coordinator's inventory."""

    async def gather_outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """Return the inventories of agents on nodes that the job has left."""

    @property
    def after(self) -> int:
        """Return the predecessor: the job that this one continues if it has no state of its own. 0 means none."""

    async def gather_predecessor_state(self) -> round_plan.PredecessorState:
        """Return the copies of the predecessor's agents, as far as they can be reached."""

    @property
    def tier(self) -> bool:
        """Return whether the job has a tier."""

    @property
    def chosen(self) -> Tier:
        """Return the tier that the program has chosen."""

    def choose_tier(self, tier: Tier) -> bool:
        """Take the tier that a program has chosen. Return whether this changes anything."""

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

    def learn_rejections(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Add rejected versions to those known, and return all of them."""

    def learn_closings(self, found: Iterable[Closed], parts: Iterable[Closing]) -> tuple[Closed, ...]:
        """Add closed trainings to those known, and return all of them."""

    def store_round_begin(self, number: int, step: str) -> None:
        """Store on disk that the coordinator has used this round number."""

    def apply_plan(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, and store this on disk."""

    def admit_ranks(self, plan: peer.PlanDown) -> None:
        """Let trainers come: all agents have acknowledged. Store this on disk and write the map."""

    def store_launch(self, plan: peer.PlanDown) -> None:
        """Store on disk that the live round serves this launch of the training."""

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        """Log one event."""


class RecoveryRounds:
    """An agent's part in the rounds of one incarnation."""

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
        above = find_parent(position, fanout)
        self.parent = None if above is None else hosts[above]
        self.children = tuple(hosts[c] for c in list_children(position, len(hosts), fanout))
        self.round = 0
        self.stage = "idle"
        self.step = ""
        self.plan: peer.PlanDown | None = None
        self._records: dict[str, tuple[peer.InventoryRecord, ...]] = {}
        self._acks: set[str] = set()
        self._searching = False
        self._misfit: int | None = None  # the parent's round, if it does not fit this agent's round
        self._changed = asyncio.Event()
        self.trouble = ""  # why the round is not over after too long a wait
        self._mark: object = None  # the state at the last tick that saw progress
        self._since = self._again_at = 0.0
        self._pause_s, self._anew_s = SAY_AGAIN_S, ANEW_S

    @property
    def unseen(self) -> str:
        """Return why this round serves no launch: the tier's content is unknown. "" otherwise."""
        return self.plan.unseen if self.plan is not None else ""

    async def wait_live(self, step: str | None) -> None:
        """Wait until a round (for this launch, unless None) is over."""
        while not (self.stage == "live" and (step is None or self.step == step)):
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for the next change of stage."""
        await self._changed.wait()

    def _enter_stage(self, stage: str) -> None:
        self.stage = stage
        self.trouble = "" if stage == "live" else self.trouble
        self._changed.set()
        self._changed = asyncio.Event()

    def resume(self, plan: peer.PlanDown | None, *, live: bool, begun: int, step: str) -> None:
        """Continue after this agent's own death at its predecessor's state.

        Only data on disk counts. An agent that was collecting is asked again. A coordinator begins again, above all
        round numbers that it has used.

        Args:
            plan: The plan that the predecessor took last.
            live: The predecessor had received *go*.
            begun: The last round that the predecessor began as coordinator.
            step: The launch of that round.
        """
        if plan is not None:
            self.round, self.step, self.plan = plan.round, plan.step, plan
            self._enter_stage("live" if live else "planned")
        if self.parent is None and begun > self.round:
            self.round = begun
            self.begin_round(step)
        elif self.parent is None and plan is None:
            self.begin_round(step)
        elif self.stage == "planned":
            self._finish_planning()

    # ---- waiting ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Request missing answers again, and notice answers that are missing for too long.

        Args:
            now: The time in seconds, from a clock that never goes back. Called a few times a second.
        """
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
            heard = self._resend_requests()
            if heard and self.parent is None and self.stage == "planned" and now - self._since >= self._anew_s:
                self._host.log("round_lost", detail=f"{self._describe_wait()}: starting another round")
                self._anew_s = min(2 * self._anew_s, ANEW_MOST_S)
                self.begin_round(self.step)
        if now - self._since >= TELL_S:
            former_trouble, self.trouble = self.trouble, self._describe_wait()
            if self.trouble != former_trouble:
                self._host.log("unprotected", detail=self.trouble)

    def _list_missing(self) -> tuple[str, ...]:
        """Return the children that have not answered."""
        heard = {"collect": set(self._records), "planned": self._acks}.get(self.stage, set(self.children))
        return tuple(child for child in self.children if child not in heard)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Return the hosts that the round may wait for.

        The coordinator waits for the children without an answer and all agents below them. Another agent waits for
        its parent.
        """
        if self.parent is not None:
            return (self.parent,)
        found = [self.hosts.index(child) for child in self._list_missing()]
        for position in found:
            found.extend(list_children(position, len(self.hosts), self._fanout))
        return tuple(self.hosts[position] for position in found)

    def _describe_wait(self) -> str:
        missing = ", ".join(self._list_missing())[:300]
        if missing and len(self.awaited) > len(self._list_missing()):
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

    def _resend_requests(self) -> bool:
        """Resend requests that may have been lost. Return whether every silent child could be sent to."""
        heard = True
        if self.stage == "collect":
            for child in self.children:
                if child not in self._records:
                    heard &= self._host.send(child, peer.Collect(self.round, self.step))
        elif self.stage == "planned" and self.plan is not None:
            for child in self.children:
                if child not in self._acks:
                    heard &= self._host.send(child, self.plan)
        self._answer_parent()
        return heard

    def _answer_parent(self) -> None:
        """Send the parent the answer that it may have missed."""
        if self.parent is None:
            return
        if self._misfit is not None:
            self._host.send(self.parent, peer.RoundLost(self._misfit, self.round))
        elif self.stage == "idle":
            self._host.send(self.parent, peer.RoundLost(0, 0))
        elif self.stage == "collect":
            self._finish_collecting()
        elif self.stage == "planned":
            self._finish_planning()

    def _send_state(self, child: str) -> None:
        """Send a child the state of the round."""
        if self.stage == "collect":
            self._host.send(child, peer.Collect(self.round, self.step))
        elif self.plan is not None:
            self._host.send(child, self.plan)
            if self.stage == "live":
                self._host.send(child, peer.Go(self.round, self.step))

    # ---- starting a round ------------------------------------------------------------------------------

    def begin_round(self, step: str) -> None:
        """Start the next round. Coordinator only."""
        self._enter_round(self.round + 1, step)

    def request_round(self, after_round: int, step: str, again: bool, tier: Tier = _NO_TIER) -> None:
        """Request a round after `after_round` for a launch, or `after_round` itself if it serves no launch yet."""
        if self.parent is not None:
            self._host.send(self.parent, peer.NeedRound(after_round, step, again, tier))
        elif self.stage == "live" and after_round == self.round:
            if self._host.choose_tier(tier) or self.unseen:
                self.begin_round(step)
            elif not self.step:
                self._bind_launch(step)
            elif again or self.step != step:
                self.begin_round(step)

    def _bind_launch(self, step: str) -> None:
        """Bind the live round to this launch and report the launch to all agents.

        The first launch after an attach needs no round of its own.
        """
        assert self.plan is not None
        self.step, self.plan = step, msgspec.structs.replace(self.plan, step=step)
        self._host.store_launch(self.plan)
        self._enter_stage("live")
        for child in self.children:
            self._host.send(child, peer.Go(self.round, step))

    def _enter_round(self, number: int, step: str) -> None:
        self.round, self.step, self.plan = number, step, None
        self._records.clear()
        self._acks.clear()
        self._searching, self._misfit = False, None
        self._host.freeze(step)
        self._enter_stage("collect")
        if self.parent is None:
            self._host.store_round_begin(number, step)
        for child in self.children:
            self._host.send(child, peer.Collect(number, step))
        self._spawn(self._collect_own(number))

    async def _collect_own(self, number: int) -> None:
        record = await self._host.build_inventory()
        if number == self.round and self.stage == "collect":
            self._records[self._name] = (record,)
            self._finish_collecting()

    # ---- messages --------------------------------------------------------------------------------------

    def on_link(self, name: str) -> None:
        """Report the round to a child that comes (back), or resend an answer to the parent."""
        if name in self.children:
            self._send_state(name)
        elif name == self.parent and self.stage != "idle":
            self._answer_parent()

    def on_message(self, name: str, message: protocol.AnyMessage) -> bool:
        """Handle a message of the rounds. Return whether the message was one."""
        if isinstance(message, (peer.Collect, peer.PlanDown, peer.Go)):
            if name == self.parent and self.stage != "closed":
                self._on_parent_message(message)
        elif isinstance(message, (peer.InventoryUp, peer.PlanAck, peer.RoundLost, peer.NeedRound)):
            if name in self.children and self.stage != "closed":
                self._on_child_message(name, message)
        else:
            return False
        return True

    def _on_parent_message(self, message: peer.Collect | peer.PlanDown | peer.Go) -> None:
        same = message.round == self.round
        if isinstance(message, peer.Collect):
            if message.round > self.round:
                self._enter_round(message.round, message.step)
            elif same and self.stage == "collect":
                self._misfit = None
                self._finish_collecting()
            else:
                self._report_misfit(message.round)
        elif isinstance(message, peer.PlanDown):
            if (
                same
                and self.stage == "collect"
                and message.counted.get(self._name, instance := self._host.instance) == instance
            ):
                self._misfit = None
                self._adopt_plan(message)
            elif same and self.plan is not None and message == msgspec.structs.replace(self.plan, step=message.step):
                self._misfit = None
                if self.stage == "live":  # the ack died with the predecessor of parent or child
                    self._acknowledge()
                else:
                    self._finish_planning()
            else:
                self._report_misfit(message.round)
        elif same and self._misfit is None:
            if self.stage == "planned":
                self._begin_live()
            if self.stage == "live" and message.step and not self.step:
                self._bind_launch(message.step)
            elif self.stage == "live" and message.step and message.step != self.step:
                self._report_misfit(message.round)

    def _on_child_message(
        self, name: str, message: peer.InventoryUp | peer.PlanAck | peer.RoundLost | peer.NeedRound
    ) -> None:
        if isinstance(message, peer.NeedRound):
            if self.stage == "live" and (message.after_round, message.step) == (self.round, self.step):
                self._host.send(name, peer.Go(self.round, self.step))
            self.request_round(message.after_round, message.step, message.again, message.tier)
        elif isinstance(message, peer.RoundLost):
            if message.at == self.round:
                self._restart(message.at, message.mine)
            else:  # the message is about an earlier state of this agent or its predecessor
                self._send_state(name)
        elif message.round != self.round:
            return
        elif isinstance(message, peer.InventoryUp):
            if self.stage == "collect":
                self._records[name] = message.records
                self._finish_collecting()
        elif self.plan is not None and message.map_hash == self.plan.map_hash:
            self._acks.add(name)
            if self.stage == "live":
                self._host.send(name, peer.Go(self.round, self.step))
            else:
                self._finish_planning()

    def _report_misfit(self, at: int) -> None:
        """Report that the parent's round does not fit. The report is repeated until a round fits."""
        self._misfit = at
        self._answer_parent()

    def _restart(self, at: int, theirs: int) -> None:
        if self.parent is not None:
            self._host.send(self.parent, peer.RoundLost(at, max(theirs, self.round)))
        else:
            self._host.log(
                "round_lost",
                detail=f"an agent is already in round {theirs}, not in round {at}: starting another round",
            )
            self.round = max(self.round, theirs)
            self.begin_round(self.step)

    def close(self) -> None:
        """End all answers of this incarnation: a newer one has begun."""
        self.round, self.stage = -1, "closed"

    def _finish_collecting(self) -> None:
        if self._records.keys() != {self._name, *self.children}:
            return
        records = tuple(r for part in self._records.values() for r in part)
        if self.parent is not None:
            self._host.send(self.parent, peer.InventoryUp(self.round, records))
            return
        plan, sure = self._decide(records)
        known = (sure and not any(r.doubt for r in records)) or (self._host.restart == 0 and self.round == 1)
        if known and not self._may_inherit(plan):
            self._adopt_plan(plan)
        elif not self._searching:
            self._searching = True
            self._spawn(self._search_outside(self.round, records, plan))

    async def _search_outside(
        self, number: int, records: tuple[peer.InventoryRecord, ...], plan: peer.PlanDown
    ) -> None:
        """Search outside this incarnation's nodes, which cannot serve or have only older versions.

        Older means older than the last seal. In the first round of a restart, ask agents on the nodes that the job
        has left. Then look on the tier. Coordinator only.
        """
        sure = False
        if self._host.restart > 0 and self.round == 1 and not any(s.chosen for s in plan.trainings):
            former = {host for r in records for host in r.noderanks or {}}
            more = await self._host.gather_outside(tuple(sorted(former)))
            if any(r.copies for r in more):
                self._host.log("found_outside", detail=f"copies on {', '.join(r.host for r in more)[:300]}")
            records = (*records, *more)
            plan, sure = self._decide(records)
        # true if no version was ever sealed
        nothing = self._host.restart == 0 and all(
            r.unbroken and not (r.sealed or r.rejected or r.closed) for r in records
        )
        # An agent with a plan made without a look at the tier may have forgotten newer versions.
        seen = nothing or (sure and not any(r.doubt for r in records))
        if self._host.tier and not seen:
            without = {bad for record in records for bad in record.unreadable}
            try:
                stored = await self._host.find_stored(without, launched=bool(plan.step))
                plan, seen = round_plan.add_stored_versions(plan, stored), True
                plan = msgspec.structs.replace(plan, looked=True)
            except TierFailed as error:  # a round that goes on without the tier starts from nothing
                plan = msgspec.structs.replace(plan, unseen=str(error))
        if self._may_inherit(plan) and not plan.unseen:
            plan = await self._inherit(records, plan)
        if number == self.round and self.stage == "collect":
            self._adopt_plan(msgspec.structs.replace(plan, doubt=not seen))

    def _may_inherit(self, plan: peer.PlanDown) -> bool:
        """Return whether there is a predecessor and the job has no state of its own."""
        return bool(self._host.after) and not any(s.chosen for s in plan.trainings)

    async def _inherit(self, records: tuple[peer.InventoryRecord, ...], plan: peer.PlanDown) -> peer.PlanDown:
        """Return the plan extended by the state that the job's predecessor has left. Coordinator only."""
        host, unseen = self._host, ""
        left = await host.gather_predecessor_state()
        without: list[tuple[str, Stamp]] = []
        unreadable = {bad for record in records for bad in record.unreadable}
        for _ in range(_BAD_ONES if host.tier else 0):
            try:
                stored = await host.find_stored(without, launched=bool(plan.step), before=True)
            except TierFailed as error:
                unseen = str(error)
                break
            bad = [m for m in stored if round_plan.is_unwanted(m.training, m.stamp, plan.rejected, unreadable)]
            left = replace(left, stored=tuple(m for m in stored if m not in bad))
            if not bad:
                break
            without += [(m.training, m.stamp) for m in bad]
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
        # a round that goes on without the tier starts from nothing
        if unseen and not any(s.chosen for s in plan.trainings):
            plan = msgspec.structs.replace(plan, unseen=unseen)
        return plan

    def _adopt_plan(self, plan: peer.PlanDown) -> None:
        self.plan, self.step = plan, plan.step
        self._host.apply_plan(plan)
        self._enter_stage("planned")
        for child in self.children:
            self._host.send(child, plan)
        self._finish_planning()

    def _finish_planning(self) -> None:
        if self.stage != "planned" or not self._acks.issuperset(self.children):
            return
        if self.parent is None:
            self._begin_live()
        else:
            self._acknowledge()

    def _acknowledge(self) -> None:
        assert self.parent is not None and self.plan is not None
        self._host.send(self.parent, peer.PlanAck(self.round, self.plan.map_hash))

    def _begin_live(self) -> None:
        assert self.plan is not None
        self._host.admit_ranks(self.plan)
        self._enter_stage("live")
        for child in self.children:
            self._host.send(child, peer.Go(self.round, self.step))

    # ---- the coordinator's decision --------------------------------------------------------------------

    def _decide(self, records: tuple[peer.InventoryRecord, ...]) -> tuple[peer.PlanDown, bool]:
        """Return the plan, and whether every training in it resumes from its last seal."""
        rejected = self._host.learn_rejections([found for r in records for found in r.rejected])
        plan = recovery_plan.plan_recovery(
            {r.host: round_plan.build_inventory(r, rejected) for r in records},
            self.hosts,
            self._host.replicas,
            min_epoch=recovery_plan.compute_first_epoch(self._host.restart),
            nodes=self._host.wanted,
            parity=self._host.parity,
            by_host=self._host.domains,
        )
        for warning in plan.warnings:
            self._host.log("warning", detail=warning)
        found, pulls = round_plan.build_trainings(plan, records)
        trainings = list(found)
        if not plan.trainings and not plan.survivable:
            reason = f"all copies are gone with {', '.join(plan.gone)}"
            trainings.append(peer.PlannedTraining("default", None, (), None, 0, (), (reason,)))
        for name in sorted({found.training for found in rejected} - {s.name for s in trainings}):
            reasons = tuple(found.sentence for found in rejected if found.training == name)
            trainings.append(peer.PlannedTraining(name, None, (), None, 0, (), reasons))
        down = peer.PlanDown(
            round=self.round,
            step=self.step,
            epoch=plan.epoch,
            noderanks=plan.noderanks,
            map_hash=node_ranks.hash_noderanks(plan.noderanks, self._host.job, self._host.restart, plan.order.ranks),
            ports={r.host: r.port for r in records},
            trainings=tuple(trainings),
            pulls=pulls,
            tier=self._host.chosen,
            counted={r.host: r.instance for r in records if r.host in self.hosts},
            rejected=rejected,
            closed=self._host.learn_closings(
                [found for r in records for found in r.closed], [part for r in records for part in r.closing]
            ),
            stop=round_plan.merge_stops((r for r in records if r.host in self.hosts), plan.noderanks),
            order=plan.order.ranks,
            domains=domains.measure_separation(
                self._host.domains, plan.noderanks, min(self._host.replicas, len(plan.noderanks)), plan.order
            ),
        )
        # copies of an older incarnation are not the newest if the last one's agents are all gone
        # nor is the version before a rejected one: the tier may have newer versions
        known = plan.survivable and plan.latest >= self._host.restart - 1 and not rejected
        return down, known and bool(plan.trainings) and all(s.newest for s in plan.trainings)
