"""What must hold at each event of a simulated job, checked from outside: production methods are wrapped.

A violation is told to the campaign, which ends the run. It is not raised: production code outlives exceptions. The
moments at which something is checked are also the marked points at which a campaign lets faults happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gemini_hpc.agent import restart_state
from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers import round_events as events
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.recovery_member import RecoveryMember
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.voting import Effect, Event, Recount, Voting
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.votes import FANOUT, Decision, Vote, list_children
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message

from .kernel import _PROCESS

_NEVER = Stamp(0, 0)
POINTS = (
    "begun",
    "complete",
    "voted",
    "word",
    "noted",
    "collecting",
    "planned",
    "acknowledged",
    "go",
    "live",
    "handed back",
)
RECOVERING = ("noted", "collecting", "planned", "acknowledged", "go", "live")  # which only a recovery comes to


def _below(host: str, hosts: tuple[str, ...]) -> set[str]:
    """This one and all below it in the tree."""
    found = {host}
    for child in list_children(hosts.index(host), len(hosts), FANOUT):
        found |= _below(hosts[child], hosts)
    return found


class Truth:
    """What has really happened, whatever any agent believes."""

    def __init__(
        self,
        agents: Callable[[], Iterator[Agent]],
        wrong: Callable[[str], None],
        point: Callable[[str, str], None],
    ) -> None:
        self.agents, self.wrong, self.point = agents, wrong, point
        self.sealed: dict[int, Stamp] = {}  # by epoch: the newest one that a root has sealed
        self.digests: dict[tuple[int, Stamp], str] = {}  # by shard
        self.taken: dict[Any, set[str]] = {}  # by plan: hosts that have it
        self.were_live: set[tuple[str, Any]] = set()  # by node: plans that it has heard the end of
        self.went: set[Any] = set()  # plans that a root has said go to
        self.heard: dict[tuple[int, str], frozenset[Stamp]] = {}  # by root and child: what it has said is complete
        self.left: dict[tuple[str, int], frozenset[Stamp]] = {}  # by node and shard: what a dead agent had complete

    # ---- who it is -------------------------------------------------------------------------------------

    def owner(self, sealing: Voting) -> tuple[Agent, Training] | None:
        """Whose part of a seal this is."""
        for agent in self.agents():
            for training in agent.trainings:
                if training.sealing is sealing:
                    return agent, training
        return None

    def died(self, agent: Agent) -> None:
        """Its memory is where ranks have it, for a successor."""
        for shard in agent.store:
            self.left[agent.identity.node, shard.rank] = shard.pair.list_complete_stamps()

    # ---- R1 --------------------------------------------------------------------------------------------

    def overwritten(self, training: Training, shard: Shard, lost: Stamp, abandoned: bool) -> None:
        """A slot that had `lost` complete is given out; abandoned: its agent has heard that from the root."""
        complete = shard.pair.list_complete_stamps()
        held = f"[{', '.join(map(str, sorted(complete)))}]"
        sealed = [s for s in complete if s <= max(self.sealed.get(s.epoch, _NEVER), training.settled or _NEVER)]
        if lost == self.sealed.get(lost.epoch) and max(complete, default=_NEVER) < lost:
            self.wrong(f"R1: shard {shard.rank} gives {lost} up, which was sealed, and keeps {held}")
        elif not abandoned and not sealed:
            self.wrong(f"R1: shard {shard.rank} gives {lost} up for {held}, of which nothing is sealed")
        elif not abandoned and max(sealed) < lost and training.sealing and lost in training.sealing.voted:
            self.wrong(f"R1: shard {shard.rank} gives {lost} up, which was voted for, and keeps {held}")

    # ---- R2, R3 ----------------------------------------------------------------------------------------

    def seals(self, root: Voting, stamp: Stamp) -> None:
        """Every holder has it, complete, and is in the round in which it is sealed."""
        self.sealed[stamp.epoch] = max(stamp, self.sealed.get(stamp.epoch, _NEVER))
        found = self.owner(root)
        if found is None:
            return
        mine, training = found
        here = mine.membership.incarnation
        assert here is not None
        number, hosts = here.rounds.round, mine.membership.nodes
        if here.rounds.stage != "live":
            self.wrong(f"R4: {stamp} is sealed in round {number}, which is not over")
        for child in here.rounds.children:
            if not mine.membership.noderanks.keys() & _below(child, here.hosts):
                continue  # spares have no voice
            if stamp not in self.heard.get((id(root), child), frozenset()):
                self.wrong(f"R3: {stamp} is sealed, and {child} has not said that it has it")
        homes = self._homes(training, number)
        for agent in self.agents():
            incarnation = agent.membership.incarnation
            same = incarnation is not None and (incarnation.restart, incarnation.view) == (here.restart, here.view)
            if not same or agent.identity.again or agent.membership.round != number:
                continue
            node_rank = agent.membership.noderanks.get(agent.identity.node, -1)
            for rank in range(training.world):
                shard = agent.store.get(training.name, rank)
                home = homes.get(rank, rank) % hosts
                here_too = mine.membership.redundancy
                if node_rank not in here_too.list_holders(home):
                    continue
                if shard is None or stamp not in shard.pair.list_complete_stamps():
                    self.wrong(f"R2: {stamp} is sealed, and {agent.identity.node} has no copy of shard {rank}")
                beside = agent.store.parities.get((training.name, rank))
                if here_too.parity and (beside is None or stamp not in beside.pair.list_complete_stamps()):
                    self.wrong(f"R2: {stamp} is sealed, and {agent.identity.node} has no parity beside shard {rank}")

    def _homes(self, training: Training, number: int) -> dict[int, int]:
        """By rank, as its ranks have registered them in this round, or as they were resumed. What an agent has of a
        rank that it no longer holds for may say otherwise."""
        resumed, registered = {}, {}
        for agent in self.agents():
            for shard in agent.store.list_shards(training.name):
                if shard.registered_round == number:
                    registered[shard.rank] = shard.home
                elif shard.resumed_round == number:
                    resumed[shard.rank] = shard.home
        return resumed | registered

    def word(self, word: Decision) -> None:
        """What was sealed last, in any epoch, is not abandoned, whatever has become of copies since."""
        for stamp in word.abandoned:
            if stamp == max(self.sealed.values(), default=_NEVER):
                self.wrong(f"R2: {stamp} is abandoned, and it was sealed")

    def votes(self, agent: Agent, pairs: list[SlotPair]) -> None:
        """No vote says that a version will never come which ranks here are about to hand back."""
        for shard in agent.store:
            left = self.left.get((agent.identity.node, shard.rank), frozenset())
            if not any(shard.pair is pair for pair in pairs) or len(shard.handed_back) != 1:
                continue
            vote = Vote(floor=shard.pair.floor, kept=shard.pair.kept)
            for stamp in sorted(left):
                if not vote.is_possible(stamp):
                    self.wrong(
                        f"R2: shard {shard.rank} will never have {stamp}, it says, and that is still to come back"
                    )

    # ---- R4 --------------------------------------------------------------------------------------------

    def takes(self, member: RecoveryMember, plan: peer.PlanDown) -> None:
        """What the plan does not keep does not count any more, and what it says to be sealed is."""
        for one in plan.trainings:
            if one.sealed is not None and Stamp(*one.sealed) > self.sealed.get(one.sealed[0], _NEVER):
                self.wrong(f"R4: {Stamp(*one.sealed)} counts as sealed in round {plan.round}, and has not been")
        self.taken.setdefault(_name(member, plan), set()).add(member._identity.node)
        keep = {s.name: {Stamp(*stamp) for stamp in s.keep} for s in plan.trainings}
        for shard in member._store.list_all():
            self.left.pop((member._identity.node, shard.rank), None)
            if more := shard.pair.list_complete_stamps() - keep.get(shard.training, set()):
                self.wrong(
                    f"R4: shard {shard.rank} still counts {sorted(map(str, more))} after the plan without them"
                )

    def decides(self, records: tuple[peer.InventoryRecord, ...], plan: peer.PlanDown) -> None:
        """Until what was chosen is sealed, what is sealed and whole is kept beside it."""
        for one in plan.trainings:
            if one.chosen is None or Stamp(*one.chosen) <= self.sealed.get(one.chosen[0], _NEVER):
                continue
            found: dict[Stamp, set[int]] = {}
            for copy in (c for record in records for c in record.copies if c.training == one.name and not c.members):
                stamp = Stamp(*copy.stamp)
                if stamp < Stamp(*one.chosen) and stamp <= self.sealed.get(stamp.epoch, _NEVER):
                    found.setdefault(stamp, set()).add(copy.rank)
            whole = max((stamp for stamp, ranks in found.items() if len(ranks) == one.world), default=None)
            if whole is not None and tuple(whole) not in {tuple(stamp) for stamp in one.keep}:
                self.wrong(f"R4: {Stamp(*one.chosen)} is chosen unsealed, and {whole} is not kept beside it")

    def lives(self, member: RecoveryMember, plan: peer.PlanDown) -> None:
        """Every member has taken the plan, and the root has said go."""
        if _name(member, plan) not in self.went:
            self.wrong(f"R4: {member._identity.node} is live in round {plan.round}, and nobody has said go")
        self.were_live.add((member._identity.node, _name(member, plan)))
        if missing := plan.noderanks.keys() - self.taken.get(_name(member, plan), set()):
            self.wrong(f"R4: {member._identity.node} is live, and {sorted(missing)} have not taken the plan")

    def says(self, member: RecoveryMember, message: Message) -> None:
        """What a message promises is on the disk of who sends it, unless the agent complains that it cannot be."""
        if member._state.problem or not isinstance(message, (peer.Collect, peer.PlanAck, peer.Go)):
            return
        where = Path(member._identity.directory) / restart_state.NAME
        try:
            state = msgspec.json.decode(where.read_bytes(), type=restart_state.State)
        except OSError:
            state = None
        promised, incarnation = False, member._membership.incarnation
        if state is not None and isinstance(message, peer.Collect):
            promised = state.begun >= message.round
        elif state is not None and state.plan is not None:
            promised = state.plan.round == message.round and (state.live or not isinstance(message, peer.Go))
        follows = isinstance(message, peer.Collect) and incarnation is not None and not incarnation.leads
        if not promised and not follows and not member._membership.detached:
            self.wrong(f"R4: {member._identity.node} says {type(message).__name__} {message.round}, not on its disk")

    # ---- R5, R6 ----------------------------------------------------------------------------------------

    def completes(self, shard: Shard, index: int) -> None:
        """The name of a version names one content."""
        key, slot = -1 - shard.rank if shard.parity is not None else shard.rank, shard.pair.slots[index]
        assert slot.stamp is not None and slot.digest is not None
        if self.digests.setdefault((key, slot.stamp), slot.digest) != slot.digest:
            self.wrong(f"R5: {slot.stamp} of shard {shard.rank} names two contents")

    def settles(self, shard: Shard, index: int) -> None:
        """What was verified is what was saved."""
        record = shard.describe_copy(index)
        if record is not None and shard.memory[index].digest(record.used) != record.digest:
            self.wrong(f"R5: {record.stamp} of shard {shard.rank} counts, and its bytes are other ones")


def _name(member: RecoveryMember, plan: peer.PlanDown) -> Any:
    return member._membership.restart, plan.round, plan.epoch, tuple(sorted(plan.counted.items()))


def install(truth: Truth) -> None:
    """For the rest of this process, around whatever these methods are now."""
    _slots(truth)
    _seals(truth)
    _rounds(truth)


def _around(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    """wrapped: is given the method as it was, and then what that is given."""
    was = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: wrapped(was, *args, **named))


def _host() -> str:
    found = _PROCESS.get()
    return found.host if found is not None else ""


def _slots(truth: Truth) -> None:
    def begin(was: Any, self: SlotWrites, training: Training, shard: Shard, version: int) -> int:
        before, sealing = [(s.state, s.stamp) for s in shard.pair.slots], training.sealing
        index: int = was(self, training, shard, version)
        state, stamp = before[index]
        if state == "complete" and stamp is not None and sealing is not None:
            truth.overwritten(training, shard, stamp, stamp in sealing.decision.abandoned)
        truth.left.pop((_host(), shard.rank), None)
        truth.point("begun", _host())
        return index

    def arrived(was: Any, self: SlotWrites, shard: Shard, index: int, claimed: Committed, found: str) -> bool:
        counts: bool = was(self, shard, index, claimed, found)
        if shard.pair.slots[index].state == "complete":
            truth.completes(shard, index)
            truth.point("complete", _host())
        return counts

    def settle(was: Any, self: Shard, index: int, digest: str) -> bool:
        whole: bool = was(self, index, digest)
        if whole:
            truth.settles(self, index)
        return whole

    def restore(was: Any, self: SlotPair, *args: Any) -> None:
        was(self, *args)
        truth.point("handed back", _host())

    _around(SlotWrites, "begin_write", begin)
    _around(SlotWrites, "complete_slot", arrived)
    _around(Shard, "verify_slot", settle)
    _around(SlotPair, "restore_slot", restore)


def _seals(truth: Truth) -> None:
    def tell(was: Any, self: Voting) -> Iterator[Effect]:
        root = self._root
        before = root.decide().sealed if root is not None else None
        yield from was(self)
        if root is not None:
            word = root.decide()
            truth.word(word)
            if word.sealed is not None and word.sealed != before:
                truth.seals(self, word.sealed)

    def step(was: Any, self: Voting, event: Event) -> Iterator[Effect]:
        match event:
            case events.Heard(child, peer.VoteUp() as ballot):
                truth.heard[id(self), child] = ballot.vote.complete
            case Recount(pairs) if (found := truth.owner(self)) is not None:
                truth.votes(found[0], pairs)
        yield from was(self, event)
        if isinstance(event, Recount):
            truth.point("voted", _host())

    def hear(was: Any, self: Voting, word: Decision, degraded: bool) -> Iterator[Effect]:
        before = self.decision.sealed
        yield from was(self, word, degraded)
        if self.decision.sealed != before:
            truth.point("word", _host())

    _around(Voting, "step", step)
    _around(Voting, "_send_vote", tell)
    _around(Voting, "_on_decision", hear)


def _rounds(truth: Truth) -> None:
    def decide(was: Any, self: Coordinator, incarnation: Incarnation, order: events.Decide) -> Any:
        plan, sure = was(self, incarnation, order)
        truth.decides(order.records, plan)
        return plan, sure

    def resume(was: Any, self: RecoveryMember, incarnation: Incarnation, state: restart_state.State) -> None:
        node, plan = self._identity.node, state.plan
        known = plan is None or (node, _name(self, plan)) in truth.were_live
        was(self, incarnation, state)
        if incarnation.live and not known:
            truth.wrong(f"R4: {node} is live again in round {incarnation.rounds.round}, and was not before")

    def perform(was: Any, self: RecoveryMember, incarnation: Incarnation, effect: events.Effect) -> None:
        rounds, node = incarnation.rounds, self._identity.node
        match effect:
            case events.Send(_, message):
                truth.says(self, message)
            case events.AdmitRanks(plan) if incarnation.leads:
                truth.went.add(_name(self, plan))
            case events.Change() if rounds.stage == "live" and rounds.plan is not None:
                truth.lives(self, rounds.plan)
        was(self, incarnation, effect)
        match effect:
            case events.Freeze():
                truth.point("collecting", node)
            case events.StorePlan(plan, live=False):
                truth.takes(self, plan)
                truth.point("planned", node)
            case events.AdmitRanks():
                truth.point("live", node)
            case events.Send(_, peer.PlanAck()):
                truth.point("acknowledged", node)
            case events.Send(_, peer.Go()):
                truth.point("go", node)

    def write(was: Any, self: restart_state.StateFile, state: restart_state.State) -> bool:
        there: bool = was(self, state)
        truth.point("noted", _host())
        return there

    _around(Coordinator, "_make_plan", decide)
    _around(RecoveryMember, "succeed", resume)
    _around(RecoveryMember, "perform", perform)
    _around(restart_state.StateFile, "write", write)
