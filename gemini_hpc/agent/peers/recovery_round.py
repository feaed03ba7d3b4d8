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
of a message is on disk before it is sent (`StoreBegin`, `StorePlan`). A missing answer is requested again (`Tick`).
Every message may arrive twice. Two agents whose rounds do not fit report so until the coordinator begins a new round.

The rules contain no clock, no socket and no waiting. They yield the effects of an event. The agent
(`agent.recovery_member`) carries out each before the rules go on. If one fails, the agent thus promises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import msgspec

from gemini_hpc.agent.peers import round_events as events
from gemini_hpc.agent.peers.round_events import Effect
from gemini_hpc.core.votes import FANOUT, find_parent, list_children
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Tier

# Seconds until the first repeated request; each following pause is twice as long, up to the second number.
SAY_AGAIN_S, SAY_AGAIN_MOST_S = 1.0, 16.0
TELL_S = 5.0  # after this long without progress, tell the job why it is not protected
# Begin the round again if reachable children do not acknowledge a plan for this long; double it each time.
NEXT_ROUND_S, NEXT_ROUND_MOST_S = 15.0, 240.0


class RecoveryRounds:
    """An agent's part in the rounds of one incarnation."""

    def __init__(
        self,
        name: str,
        instance: str,
        hosts: tuple[str, ...],
        accepts: Callable[[Tier], bool],
        fanout: int = FANOUT,
    ) -> None:
        """Begin before the first round.

        Args:
            name: Host of this agent.
            instance: Id that distinguishes this agent from its predecessors and successors.
            hosts: Hosts of the incarnation.
            accepts: Returns whether a program's choice of a tier counts and is new.
            fanout: Children of an agent in the tree.
        """
        self._name, self._instance, self.hosts, self._accepts = name, instance, hosts, accepts
        self._fanout = fanout
        position = hosts.index(name)
        above = find_parent(position, fanout)
        self.parent = None if above is None else hosts[above]
        self.children = tuple(hosts[c] for c in list_children(position, len(hosts), fanout))
        self.round = 0
        self.stage = "idle"
        self.launch = ""  # the step that the round serves, if any
        self.plan: peer.PlanDown | None = None
        self._records: dict[str, tuple[peer.InventoryRecord, ...]] = {}
        self._acks: set[str] = set()
        self._searching = False
        self._misfit: int | None = None  # the parent's round, if it does not fit this agent's round
        self.trouble = ""  # why the round is not over after too long a wait
        self._mark: object = None  # the state at the last tick that saw progress
        self._since = self._again_at = 0.0
        self._pause_s, self._next_round_s = SAY_AGAIN_S, NEXT_ROUND_S

    @property
    def unseen(self) -> str:
        """Return why this round serves no launch: the tier's content is unknown. "" otherwise."""
        return self.plan.unseen if self.plan is not None else ""

    def close(self) -> None:
        """End all answers of this incarnation: a newer one has begun."""
        self.round, self.stage = -1, "closed"

    def step(self, event: events.Event) -> Iterator[Effect]:
        """Yield the effects of an event, in order. The rules go on when an effect has been carried out."""
        if self.stage == "closed":
            return
        match event:
            case events.Begin():
                yield from self._enter_round(self.round + 1, event.step)
            case events.Resume():
                yield from self._resume(event)
            case events.Tick():
                yield from self._tick(event.now, event.linked)
            case peer.NeedRound():
                yield from self._request_round(event)
            case events.Decided():
                if event.plan.round == self.round and self.stage == "collect":
                    yield from self._adopt_plan(event.plan)
            case events.Linked(host):
                if host in self.children:
                    yield from self._send_state(host)
                elif host == self.parent and self.stage != "idle":
                    yield from self._answer_parent()
            case events.Heard(host, message):
                if host == self.parent:
                    yield from self._on_parent_message(message)
                elif host in (self._name, *self.children):
                    yield from self._on_child_message(host, message)

    def _resume(self, state: events.Resume) -> Iterator[Effect]:
        """Continue after this agent's own death at its predecessor's state.

        Only data on disk counts. An agent that was collecting is asked again. A coordinator begins again, above all
        round numbers that it has used.
        """
        plan = state.plan
        if plan is not None:
            self.round, self.launch, self.plan = plan.round, plan.step, plan
            yield self._enter_stage("live" if state.live else "planned")
        if self.parent is None and (plan is None or state.begun > self.round):
            yield from self._enter_round(max(self.round, state.begun) + 1, state.step)
        elif self.stage == "planned":
            yield from self._finish_planning()

    # ---- waiting ---------------------------------------------------------------------------------------

    def _tick(self, now: float, linked: Set[str]) -> Iterator[Effect]:
        """Request missing answers again, and notice answers that are missing for too long."""
        mark = (self.round, self.stage, frozenset(self._records), frozenset(self._acks), self._misfit)
        if mark != self._mark:
            self._mark, self._since = mark, now
            self._pause_s, self._again_at = SAY_AGAIN_S, now + SAY_AGAIN_S
        if self.stage == "live" and self._misfit is None:
            self.trouble, self._next_round_s = "", NEXT_ROUND_S
            return
        if now >= self._again_at:
            self._pause_s = min(2 * self._pause_s, SAY_AGAIN_MOST_S)
            self._again_at = now + self._pause_s
            missing = self._list_missing()
            for child in missing:
                yield from self._send_state(child)
            yield from self._answer_parent()
            late = self.parent is None and self.stage == "planned" and now - self._since >= self._next_round_s
            if late and linked >= set(missing):
                yield events.Log("round_lost", f"{self._describe_wait()}: starting another round")
                self._next_round_s = min(2 * self._next_round_s, NEXT_ROUND_MOST_S)
                yield from self._enter_round(self.round + 1, self.launch)
        if now - self._since >= TELL_S:
            former_trouble, self.trouble = self.trouble, self._describe_wait()
            if self.trouble != former_trouble:
                yield events.Log("unprotected", self.trouble)

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
            what = f"{self.parent} to report the state of the round"
        elif self.stage == "collect" and self._name not in self._records:
            what = "this agent's own inventory"
        elif missing:
            what = f"the {'inventory' if self.stage == 'collect' else 'acknowledgement'} of {missing}"
        elif self._searching:
            what = "the search on the tier and on nodes that the job has left"
        else:
            what = f"the {'plan' if self.stage == 'collect' else 'go'} of {self.parent}"
        return f"recovery round {self.round} waits for {what}"

    # ---- starting a round ------------------------------------------------------------------------------

    def _request_round(self, need: peer.NeedRound) -> Iterator[Effect]:
        """Request a round after the named one for a launch, or that round itself if it serves no launch yet."""
        if self.parent is not None:
            yield events.Send(self.parent, need)
        elif self.stage == "live" and need.after_round == self.round:
            if chosen := self._accepts(need.tier):
                yield events.ChooseTier(need.tier)
            if chosen or self.unseen or (self.launch and (need.again or self.launch != need.step)):
                yield from self._enter_round(self.round + 1, need.step)
            elif not self.launch:
                yield from self._bind_launch(need.step)

    def _bind_launch(self, step: str) -> Iterator[Effect]:
        """Bind the live round to this launch and report the launch to all agents.

        The first launch after an attach needs no round of its own.
        """
        assert self.plan is not None
        self.launch, self.plan = step, msgspec.structs.replace(self.plan, step=step)
        yield events.StorePlan(self.plan, live=True)
        yield self._enter_stage("live")
        yield from self._send_down(peer.Go(self.round, step))

    def _enter_round(self, number: int, step: str) -> Iterator[Effect]:
        self.round, self.launch, self.plan = number, step, None
        self._records.clear()
        self._acks.clear()
        self._searching, self._misfit = False, None
        yield events.Freeze()
        yield self._enter_stage("collect")
        if self.parent is None:
            yield events.StoreBegin(number, step)
        yield from self._send_down(peer.Collect(number, step))
        yield events.TakeInventory(number)

    def _enter_stage(self, stage: str) -> Effect:
        self.stage = stage
        self.trouble = "" if stage == "live" else self.trouble
        return events.Change()

    # ---- messages --------------------------------------------------------------------------------------

    def _send_down(self, message: Message) -> list[Effect]:
        return [events.Send(child, message) for child in self.children]

    def _send_state(self, child: str) -> Iterator[Effect]:
        """Send a child the state of the round."""
        if self.stage == "collect":
            yield events.Send(child, peer.Collect(self.round, self.launch))
        elif self.plan is not None:
            yield events.Send(child, self.plan)
            if self.stage == "live":
                yield events.Send(child, peer.Go(self.round, self.launch))

    def _answer_parent(self) -> Iterator[Effect]:
        """Send the parent the answer that it may have missed."""
        if self.parent is None:
            return
        if self._misfit is not None:
            yield events.Send(self.parent, peer.RoundLost(self._misfit, self.round))
        elif self.stage == "idle":
            yield events.Send(self.parent, peer.RoundLost(0, 0))
        elif self.stage == "collect":
            yield from self._finish_collecting()
        elif self.stage == "planned":
            yield from self._finish_planning()

    def _on_parent_message(self, message: Message) -> Iterator[Effect]:
        match message:
            case peer.Collect(number, step) if number > self.round:
                yield from self._enter_round(number, step)
            case peer.Collect(self.round) if self.stage == "collect":
                self._misfit = None
                yield from self._finish_collecting()
            case peer.PlanDown(self.round) if self.stage == "collect" and self._is_counted(message):
                self._misfit = None
                yield from self._adopt_plan(message)
            case peer.PlanDown(_, step) if self.plan and message == msgspec.structs.replace(self.plan, step=step):
                self._misfit = None
                # if live, the ack died with the predecessor of parent or child
                yield from self._acknowledge() if self.stage == "live" else self._finish_planning()
            case peer.Collect() | peer.PlanDown():
                yield from self._report_misfit(message.round)
            case peer.Go(self.round, step) if self._misfit is None:
                if self.stage == "planned":
                    yield from self._begin_live()
                if self.stage == "live" and step and not self.launch:
                    yield from self._bind_launch(step)
                elif self.stage == "live" and step and step != self.launch:
                    yield from self._report_misfit(self.round)

    def _is_counted(self, plan: peer.PlanDown) -> bool:
        """Return whether the plan counts on this agent's own inventory, not on its predecessor's."""
        return plan.counted.get(self._name, self._instance) == self._instance

    def _on_child_message(self, name: str, message: Message) -> Iterator[Effect]:
        match message:
            case peer.NeedRound(after, step):
                if self.stage == "live" and (after, step) == (self.round, self.launch):
                    yield events.Send(name, peer.Go(self.round, self.launch))
                yield from self._request_round(message)
            case peer.RoundLost(self.round, theirs):
                yield from self._restart(theirs)
            case peer.RoundLost():  # about an earlier state of this agent or its predecessor
                yield from self._send_state(name)
            case peer.InventoryUp(self.round, records) if self.stage == "collect":
                self._records[name] = records
                yield from self._finish_collecting()
            case peer.PlanAck(self.round, map_hash) if self.plan and map_hash == self.plan.map_hash:
                self._acks.add(name)
                if self.stage == "live":
                    yield events.Send(name, peer.Go(self.round, self.launch))
                else:
                    yield from self._finish_planning()

    def _report_misfit(self, parent_round: int) -> Iterator[Effect]:
        """Report that the parent's round does not fit. The report is repeated until a round fits."""
        self._misfit = parent_round
        yield from self._answer_parent()

    def _restart(self, other_round: int) -> Iterator[Effect]:
        newest = max(other_round, self.round)
        if self.parent is not None:
            yield events.Send(self.parent, peer.RoundLost(self.round, newest))
        else:
            what = f"an agent is already in round {other_round}, not in round {self.round}: starting another round"
            yield events.Log("round_lost", what)
            yield from self._enter_round(newest + 1, self.launch)

    # ---- stages ----------------------------------------------------------------------------------------

    def _finish_collecting(self) -> Iterator[Effect]:
        if self._records.keys() != {self._name, *self.children}:
            return
        records = tuple(r for part in self._records.values() for r in part)
        if self.parent is not None:
            yield events.Send(self.parent, peer.InventoryUp(self.round, records))
        else:
            yield events.Decide(self.round, self.launch, records, search=not self._searching)
            self._searching = True

    def _adopt_plan(self, plan: peer.PlanDown) -> Iterator[Effect]:
        self.plan, self.launch = plan, plan.step
        yield events.ApplyPlan(plan)
        yield events.StorePlan(plan, live=False)
        yield self._enter_stage("planned")
        yield from self._send_down(plan)
        yield from self._finish_planning()

    def _finish_planning(self) -> Iterator[Effect]:
        if self.stage != "planned" or not self._acks.issuperset(self.children):
            return
        yield from self._begin_live() if self.parent is None else self._acknowledge()

    def _acknowledge(self) -> Iterator[Effect]:
        assert self.parent is not None and self.plan is not None
        yield events.Send(self.parent, peer.PlanAck(self.round, self.plan.map_hash))

    def _begin_live(self) -> Iterator[Effect]:
        assert self.plan is not None
        yield events.StorePlan(self.plan, live=True)
        yield events.AdmitRanks(self.plan)
        yield self._enter_stage("live")
        yield from self._send_down(peer.Go(self.round, self.launch))
