"""The trainings of one agent: created at first use, sealed by all agents' votes, shown on the control pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.replicas.seal_notes import SealNotes, Within
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.voting import REGISTERED, RESUMED, Voting, from_wire, to_wire
from gemini_hpc.core.numbers import TRAINING_NAME
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.votes import Decision
from gemini_hpc.wire import control_page, peer

MAX_TRAININGS = 64


class Trainings:
    """All trainings of one agent. Iteration yields the `Training`s."""

    def __init__(
        self,
        context: AgentContext,
        store: Store,
        notes: SealNotes,
        on_sealed: Callable[[Training, int, Stamp], None],
    ) -> None:
        """Create the empty collection.

        Args:
            context: The agent's context.
            store: Shards of this node.
            notes: File of the last seals, for a successor of this agent.
            on_sealed: Called with the training, the round and the stamp of each version that is sealed.
        """
        self._node, self._membership, self._log = context.node, context.membership, context.log
        self._store, self._notes, self._on_sealed = store, notes, on_sealed
        self._trainings: dict[str, Training] = {}
        self._recounts: set[str] = set()
        self._held = 0

    def __iter__(self) -> Iterator[Training]:
        return iter(list(self._trainings.values()))

    def get(self, name: str) -> Training | None:
        """Return the training of this name, or None."""
        return self._trainings.get(name)

    @property
    def begun(self) -> int:
        """Return the newest version that a rank of this launch has begun to save here, 0 before the first."""
        return max((training.begun for training in self), default=0)

    def may_have(self, name: str) -> bool:
        """Return whether a training of this name exists or may be created."""
        return name in self._trainings or (
            len(self._trainings) < MAX_TRAININGS and TRAINING_NAME.fullmatch(name) is not None
        )

    def get_or_create(self, name: str) -> Training:
        """Return the training of this name, created at first use."""
        training = self._trainings.get(name)
        if training is None:
            training = self._trainings[name] = Training(name)
            training.page.set_held(self._held)
            incarnation = self._membership.live
            if incarnation is not None:
                training.apply_plan(None, incarnation.rounds.round)
                self._open_voting(incarnation, training)
        return training

    # ---- incarnations ----------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop sealing for a recovery round. The root's last decision goes into the inventory."""
        for training in self:
            training.settled = training.sealed
            training.sealing = None
            training.page.set_state(control_page.STATE_FROZEN)

    def apply_plan(self, plan: peer.PlanDown) -> None:
        """Reset every training to the plan of a round."""
        planned = {s.name: s for s in plan.trainings}
        for closed in plan.closed:
            if closed.training not in planned:
                self.remove(closed.training)
        for name in planned.keys() | self._trainings.keys():
            training = self.get_or_create(name)
            self.drop_load_copies(training)
            training.apply_plan(planned.get(name), plan.round)

    def recall(self, within: Within) -> None:
        """Restore the seals that this agent's dead predecessor noted in the round of the last plan taken."""
        for name, sealed in self._notes.read(within).items():
            if self.may_have(name):
                training = self.get_or_create(name)
                training.settled = max(sealed, training.settled or sealed)
                training.page.set_sealed(*training.settled)

    def open(self, incarnation: Incarnation) -> None:
        """Open voting in every training, after all agents agree on the plan."""
        for training in self:
            self._open_voting(incarnation, training)

    def close(self) -> None:
        """Free all trainings."""
        for training in self:
            self.drop_load_copies(training)
            training.close()

    def remove(self, name: str) -> None:
        """Remove a training that is not needed any more."""
        training = self._trainings.pop(name, None)
        if training is not None:
            self.drop_load_copies(training)
            training.close()
            self._notes.forget(name)

    def drop_load_copies(self, training: Training) -> None:
        """Free copies that were pulled only to be loaded."""
        for memory in training.load_copies.values():
            self._store.budget.free(memory)
        training.load_copies.clear()

    # ---- seals -----------------------------------------------------------------------------------------

    def _open_voting(self, incarnation: Incarnation, training: Training) -> None:
        rounds = incarnation.rounds
        number, name, above = rounds.round, training.name, rounds.parent
        training.sealing = Voting(
            self._membership.redundancy.pairs,
            rounds.children,
            None if above is None else lambda ballot: self._membership.send(above, to_wire(number, name, ballot)),
            lambda word, degraded: self._spread_decision(training, number, word, degraded),
            training.settled,
        )

    def recount(self, name: str) -> None:
        """Vote anew after a change in this training's slots, at most once per turn of the event loop."""
        if name not in self._recounts:
            self._recounts.add(name)
            asyncio.get_running_loop().call_soon(self._recount, name)

    def _recount(self, name: str) -> None:
        self._recounts.discard(name)
        training, number = self._trainings.get(name), self._membership.round
        if training is None or training.sealing is None:
            return
        # half a pair would vote as if it had passed over the version in its other slot
        shards = [*self._store.list_shards(name), *self._store.list_parities(name)]
        registered = [s for s in shards if s.registered_round == number and s.world == training.world]
        present = [s for s in registered if not s.half_back]
        kind, world = REGISTERED, training.world
        if not registered:  # no rank has registered yet: vote on the version that the training resumes from
            kind, world = RESUMED, training.chosen_world
            present = [s for s in shards if s.resumed_round == number and s.world == world]
        own_noderank = self._membership.noderanks.get(self._node)
        homes = {
            s.rank: s.pair for s in present if s.home == own_noderank and s.parity is None and kind == REGISTERED
        }
        training.sealing.recount([s.pair for s in present], world, kind, homes)

    def _spread_decision(self, training: Training, number: int, word: Decision, degraded: bool) -> None:
        incarnation = self._membership.incarnation
        if incarnation is None or number != incarnation.rounds.round:
            return
        if word.sealed is not None and word.sealed != training.noted:
            # before any peer learns of the seal and frees older versions
            within = Within(incarnation.restart, number, self._membership.epoch)
            self._notes.note(training.name, within, word.sealed)
            training.noted = word.sealed
        incarnation.send_down(_build_decision(number, training.name, word, degraded))
        self._show_state(training)
        if word.abandoned:
            training.page.set_abandoned(*max(word.abandoned))
        if word.why and word.void is not None:
            self._report_void(training, word.void, word.why)
        if word.sealed is not None:
            training.page.set_sealed(*word.sealed)
            if word.sealed.epoch == self._membership.epoch:
                self._store.drop_stale(training.name, number, training.world, word.sealed)
                self.drop_load_copies(training)
            self._on_sealed(training, number, word.sealed)

    def _report_void(self, training: Training, void: Stamp, why: str) -> None:
        """Log and complain, once, that a version is void because its ranks disagree on its moment."""
        if training.void == void:
            return
        training.void, training.void_note = void, why
        training.record_trouble(why)
        incarnation = self._membership.incarnation
        if incarnation is not None and incarnation.leads:
            self._log("disagreement", version=void.version, detail=why)

    def on_link(self, incarnation: Incarnation, host: str) -> None:
        """Resend votes or decisions over a new link, because the peer may have missed them."""
        rounds = incarnation.rounds
        for training in self:
            sealing = training.sealing
            if sealing is None:
                continue
            if host == rounds.parent:
                sealing.repeat()
            elif host in rounds.children:
                incarnation.send(
                    host, _build_decision(rounds.round, training.name, sealing.decision, sealing.degraded)
                )

    def on_message(self, incarnation: Incarnation, host: str, message: peer.VoteUp | peer.DecisionDown) -> None:
        """Handle a child's vote or the parent's decision."""
        rounds = incarnation.rounds
        if message.round != rounds.round or not incarnation.live or not self.may_have(message.training):
            return
        sealing = self.get_or_create(message.training).sealing
        if sealing is None:
            return
        if isinstance(message, peer.VoteUp):
            sealing.on_vote(host, from_wire(message))
        elif host == rounds.parent:
            sealed = message.sealed
            word = Decision(sealed, frozenset(message.abandoned), message.void, message.why)
            sealing.on_decision(word, message.degraded)

    # ---- control pages ---------------------------------------------------------------------------------

    def beat(self) -> None:
        """Show on the control pages whether nodes are missing. Called several times a second."""
        incarnation = self._membership.incarnation
        missing = incarnation is not None and bool(incarnation.mesh.list_silent() | incarnation.mesh.dead)
        self.show_dead()
        for training in self:
            if training.sealing is not None and not self._membership.detached:
                training.sealing.record_missing(missing)
                self._show_state(training)

    def show_dead(self) -> None:
        """Show the number of dead nodes on every control page."""
        incarnation = self._membership.incarnation
        for training in self:
            training.page.set_dead_nodes(len(incarnation.mesh.dead) if incarnation is not None else 0)

    def hold_ranks(self, epoch: int) -> None:
        """Stop ranks at the next sealed version.

        Args:
            epoch: Ranks up to this epoch stop, including ranks that join later. 0 lets all ranks go on.
        """
        self._held = epoch
        for training in self:
            training.page.set_held(epoch)

    def _show_state(self, training: Training) -> None:
        """Show on the control page whether a seal is possible. Trainers wait for one only then."""
        sealing, incarnation = training.sealing, self._membership.live
        if sealing is None or incarnation is None:
            return
        above = incarnation.rounds.parent
        cut_off = above is not None and above not in incarnation.mesh.links
        if sealing.degraded or cut_off:
            state = control_page.STATE_DEGRADED
        else:
            state = control_page.STATE_ARMING if sealing.decision.sealed is None else control_page.STATE_PROTECTED
        if training.page.state != state:
            training.page.set_state(state)


def _build_decision(number: int, training_name: str, word: Decision, degraded: bool) -> peer.DecisionDown:
    sealed = word.sealed
    abandoned = tuple(sorted(word.abandoned))
    return peer.DecisionDown(number, training_name, sealed, abandoned, degraded, word.void, word.why[:1000])
