"""Production code that is broken on purpose: a simulation that does not notice is worth nothing.

Each control takes one rule away. A seed in `seeds.json` shows its harm; `python -m tests.sim.seeds` finds another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from gemini_hpc.agent import spares
from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Heard, Send
from gemini_hpc.agent.replicas import trainings, voting
from gemini_hpc.agent.replicas.outlines import KeptOutline, Outlines
from gemini_hpc.agent.replicas.seal_notes import SealNotes
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Shard, Store
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.replicas.voting import Voting
from gemini_hpc.agent.rescue import Rescue, RescueChannel
from gemini_hpc.agent.restart_state import StateFile
from gemini_hpc.agent.transfer import part_receiver
from gemini_hpc.agent.transfer.part_receiver import Part, PartReceiver
from gemini_hpc.agent.transfer.rdma import Window
from gemini_hpc.core import recovery_plan, votes
from gemini_hpc.core.parity_plan import Parities
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.views import View
from gemini_hpc.core.votes import Decision
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.wire.link import Link
from gemini_hpc.wire.message import Message

CONTROLS: dict[str, Callable[[], None]] = {}


def control(broken: Callable[[], None]) -> Callable[[], None]:
    """Known by its name."""
    CONTROLS[broken.__name__.replace("_", "-")] = broken
    return broken


def patch(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute for the rest of this process. It must exist, or the control breaks nothing."""
    assert hasattr(owner, name), f"{owner} has no {name}"
    setattr(owner, name, value)


@control
def no_seal_asked() -> None:
    """R1: a slot is overwritten though nothing newer is sealed."""

    def room(self: SlotPair, stamp: Stamp, *_: Any) -> int:
        order = sorted((slot.stamp or Stamp(0, 0), index) for index, slot in enumerate(self.slots))
        return order[0][1]

    patch(SlotPair, "_choose_slot", room)


@control
def no_digest() -> None:
    """R5: what is held is believed to be what it was."""
    patch(Shard, "verify_slot", lambda self, index, digest: self.describe_copy(index) is not None)


@control
def away_without_the_digest_of_home() -> None:
    """R5: a copy away from home is complete when its bytes have been read, whatever the home has said of them."""
    complete = SlotWrites.complete_slot

    def anyhow(self: SlotWrites, shard: Shard, index: int, claimed: Committed, found: str) -> bool:
        return complete(self, shard, index, claimed._replace(digest=found), found)

    patch(SlotWrites, "complete_slot", anyhow)


@control
def votes_not_kept() -> None:
    """R1: a version that was voted for is given up before the word on it."""
    begin = SlotPair.begin_version
    nothing: frozenset[Stamp] = frozenset()
    patch(
        SlotPair,
        "begin_version",
        lambda self, stamp, sealed, abandoned, *, voted: begin(self, stamp, sealed, abandoned, voted=nothing),
    )


@control
def sealed_by_some() -> None:
    """R2, R3: the root seals though shards, or holders, are missing."""

    def tell(self: Any) -> Any:
        self.voted |= self._own.vote.complete
        ballot = self._merge_ballots()
        if self._root is None:
            if ballot != self._sent:
                self._sent = ballot
                yield Send(self._parent, ballot)
            return
        self._root.record_vote(ballot.vote)
        yield from self._on_decision(self._root.decide(), ballot.degraded)

    patch(Voting, "_send_vote", tell)


@control
def half_a_pair_votes() -> None:
    """A pair of which one slot has been handed back says that it has gone past what is in the other one."""

    def recount(self: Any, name: str) -> None:
        for shard in self._store.list_shards(name):
            shard.half_back = False
        recounted(self, name)

    recounted = Trainings._recount
    patch(Trainings, "_recount", recount)


@control
def skips_are_not_told() -> None:
    """What a rank skips is no part of the vote."""
    patch(SlotWrites, "pass_over", lambda self, shard, version: None)


@control
def nothing_is_voided() -> None:
    """R4: after a recovery copies count that it has not chosen."""
    patch(SlotPair, "empty_except", lambda self, *keep: ())


@control
def epochs_stand_still() -> None:
    """R6: a version after a recovery bears the name of one before it."""
    decide = Coordinator._make_plan

    def decided(self: Any, *given: Any) -> Any:
        plan, sure = decide(self, *given)
        return msgspec.structs.replace(plan, epoch=1), sure

    patch(Coordinator, "_make_plan", decided)


@control
def state_is_not_written() -> None:
    """What an agent has agreed to is not on its disk when it dies."""

    def write(self: Any, state: Any) -> bool:
        self._wanted = state
        return True

    patch(StateFile, "write", write)


@control
def go_without_acknowledgements() -> None:
    """R4: agents are live before all have taken the plan."""
    acknowledged = RecoveryRounds._finish_planning

    def at_once(self: Any) -> Any:
        due = self.parent is None and self.stage == "planned"
        return self._begin_live() if due else acknowledged(self)

    patch(RecoveryRounds, "_finish_planning", at_once)


