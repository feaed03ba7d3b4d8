"""The processes that train here: each has said hello as one rank of one training, in a round for its launch."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from gemini_hpc import clock
from gemini_hpc.agent.controller_link import ControllerLink
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.plain_ends import PlainEnds
from gemini_hpc.agent.replicas.replicas import Replicas
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.stats_store import StatsStore
from gemini_hpc.agent.tier.tier_parts import TierParts
from gemini_hpc.core.numbers import NAME
from gemini_hpc.core.recovery_plan import INHERITED_EPOCH
from gemini_hpc.core.sequence import Place, find_step, is_passed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import local, peer, version
from gemini_hpc.wire.local_server import LocalClient, Reply

_OTHER_LAUNCH_S = 5.0  # ranks of a killed launch leave within seconds
_ROUND_S = 100.0  # shorter than the rank's own WELCOME_TIMEOUT_S, so that the reason arrives
_CHOICE_S = 10.0  # a round takes at most seconds where its root knows tier choices
_LEAVE_S = 2.0  # the kernel closes a killed process's connection within this time
_REJOIN_S = 5.0  # seconds for an agreed round to become live again after an agent's restart
_MAX_STEP = 64
_TOLD = 8  # limit of rejected versions, or other trainings' versions, in an answer


class RequestRejected(Exception):
    """A request that cannot be served, with a text for the user.

    Attributes:
        later: The request may succeed later.
    """

    def __init__(self, text: str, *, later: bool = False) -> None:
        super().__init__(text)
        self.later = later


class RankSessionEntry(NamedTuple):
    """A process's `Hello`.

    Attributes:
        series: Common name of all starts of its step (`core.sequence`).
    """

    step: str
    training: str
    rank: int
    series: str


class Sessions:
    """The sessions of one agent with its ranks."""

    def __init__(
        self,
        context: AgentContext,
        replicas: Replicas,
        tier: TierParts,
        stats: StatsStore,
        ends: PlainEnds,
        controller_link: ControllerLink,
    ) -> None:
        """Create an empty table of sessions.

        Args:
            context: The agent's context.
            replicas: The agent's copies.
            tier: The agent's part in saves to the tier.
            stats: Statistics of the ranks.
            ends: Ranks that have no launcher.
            controller_link: Has the controller's notice for users.
        """
        self._identity, self._membership = context.identity, context.membership
        self._trainings, self._rejections = replicas.trainings, replicas.rejections
        self._saver, self._tier, self._stats, self._controller_link = tier.saver, tier.choice, stats, controller_link
        self.ends = ends
        self._clients: dict[LocalClient, RankSessionEntry] = {}

    # ---- who is there ----------------------------------------------------------------------------------

    def on_disconnect(self, client: LocalClient) -> None:
        """Remove a process whose connection has ended."""
        training, rank = self.find_rank(client)
        self.ends.on_disconnect(client, success=training is not None and rank in training.finished)
        self._clients.pop(client, None)
        if training is not None and training.present.get(rank) is client:
            del training.present[rank]
            training.ranks.drop(rank)

    def drop_all(self) -> None:
        """Drop all connections: in a new round all processes must say hello again."""
        for client in list(self._clients):
            client.drop()

    def find_rank(self, client: LocalClient) -> tuple[Training | None, int]:
        """Return the training and the rank of a process, or None and -1 if it has not said hello."""
        session = self._clients.get(client)
        return (None, -1) if session is None else (self._trainings.get(session.training), session.rank)

    def require_training(self, client: LocalClient, name: str) -> Training:
        """Return the training of which this process is a rank, while it may train.

        Raises:
            Rejected: The process has not said hello, or a round is in progress.
        """
        hello = self._clients.get(client)
        training = self._trainings.get(name)
        if hello is None or hello.training != name or training is None:
            raise RequestRejected(f"this process has not joined training {name[:64]}")
        if self._membership.live is None:
            raise RequestRejected("a recovery round is under way")
        return training

    def check_rank(self, client: LocalClient, m: local.OfRank) -> None:
        """Check that this process is the rank named in its message.

        Raises:
            Rejected: Another process is that rank.
        """
        if self.require_training(client, m.training).present.get(m.rank) is not client:
            raise RequestRejected(f"rank {m.rank} does not belong to this process")

    def find_series(self, client: LocalClient) -> str:
        """Return the name that all starts of this process's step share."""
        session = self._clients.get(client)
        return "" if session is None else session.series

    def _list_steps(self) -> set[str]:
        """Return the launches whose training ranks are connected now."""
        return {session.step for session in self._clients.values()}

    def _find_step(self, client: LocalClient) -> str:
        session = self._clients.get(client)
        return "" if session is None else session.step

    # ---- hello -----------------------------------------------------------------------------------------

    async def admit_rank(self, client: LocalClient, m: local.Hello, fds: Sequence[int] = ()) -> Reply:
        """Register a process as a rank, and answer when it may train.

        Args:
            client: The process's connection.
            m: Its hello.
            fds: Descriptor of its progress page.

        Raises:
            Rejected: The process may not train.
        """
        identity, membership = self._identity, self._membership
        proto = version.find_common(m.least, m.most)
        if not proto:
            raise RequestRejected(f"the training process speaks {version.describe_mismatch(m.least, m.most)}")
        name_fits = NAME.fullmatch(m.training) is not None and self._trainings.may_have(self._derive_training_name(m))
        if not name_fits or m.rank >= m.world or not 0 < len(m.step) <= _MAX_STEP:
            raise RequestRejected(
                f"training {m.training[:64]!r}, rank {m.rank} of {m.world}: invalid name, rank or step, "
                "or too many trainings"
            )
        if client in self._clients:
            raise RequestRejected("this process has already joined a training")
        if membership.incarnation is None or membership.detached:
            raise RequestRejected("the job does not run on this node now")
        await self._wait_for_earlier_process(m)
        incarnation = membership.incarnation
        rounds = incarnation.rounds
        if not m.rejoin:
            try:
                async with asyncio.timeout(_ROUND_S):
                    await self._wait_for_round(incarnation, m)
                    if not rounds.unseen and self._may_be_stored(rounds, self._derive_training_name(m)):
                        await self._wait_for_tier_round(incarnation, m)
            except TimeoutError:
                why = f": {rounds.trouble}" if rounds.trouble else "; see gemini-hpc inspect"
                raise RequestRejected(f"the agents did not agree in time on what to resume from{why}") from None
            if rounds.unseen:
                raise RequestRejected(rounds.unseen, later=True)
        elif not await self._may_rejoin(incarnation, m):
            raise RequestRejected("the job has gone on without this process")
        if client.closed.is_set():
            raise RequestRejected("closed")
        if not self._trainings.may_have(name := self._derive_training_name(m)):
            raise RequestRejected(f"training {name[:80]!r}: too many trainings")
        training = self._trainings.get_or_create(name)
        if training.greeted and m.world != training.world:
            raise RequestRejected(
                f"rank {m.rank} counts {m.world} ranks, the others {training.world}: start all with one WORLD_SIZE"
            )
        training.greeted.add(m.rank)
        if not m.rejoin:
            self._stats.drop_summary(name, m.rank)
        training.finished.discard(m.rank)
        training.left.pop(m.rank, None)
        training.present[m.rank] = client
        if fds:
            training.ranks.add(m.rank, fds[0], clock.monotonic())
        (training.restarts.add if m.restarts else training.restarts.discard)(m.rank)
        training.world = m.world
        self._clients[client] = RankSessionEntry(m.step, name, m.rank, _derive_series(m))
        plan = rounds.plan
        closed = {c.training: c for c in plan.closed} if plan is not None else {}
        chosen = training.chosen or Stamp(0, 0)
        takeover = plan.takeover if plan is not None else None
        lost = training.lost[:100]
        if takeover is not None and takeover.lost and training.chosen is None:
            lost = (*lost, f"nothing is taken over from job {takeover.job}: {takeover.lost}")
        if training.chosen is None and membership.incarnation.attach.bereft:
            lost = (
                *lost,
                f"an earlier agent of the job on {identity.node} is gone, with its directory and its copies",
            )
        welcome = local.Welcome(
            job=identity.job,
            restart=membership.restart,
            epoch=membership.epoch,
            node_rank=membership.noderanks[identity.node],
            nodes=membership.nodes,
            replicas=membership.replicas,
            chosen_epoch=chosen.epoch,
            chosen_version=chosen.version,
            chosen_world=training.chosen_world,
            stored=training.stored,
            lost=lost,
            notice="; ".join(filter(None, (self._controller_link.notice, self._saver.problem))),
            proto=proto,
            rejected=self._rejections.list_sentences(name)[-_TOLD:],
            fresh=self._rejections.may_start_over(name),
            parity=membership.redundancy.parity,
            group=membership.redundancy.list_group(membership.noderanks[identity.node]),
            after=membership.incarnation.attach.after if chosen.version and chosen.epoch == INHERITED_EPOCH else 0,
            training=name,
            closed=closed[name].version if name in closed else 0,
            passed=is_passed(name, [*closed, *(s.name for s in plan.trainings)] if plan is not None else ()),
            others=self._list_others(plan, closed) if plan is not None and training.chosen is None else (),
            stopped_at=membership.stop.time,
            reached=membership.stop.reached.get(name, 0),
            changes=membership.changes[:_TOLD],
        )
        self.ends.record_rank(client, m.step, m.rank)
        return welcome, [training.open_page()]

    def _derive_training_name(self, m: local.Hello) -> str:
        """Return the name of a training by its place in the job's sequence.

        The plan, which all agents have, tells which step the training belongs to. The process tells its place in that
        step.
        """
        incarnation = self._membership.incarnation
        plan = incarnation.rounds.plan if incarnation is not None else None
        if incarnation is None or plan is None:
            return Place(m.training, 1, m.nth).training_name
        held = [s.name for s in plan.trainings if s.chosen is not None]
        step = find_step(m.training, _derive_series(m), incarnation.restart, plan.closed, held)
        return Place(m.training, step, m.nth).training_name

    def _list_others(self, plan: peer.PlanDown, closed: Collection[str]) -> tuple[str, ...]:
        """Return the versions of trainings that no rank has asked for."""
        found = []
        for s in plan.trainings:
            training = self._trainings.get(s.name)
            if s.chosen is not None and s.name not in closed and not (training is not None and training.greeted):
                found.append(f"version {s.chosen[1]} of training {s.name}")
        return tuple(found[:_TOLD])

    def _may_be_stored(self, rounds: RecoveryRounds, name: str) -> bool:
        """Return whether a closed training's end has gone from memory, and the tier was not looked at."""
        plan = rounds.plan
        if plan is None or plan.looked or not self._tier.directory:
            return False
        chosen = any(s.name == name and s.chosen is not None for s in plan.trainings)
        return not chosen and any(closed.training == name for closed in plan.closed)

    async def _wait_for_tier_round(self, incarnation: Incarnation, m: local.Hello) -> None:
        """Wait for another round of this launch that looks at the tier."""
        rounds = incarnation.rounds
        before = rounds.round
        while rounds.stage != "live" or rounds.round == before:
            self._membership.doubt = True
            if rounds.stage == "live":
                incarnation.step(peer.NeedRound(before, m.step, True, m.tier))
            await _wait_for_change(incarnation)

    async def _wait_for_earlier_process(self, m: local.Hello) -> None:
        """Wait briefly until an earlier process of this rank has left: it may just have been killed."""
        deadline = clock.monotonic() + _LEAVE_S
        while True:
            training = self._trainings.get(self._derive_training_name(m))
            other = training.present.get(m.rank) if training is not None else None
            if other is None or other.closed.is_set() or self._find_step(other) != m.step:
                return
            if clock.monotonic() > deadline:
                raise RequestRejected(
                    f"rank {m.rank} of training {m.training!r} trains here already (process {other.pid}); "
                    "several trainings in one job need names: Checkpointer(name=...), or close() before the next; "
                    "where this one takes the place of an earlier one, call abandon() on that"
                )
            await asyncio.sleep(0.02)

    async def _may_rejoin(self, incarnation: Incarnation, m: local.Hello) -> bool:
        """Return whether the round that a process trains in is live.

        A restarted agent may know that the round was agreed on, but must learn from its peers that all agents know
        so.
        """
        rounds = incarnation.rounds
        with suppress(TimeoutError):
            async with asyncio.timeout(_REJOIN_S):
                while rounds.stage == "planned":
                    await incarnation.changed.wait()
        return rounds.stage == "live" and rounds.launch == m.step

    async def _wait_for_round(self, incarnation: Incarnation, m: local.Hello) -> None:
        """Wait for the round that serves this launch. Request a round if the launch is new."""
        await incarnation.wait_live()
        rounds = incarnation.rounds
        training = self._trainings.get(self._derive_training_name(m))
        again = training is not None and m.rank in training.greeted
        chooses = self._tier.accepts(m.tier)
        if rounds.launch == m.step and not again and not rounds.unseen and not chooses:
            return
        deadline = clock.monotonic() + _OTHER_LAUNCH_S
        while others := self._list_steps() - {m.step}:
            if clock.monotonic() > deadline:
                raise RequestRejected(f"another training of this job is running (step {', '.join(sorted(others))})")
            await asyncio.sleep(0.02)
        before = rounds.round
        need_new = again or chooses or bool(rounds.launch or rounds.unseen)
        patient_until = clock.monotonic() + _CHOICE_S

        def is_served() -> bool:
            return rounds.stage == "live" and rounds.launch == m.step and (rounds.round > before or not need_new)

        while not is_served():
            if rounds.stage == "live":
                incarnation.step(peer.NeedRound(rounds.round, m.step, again, m.tier))
            if not is_served():
                await _wait_for_change(incarnation)
            # a root of another software version may not know tier choices
            if chooses and clock.monotonic() > patient_until:
                chooses, need_new = False, again or bool(rounds.unseen)


async def _wait_for_change(incarnation: Incarnation) -> None:
    """Wait for a change of the round. After a second the request may be lost with a link, and is repeated."""
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await incarnation.changed.wait()


def _derive_series(m: local.Hello) -> str:
    return m.series or m.step.partition("+")[0]
