"""Requirement all-or-nothing-map: the map is agreed before anybody has it: a round ends only when every agent has the
same one. Events and effects of the rules, and the decisions of a coordinator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.peers import round_events as events
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_plan import PredecessorState
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.sequence import merge_closed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.tier.version import VersionManifest
from gemini_hpc.wire import peer
from gemini_hpc.wire.local import Attach
from gemini_hpc.wire.stored import NodeFile, Stored, Tier

from .contexts import made_context

HOSTS, NO_TIER = ("n1", "n2", "n3"), Tier()
PLAN = peer.PlanDown(1, "", 1, {host: rank for rank, host in enumerate(HOSTS)}, "a" * 32, {}, (), ())


def record(name: str, **known: Any) -> peer.InventoryRecord:
    """Return the inventory of an agent without copies."""
    return peer.InventoryRecord(name, None, -1, 0, (), (), 1, "i", **{"unbroken": True, **known})


def sealed_record(host: str, newest: Stamp) -> peer.InventoryRecord:
    """Return the inventory of an agent of incarnation 0 with version 5. It knows that `newest` was sealed."""
    copy = Copy("default", 0, 1, 0, 64, 64, Stamp(1, 5), "0" * 32)
    return peer.InventoryRecord(host, {host: 0}, 0, 1, (copy,), (("default", newest),), 1, "i")


def manifest(stamp: Stamp, world: int = 2) -> VersionManifest:
    shards = tuple(Stored(rank, rank, 8192, 5000, "0" * 32) for rank in range(world))
    return VersionManifest(7, "default", stamp, world, 0.0, (NodeFile("node-0000.h5", 64, shards),))


class Alone:
    """The coordinator of a job on one node. On the tier are the versions `stored`; None: it cannot be seen."""

    def __init__(self, host: str = "n1", *, restart: int = 0, after: int = 0, tier: str = "/tier") -> None:
        self.record = record(host)
        self.left = PredecessorState(after)
        self.stored: list[VersionManifest] | None = None
        self.looks: list[bool] = []  # by look at the tier: ranks wait for it
        self.asked = 0  # how often the predecessor was asked
        self.tier: Any = SimpleNamespace(directory=tier, chosen=NO_TIER)
        self._spawned: deque[Coroutine[Any, Any, None]] = deque()
        this: Any = self
        parts: Any = SimpleNamespace(saver=self, choice=self.tier)
        replicas: Any = SimpleNamespace(
            rejections=SimpleNamespace(learn=lambda found: tuple(dict.fromkeys(found))),
            closings=SimpleNamespace(learn=merge_closed),
        )
        context = made_context(Membership(), host, spawn=self._spawned.append)
        self._coordinator = Coordinator(context, replicas, parts, this, this)
        self.job = after
        self.enter(restart)

    def enter(self, restart: int) -> None:
        """Enter an incarnation, and go through its first round."""
        host = self.record.host
        self.restart, self.hosts, self.view = restart, (host,), View((host,))
        self.attach = Attach(7, restart, host, host, 2, after=self.job)
        self.rounds = RecoveryRounds(host, "i", self.hosts, self._accepts)

    def _accepts(self, tier: Tier) -> bool:
        return bool(tier.directory) and not self.tier.directory

    def step(self, event: events.Event) -> None:
        this: Any = self
        for effect in self.rounds.step(event):
            match effect:
                case events.TakeInventory(number):
                    self.step(events.Heard(self.record.host, peer.InventoryUp(number, (self.record,))))
                case events.Decide():
                    self._coordinator.decide(this, effect)
                    while self._spawned:
                        asyncio.run(self._spawned.popleft())
                case events.ApplyPlan(plan):
                    self.record = replace(self.record, doubt=plan.doubt)
                case events.ChooseTier(tier):
                    self.tier.directory, self.tier.chosen = tier.directory, tier

    def ask(self, after_round: int, launch: str, tier: Tier = NO_TIER) -> None:
        """Request a round for a rank of this launch."""
        self.step(peer.NeedRound(after_round, launch, again=False, tier=tier))

    def plan(self, *, launch: str = "") -> peer.PlanDown:
        """The plan of the next round."""
        self.step(events.Begin(launch))
        assert self.rounds.plan is not None and self.rounds.stage == "live"
        return self.rounds.plan

    @property
    def chosen(self) -> list[Stamp | None]:
        assert self.rounds.plan is not None
        return [training.chosen for training in self.rounds.plan.trainings]

    # ---- its surroundings ----

    async def find_stored(
        self, without: Iterable[tuple[str, Stamp]], within_s: float, job: int
    ) -> tuple[VersionManifest, ...]:
        assert job == self.job, "a job that goes on from another one has nothing of its own there"
        self.looks.append(within_s > 10)
        if self.stored is None:
            raise TierFailed("not mounted")
        return tuple(m for m in self.stored if (m.training, m.stamp) not in without)[:1]

    async def find_holders(self, timeout_s: float) -> dict[str, int]:
        return {}

    async def gather_state(self) -> PredecessorState:
        self.asked += 1
        return self.left


# ---- events and effects ----------------------------------------------------------------------------------


def test_an_agent_with_another_map_keeps_everybody_from_having_one() -> None:
    rounds = RecoveryRounds("n1", "i", HOSTS, lambda tier: False)
    below, records = HOSTS[1:], tuple(map(record, HOSTS))
    assert list(rounds.step(events.Begin(""))) == [
        events.Freeze(),
        events.Change(),
        events.StoreBegin(1, ""),
        *(events.Send(host, peer.Collect(1, "")) for host in below),
        events.TakeInventory(1),
    ]
    heard = [list(rounds.step(events.Heard(r.host, peer.InventoryUp(1, (r,))))) for r in records]
    assert heard == [[], [], [events.Decide(1, "", records, search=True)]]
    assert list(rounds.step(events.Decided(PLAN))) == [
        events.ApplyPlan(PLAN),
        events.StorePlan(PLAN, live=False),
        events.Change(),
        *(events.Send(host, PLAN) for host in below),
    ]
    for host, other in (("n2", PLAN.map_hash), ("n3", "0" * 32)):
        assert not list(rounds.step(events.Heard(host, peer.PlanAck(1, other)))), "no map file is written"
    assert list(rounds.step(events.Heard("n3", peer.PlanAck(1, PLAN.map_hash)))) == [
        events.StorePlan(PLAN, live=True),
        events.AdmitRanks(PLAN),
        events.Change(),
        *(events.Send(host, peer.Go(1, "")) for host in below),
    ]


def test_what_could_not_be_done_is_not_acknowledged() -> None:
    """The memory for a training may be missing when the plan comes. It comes again."""
    rounds = RecoveryRounds("n2", "i", HOSTS, lambda tier: False)
    list(rounds.step(events.Heard("n1", peer.Collect(1, ""))))
    failed = rounds.step(events.Heard("n1", PLAN))
    assert next(failed) == events.ApplyPlan(PLAN)
    with pytest.raises(OSError, match="memory"):
        failed.throw(OSError("memory"))  # type: ignore[attr-defined]
    assert list(rounds.step(events.Heard("n1", PLAN))) == [
        events.ApplyPlan(PLAN),
        events.StorePlan(PLAN, live=False),
        events.Change(),
        events.Send("n1", peer.PlanAck(1, PLAN.map_hash)),
    ]


# ---- the coordinator -------------------------------------------------------------------------------------


def test_a_round_that_cannot_see_the_tier_serves_no_launch() -> None:
    """The prologs end and there is a map, but a launch has a round of its own, again and again until it is seen."""
    alone = Alone(restart=1)
    assert alone.plan().unseen == alone.rounds.unseen == "not mounted"
    for number in (2, 3):
        alone.ask(number - 1, "7.0")
        assert (alone.rounds.stage, alone.rounds.round, alone.rounds.launch) == ("live", number, "7.0")
        assert alone.rounds.unseen
    alone.stored = [manifest(Stamp(1, 9))]
    alone.ask(3, "7.0")
    assert alone.rounds.round == 4 and not alone.rounds.unseen and alone.looks == [False, True, True, True]
    assert alone.chosen == [(1, 9)]
    alone.ask(4, "7.0")
    assert alone.rounds.round == 4, "it is served"


@pytest.mark.parametrize("unbroken", [True, False])
def test_where_nothing_was_ever_sealed_there_is_nothing_on_the_tier(unbroken: bool) -> None:
    """A launch that ended before its first version; but an agent that has died may have known of one."""
    alone = Alone()
    alone.record = record("n1", unbroken=unbroken)
    alone.plan()
    for launch in ("7.0", "7.1"):
        alone.ask(1, launch)
    assert alone.rounds.stage == "live" and alone.rounds.round == 2
    assert (alone.rounds.unseen, alone.looks) == (("", []) if unbroken else ("not mounted", [True]))


@pytest.mark.parametrize("requeued", [False, True])
def test_what_a_round_has_not_seen_is_not_forgotten_by_the_next(requeued: bool) -> None:
    """Memory has version 5, and once knew that 9 was sealed; the tier, which has that, could not be seen then. The
    next round is that of a launch, or of the next incarnation, which knows of no earlier one."""
    alone = Alone(restart=1)
    alone.record = sealed_record("n1", Stamp(1, 9))
    plan = alone.plan()
    assert plan.unseen and [training.keep for training in plan.trainings] == [((1, 5),)]
    # it has taken part in a round: nothing newer is known any more
    alone.record = replace(sealed_record("n1", Stamp(1, 5)), map_restart=1, doubt=plan.doubt)
    alone.stored = [manifest(Stamp(1, 9))]
    if requeued:
        alone.enter(2)
        alone.plan()
        assert alone.chosen == [(1, 9)]
        return
    alone.ask(1, "7.0")
    assert not alone.rounds.unseen and alone.chosen == [(1, 9)]
    alone.ask(2, "7.1")
    assert alone.rounds.round == 3 and len(alone.looks) == 2, "memory has what the tier had"


@pytest.mark.parametrize(("restart", "looks", "chosen"), [(1, 0, (1, 5)), (2, 1, (1, 9))])
def test_what_an_incarnation_long_ago_has_left_is_not_the_newest(
    restart: int, looks: int, chosen: tuple[int, int]
) -> None:
    """Memory has version 5 of incarnation 0, sealed and whole; the one after it may have left 9 on the tier."""
    alone = Alone(restart=restart)
    alone.record, alone.stored = sealed_record("n1", Stamp(1, 5)), [manifest(Stamp(1, 9))]
    alone.plan()
    assert alone.chosen == [chosen] and len(alone.looks) == looks


def test_a_tier_that_the_program_chooses_is_looked_at_before_it_is_served() -> None:
    """The first round of a restart knew of none, and had nothing."""
    alone = Alone(restart=1, tier="")
    alone.stored = [manifest(Stamp(1, 9))]
    alone.plan()
    assert not alone.looks
    for _ in range(2):  # the second rank says the same
        alone.ask(1, "7.0", Tier("/t", 60))
    assert alone.rounds.round == 2 and alone.rounds.launch == "7.0" and alone.looks == [True]
    assert alone.rounds.plan is not None and alone.rounds.plan.tier == Tier("/t", 60) and alone.chosen == [(1, 9)]