@control
def live_is_forgotten() -> None:
    """A successor takes a round for live whose end its predecessor had not heard of."""
    resume = RecoveryRounds._resume

    def resumed(self: Any, state: Any) -> Any:
        return resume(self, msgspec.structs.replace(state, live=state.plan is not None))

    patch(RecoveryRounds, "_resume", resumed)


@control
def seals_are_forgotten() -> None:
    """R2: a root's successor knows of no seal, and abandons one of which a copy is damaged."""
    patch(SealNotes, "read", lambda self, within: {})


@control
def no_freeze() -> None:
    """R4: versions are sealed while a recovery decides.

    That a recovery takes the seal away is redundant: votes and words are not heard while a round is on, nor what
    names another round. Both are broken here.
    """

    def heard(self: Any, incarnation: Any, host: str, message: Any) -> None:
        if self.may_have(message.training) and (seal := self.get_or_create(message.training).sealing) is not None:
            seal.round = incarnation.rounds.round
            self._step(self.get_or_create(message.training), Heard(host, message))

    patch(trainings.Trainings, "freeze", lambda self: None)
    patch(trainings.Trainings, "on_message", heard)


@control
def abandoned_by_one() -> None:
    """A version is given up though every pair can still have it."""
    patch(votes.Vote, "is_possible", lambda self, stamp: stamp in self.kept)


@control
def half_of_the_pairs_vote() -> None:
    """R2: an agent votes for what is complete in some of its pairs, not in all."""
    counted = votes.build_vote

    def build_vote(pairs: Any, own: Any = ()) -> votes.Vote:
        vote = counted(pairs, own)
        return votes.Vote(vote.seen, vote.seen, vote.floor, vote.kept, vote.marks)

    patch(voting, "build_vote", build_vote)


@control
def nothing_is_abandoned() -> None:
    """R2: who waits for a version that will never be complete waits for ever."""
    word = votes.Root.decide
    patch(votes.Root, "decide", lambda self: Decision(word(self).sealed))


@control
def no_fallback_is_kept() -> None:
    """R4: of a version that was chosen and never sealed there may be one copy; what was sealed before is voided."""
    patch(recovery_plan, "_choose_fallback", lambda chosen, choosable, sealed: ())


@control
def the_chosen_counts_as_sealed() -> None:
    """R4: a version that was chosen and never sealed counts as sealed at once."""
    plan = recovery_plan.plan_recovery

    def planned(*args: Any, **named: Any) -> recovery_plan.RecoveryPlan:
        made = plan(*args, **named)
        return replace(made, trainings=tuple(replace(s, sealed=s.chosen) for s in made.trainings))

    patch(recovery_plan, "plan_recovery", planned)


# ---- of jobs with spares --------------------------------------------------------------------------------

SPARED: dict[str, Callable[[], None]] = {}


def spared(broken: Callable[[], None]) -> Callable[[], None]:
    """Known by its name, in a job with spares."""
    SPARED[broken.__name__.replace("_", "-")] = broken
    return broken


@spared
def any_part_goes_on() -> None:
    """Views: a part of a split network goes on with as many nodes as it has."""

    def exclude(self: View, dead: Iterable[str], nodes: int = 0) -> View | None:
        lost = self.lost | set(dead).intersection(self.allocated)
        return None if lost == self.lost or len(lost) == len(self.allocated) else replace(self, lost=lost)

    patch(View, "exclude", exclude)


@spared
def losses_are_not_told() -> None:
    """Views: an agent does not learn from its peers' handshakes what they have lost."""
    patch(Agent, "on_nodes_lost", lambda self, hosts: None)


@spared
def nobody_waits() -> None:
    """Views: a job goes on at once without nodes that are only cut off, and hold something alone."""
    patch(Rescue, "are_sole_holders", lambda self, dead: False)
    patch(spares, "_SUSPECTS_S", 0.0)


@spared
def nobody_is_held() -> None:
    """Planned moves: ranks go on beyond the seal at which a node is left."""
    patch(Trainings, "hold_ranks", lambda self, epoch: None)


# ---- of jobs whose ranks are replicas of each other -----------------------------------------------------

LIVE: dict[str, Callable[[], None]] = {}


def live(broken: Callable[[], None]) -> Callable[[], None]:
    """Known by its name, in a job whose ranks are replicas of each other."""
    LIVE[broken.__name__.replace("_", "-")] = broken
    return broken


@live
def nobody_copies_live_state() -> None:
    """Rescue: what lives in tensors is lost with its holders."""
    patch(Rescue, "on_death", lambda self: None)


