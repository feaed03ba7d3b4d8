"""The trainings of one agent: created at first use, sealed by all agents' votes, shown on the control pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.round_events import Heard, Linked, Send
from gemini_hpc.agent.replicas import voting
from gemini_hpc.agent.replicas.seal_notes import SealNotes, Within
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.replicas.voting import REGISTERED, RESUMED, Voting
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
        on_sealed: Callable[[Training, Stamp], None],
    ) -> None:
        """Create the empty collection.

        Args:
            context: The agent's context.
            store: Shards of this node.
            notes: File of the last seals, for a successor of this agent.
            on_sealed: Called with the training and the stamp of each version that is sealed.
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
        pairs = self._membership.redundancy.pairs
        training.sealing = Voting(training.name, incarnation.rounds, pairs, training.settled)

    def _step(self, training: Training, event: voting.Event) -> None:
        """Carry out the effects of an event on the votes. Votes of an earlier round lead to no decision."""
        incarnation, sealing = self._membership.incarnation, training.sealing
        if incarnation is None or sealing is None:
            return
        for effect in sealing.step(event):
            match effect:
                case Send(host, peer.VoteUp() as ballot):
                    incarnation.send(host, ballot)
                case _ if sealing.round != incarnation.rounds.round:
                    pass
                case Send(host, message):
                    incarnation.send(host, message)
                case voting.StoreSeal(sealed):
                    within = Within(incarnation.restart, sealing.round, self._membership.epoch)
                    self._notes.note(training.name, within, sealed)
                case voting.ShowDecision(word):
                    self._show_decision(training, word)

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
        self._step(training, voting.Recount([s.pair for s in present], world, kind, homes))

    def _show_decision(self, training: Training, word: Decision) -> None:
        self._show_state(training)
        if word.abandoned:
            training.page.set_abandoned(*max(word.abandoned))
        if word.why and word.void is not None:
            self._report_void(training, word.void, word.why)
        if word.sealed is not None:
            training.page.set_sealed(*word.sealed)
            if word.sealed.epoch == self._membership.epoch:
                self._store.drop_stale(training.name, self._membership.round, training.world, word.sealed)
                self.drop_load_copies(training)
            self._on_sealed(training, word.sealed)

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
            if host == rounds.parent:
                self._step(training, Linked(host))
            elif host in rounds.children and training.sealing is not None:
                incarnation.send(host, training.sealing.build_decision(rounds.round))

    def on_message(self, incarnation: Incarnation, host: str, message: peer.VoteUp | peer.DecisionDown) -> None:
        """Handle a child's vote or the parent's decision."""
        if message.round == incarnation.rounds.round and incarnation.live and self.may_have(message.training):
            self._step(self.get_or_create(message.training), Heard(host, message))

    # ---- control pages ---------------------------------------------------------------------------------

    def beat(self) -> None:
        """Show on the control pages whether nodes are missing. Called several times a second."""
        incarnation = self._membership.incarnation
        missing = incarnation is not None and bool(incarnation.mesh.list_silent() | incarnation.mesh.dead)
        self.show_dead()
        for training in self:
            if training.sealing is not None and not self._membership.detached:
                self._step(training, voting.Missing(missing))
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
