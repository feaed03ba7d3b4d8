"""The ends of trainings that all ranks have closed, kept because a restart may need them.

Counts of closed ranks go up the tree, and the root's decision comes down. From then on each agent keeps only the last
sealed version. When the job's next training has sealed a version, the root has the closed one saved to the tier, if
there is one. All agents then release it.
"""

from __future__ import annotations

import msgspec

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.core.sequence import Closed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer

_LATER_S = 1.0  # delay of the report: the job's end, which often comes first, makes it needless


class ClosedTrainings:
    """The closed trainings of one agent, as reported by its ranks, its peers and the root."""

    def __init__(self, context: AgentContext, replicas: Replicas, tier: TierParts) -> None:
        self._membership, self._spawn = context.membership, context.spawn
        self._trainings, self._store, self._closings = replicas.trainings, replicas.store, replicas.closings
        self._saver, self._writer = tier.saver, tier.writer
        self._round = (-1, 0)
        self._own: dict[str, peer.ClosedUp] = {}
        self._due: dict[str, float] = {}  # when this agent's own count is sent
        self._below: dict[str, dict[str, peer.ClosedUp]] = {}  # by training and child
        self._down: dict[str, peer.ClosedDown] = {}  # the root's decisions in this round
        # at the root: the trainings that had begun when a rank closed one
        self._beside: dict[str, frozenset[str]] = {}
        self._parting: set[str] = set()  # at the root: trainings about to be released
        self._gone: set[str] = set()  # trainings released here as soon as they are unused

    # ---- ranks -----------------------------------------------------------------------------------------

    def close(self, training: Training, series: str, version: int) -> None:
        """Record, on disk, that a rank of this node has closed its training, before the rank gets an answer."""
        incarnation = self._membership.incarnation
        self._closings.close(training, series, version)
        if incarnation is not None:
            self._enter_round(incarnation)
            name, ranks, number = training.name, len(training.finished), incarnation.rounds.round
            self._own[name] = peer.ClosedUp(number, name, ranks, training.world, version, series)
            self._due[name] = clock.monotonic() + _LATER_S
            self._note_beside(incarnation, name)

    # ---- peers -----------------------------------------------------------------------------------------

    def on_message(self, incarnation: Incarnation, host: str, message: peer.ClosedUp | peer.ClosedDown) -> None:
        """Record a child's count, or the root's decision."""
        rounds = incarnation.rounds
        if message.round != rounds.round or not incarnation.live:
            return
        self._enter_round(incarnation)
        if isinstance(message, peer.ClosedUp) and host in rounds.children:
            self._below.setdefault(message.training, {})[host] = message
            self._note_beside(incarnation, message.training)
            self._sum_counts(incarnation, message.training)
        elif isinstance(message, peer.ClosedDown) and host == rounds.parent:
            self._adopt_decision(incarnation, message)

    def on_link(self, incarnation: Incarnation, host: str) -> None:
        """Resend the messages that a peer with a new link may have missed."""
        self._enter_round(incarnation)
        if host == incarnation.rounds.parent:
            for name in (self._own.keys() - self._due.keys()) | self._below.keys():
                self._sum_counts(incarnation, name)
        elif host in incarnation.rounds.children:
            for message in self._down.values():
                incarnation.send(host, message)

    def _enter_round(self, incarnation: Incarnation) -> None:
        """Forget the counts of the last round: the plan has all that is known of them."""
        at = incarnation.restart, incarnation.rounds.round
        if at != self._round:
            self._round = at
            for known in (self._own, self._due, self._below, self._down, self._parting):
                known.clear()

    def _sum_counts(self, incarnation: Incarnation, name: str) -> None:
        own = self._own.get(name) if name not in self._due else None
        counts = [*self._below.get(name, {}).values(), *([own] if own is not None else [])]
        ranks, last = sum(c.ranks for c in counts), max(counts, key=lambda c: c.version)
        rounds = incarnation.rounds
        if rounds.parent is not None:
            incarnation.send(rounds.parent, msgspec.structs.replace(last, ranks=ranks))
        elif ranks == last.world:
            closed = Closed(name, last.version, incarnation.restart, last.series)
            self._adopt_decision(incarnation, peer.ClosedDown(rounds.round, closed))

    def _adopt_decision(self, incarnation: Incarnation, message: peer.ClosedDown) -> None:
        name = message.closed.training
        self._down[name] = message
        self._closings.learn([message.closed])
        if message.gone:
            self._gone.add(name)
        incarnation.send_down(message)

    # ---- memory ----------------------------------------------------------------------------------------

    def _note_beside(self, incarnation: Incarnation, name: str) -> None:
        """Record the trainings that are not the next one.

        A rank may begin the next training before the last rank has closed this one.
        """
        if incarnation.leads:
            begun = {t.name for t in self._trainings if t.greeted} | {
                closed.training for closed in self._closings.all
            }
            self._beside.setdefault(name, frozenset(begun - {name}))

    def _keep_sealed(self, training: Training, sealed: Stamp, shard: Shard, last: int) -> None:
        """Free all of a shard but the sealed version.

        A newer version that is not here never comes. The root learns of that and abandons the others' copies of it.

        Args:
            training: The closed training.
            sealed: The version to keep.
            shard: The shard to trim.
            last: The version at which the ranks have closed the training.
        """
        abandoned = training.sealing.decision.abandoned if training.sealing is not None else frozenset[Stamp]()
        self._store.trim(shard, sealed, abandoned)
        before = shard.pair.passed
        shard.pair.pass_over(Stamp(sealed.epoch, last))
        if shard.pair.passed != before:
            self._trainings.recount(shard.training)

    def _release_closed(self, incarnation: Incarnation) -> None:
        """Release, at the root, each closed training after which another one has sealed a version."""
        plan = incarnation.rounds.plan
        before = frozenset(closed.training for closed in plan.closed) if plan is not None else frozenset()
        epoch = self._membership.epoch
        newer = {t.name for t in self._trainings if t.greeted and t.sealed is not None and t.sealed.epoch == epoch}
        for closed in self._closings.all:
            training = self._trainings.get(closed.training)
            if (
                training is None
                or training.present
                or closed.training in self._parting
                or _has_newer_seal(training, closed)
            ):
                continue
            if newer - self._beside.get(closed.training, before) - {closed.training}:
                self._parting.add(closed.training)
                self._spawn(self._give_up(incarnation, training, closed, incarnation.rounds.round))

    async def _give_up(self, incarnation: Incarnation, training: Training, closed: Closed, number: int) -> None:
        if self._saver.tier and training.sealed is not None:
            await self._saver.flush(training)
        live = self._membership.live
        if live is incarnation and live.rounds.round == number and not training.present:
            self._adopt_decision(incarnation, peer.ClosedDown(number, closed, gone=True))

    def tend(self) -> None:
        """Free the unneeded memory of closed trainings. Called a few times a second."""
        incarnation, now = self._membership.live, clock.monotonic()
        if incarnation is None:
            return
        self._enter_round(incarnation)
        for name in [name for name, due in self._due.items() if due < now]:
            del self._due[name]
            self._sum_counts(incarnation, name)
        if incarnation.leads:
            self._release_closed(incarnation)
        for closed in self._closings.all:
            training = self._trainings.get(closed.training)
            if training is None or training.present or _has_newer_seal(training, closed):
                continue
            shards = [shard for shard in self._store.list_all() if shard.training == closed.training]
            if any(slot.busy for shard in shards for slot in shard.pair.slots):
                continue
            for shard in shards:
                shard.pair.empty_filling()  # the rank has disconnected and completes no further version
            self._trainings.drop_load_copies(training)
            self._writer.forget(closed.training)
            for shard in shards:
                nothing = training.chosen is None and not shard.pair.list_complete_stamps()
                if closed.training in self._gone or nothing:
                    self._store.drop(shard)
                elif training.sealed is not None:
                    self._keep_sealed(training, training.sealed, shard, closed.version)
            if closed.training in self._gone:
                self._gone.discard(closed.training)
                self._beside.pop(closed.training, None)
                self._trainings.remove(closed.training)


def _has_newer_seal(training: Training, closed: Closed) -> bool:
    """Return whether the training was begun again after its end, and has sealed a newer version."""
    return training.sealed is not None and training.sealed.version > closed.version