@live
def nobody_answers_a_farewell() -> None:
    """Ends: an agent that leaves closes its links at once, and what is on its way to it resets them."""

    def at_once(self: Link, message: Message) -> None:
        self.send(message)
        self.close()

    async def wait(self: Mesh) -> None: ...

    patch(Link, "finish", at_once)
    patch(Mesh, "wait_until_informed", wait)


@live
def no_outlines() -> None:
    """Rescue: what a shard was beside its tensors is not told."""
    patch(Outlines, "on_outline", lambda self, host, message: None)


@live
def only_who_keeps_outlines() -> None:
    """Rescue: what other living ranks were about to save is left where it is."""
    patch(Rescue, "_list_affected_trainings", lambda self: sorted({key[0] for key in self._list_without_holders()}))


@live
def nobody_waits_for_the_living() -> None:
    """Rescue: it is over before the living ranks' own copies are complete."""

    patch(Outlines, "list_shards_to_rebuild", lambda self, dead, stamp: [])

    async def at_once(self: Rescue, channel: RescueChannel) -> int:
        return channel.rank

    patch(Rescue, "_wait_for_own_slot", at_once)


@live
def a_seal_frees_what_was_rescued() -> None:
    """Rescue: no rank has registered the copies that it has made."""
    drop_stale = Store.drop_stale

    def all_of_them(self: Store, training_name: str, round_number: int, world: int, sealed: Stamp) -> None:
        for shard in self.shards.values():
            shard.rescued_round = 0
        drop_stale(self, training_name, round_number, world, sealed)

    patch(Store, "drop_stale", all_of_them)


@live
def any_version_will_do() -> None:
    """Rescue: a rank's tensors are taken for those of whatever version an outline is of."""
    find = Outlines.find

    def any_of(self: Outlines, name: str, rank: int, stamp: Stamp) -> KeptOutline | None:
        kept = find(self, name, rank, stamp) or next(iter(self._kept.get((name, rank), ())), None)
        return kept and kept._replace(digest="", outline=msgspec.structs.replace(kept.outline, stamp=stamp))

    patch(Outlines, "find", any_of)


# ---- of jobs whose nodes keep parity --------------------------------------------------------------------

XOR: dict[str, Callable[[], None]] = {}


def xor(broken: Callable[[], None]) -> Callable[[], None]:
    """Known by its name, in a job whose nodes keep parity."""
    XOR[broken.__name__.replace("_", "-")] = broken
    return broken


@xor
def one_version_folds_into_another() -> None:
    """Parity: what is left of an earlier version in a slot is not cleared."""
    patch(part_receiver, "clear", lambda view: None)


@xor
def half_of_it_counts() -> None:
    """Parity: a member that has not come to its end is taken for one that has."""
    end = PartReceiver.end

    async def anyhow(self: PartReceiver, part: Part, digest: str, claimed: str, found: str, mark: int) -> int:
        return await end(self, part, digest or "0" * 32, found, found, mark)

    patch(PartReceiver, "end", anyhow)


@xor
def nobody_makes_what_is_lost() -> None:
    """R4: what could be made again does not count."""
    patch(Parities, "find_rebuildable", lambda self, *_: {})


@xor
def seals_without_parity() -> None:
    """R2: shards alone are counted."""
    patch(Store, "list_parities", lambda self, name: [])
    patch(Redundancy, "pairs", property(lambda self: 1))


# ---- of jobs whose ranks do not mean the same by a version ----------------------------------------------

MISCOUNTS: dict[str, Callable[[], None]] = {}


def miscounts(broken: Callable[[], None]) -> Callable[[], None]:
    """Known by its name, in a job whose ranks do not mean the same iteration by each version."""
    MISCOUNTS[broken.__name__.replace("_", "-")] = broken
    return broken


@miscounts
def seals_a_mixture() -> None:
    """R7: the root does not compare the moments that ranks mean."""
    patch(votes, "is_common", lambda mark: True)


@miscounts
def resumes_a_mixture() -> None:
    """R7: a recovery does not compare them: a failure right behind a void version finds it complete everywhere."""
    patch(recovery_plan.moments, "is_common", lambda mark: True)


RDMA: dict[str, Callable[[], None]] = {}  # of agents with devices for RDMA


def with_rdma(broken: Callable[[], None]) -> Callable[[], None]:
    """Known by its name, and found where versions go by RDMA."""
    RDMA[broken.__name__.replace("_", "-")] = broken
    return broken


@with_rdma
def queue_pairs_stay() -> None:
    """R1: a slot is given out, or counts, while a peer's device may still write into it."""
    patch(Window, "close", lambda self: None)


@with_rdma
def not_flushed() -> None:
    """R1: a queue pair is put into ERROR, and what has begun to land is not waited for."""

    def close(self: Window) -> None:
        verbs = self._memory.port.verbs
        with suppress(OSError):
            self._pair.modify(verbs.QPAttrMask.STATE, qp_state=verbs.QPState.ERR)

    patch(Window, "close", close)
