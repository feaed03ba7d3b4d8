"""Requirement all-or-nothing-map: the map is agreed before anybody has it: a round ends only when every agent has the
same one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from gemini_hpc.agent.peers import round_plan
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.sequence import Closed, Closing, merge_closed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import version
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile, Rejection, Stored, Tier


class Host:
    job, replicas, parity, wanted, instance, after = 7, 2, 0, 3, "i", 0

    def __init__(self, name: str, restart: int = 0) -> None:
        self.name, self.sent, self.lived, self.restart = name, list[tuple[str, Message]](), 0, restart
        self.chosen = Tier()
        self.domains: dict[str, str] = {}
        self.older: peer.InventoryRecord | None = None
        self.known: tuple[Rejection, ...] = ()
        self.tier, self.sees, self.looks, self.unbroken, self.doubt = True, False, list[bool](), True, False

    def choose_tier(self, tier: Tier) -> bool:
        heeded = bool(tier.directory) and not self.tier
        if heeded:
            self.tier, self.chosen = True, tier
        return heeded

    async def gather_predecessor_state(self) -> round_plan.PredecessorState:
        return round_plan.PredecessorState(self.after)

    async def find_stored(
        self, without: Iterable[tuple[str, Stamp]], *, launched: bool, before: bool = False
    ) -> tuple[version.VersionManifest, ...]:
        self.looks.append(launched)
        if not self.sees:
            raise TierFailed("not mounted")
        shards = tuple(Stored(rank, rank, 64, 64, "0" * 32) for rank in range(2))
        return (version.VersionManifest(7, "default", Stamp(1, 9), 2, 0.0, (NodeFile("node-0000.h5", 64, shards),)),)

    def send(self, host: str, message: Message) -> bool:
        self.sent.append((host, message))
        return True

    def freeze(self, step: str) -> None:
        pass

    async def build_inventory(self) -> peer.InventoryRecord:
        if self.looks and self.older is not None:  # it has taken part in a round: nothing newer is known any more
            copy = self.older.copies[0]
            return msgspec.structs.replace(
                self.older,
                noderanks={self.name: 0},
                map_restart=1,
                sealed=((copy.training, copy.stamp),),
                doubt=self.doubt,
            )
        if self.older is not None:
            return self.older
        return peer.InventoryRecord(self.name, None, -1, 0, (), (), 1, "i", unbroken=self.unbroken)

    async def gather_outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        return ()

    def learn_rejections(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        self.known = tuple(dict.fromkeys((*self.known, *found)))
        return self.known

    def learn_closings(self, found: Iterable[Closed], parts: Iterable[Closing]) -> tuple[Closed, ...]:
        return merge_closed(found, parts)

    def store_round_begin(self, number: int, step: str) -> None:
        pass

    def apply_plan(self, plan: peer.PlanDown) -> None:
        self.doubt = plan.doubt

    def admit_ranks(self, plan: peer.PlanDown) -> None:
        self.lived += 1

    def store_launch(self, plan: peer.PlanDown) -> None:
        pass

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        pass


def test_an_agent_with_another_map_keeps_everybody_from_having_one() -> None:
    async def run() -> None:
        host = Host("n1")
        spawned: list[asyncio.Task[None]] = []
        rounds = RecoveryRounds(host, "n1", ("n1", "n2", "n3"), lambda c: spawned.append(asyncio.create_task(c)))
        rounds.begin_round("")
        await asyncio.gather(*spawned)
        for child in ("n2", "n3"):
            rounds.on_message(child, peer.InventoryUp(1, (await Host(child).build_inventory(),)))
        plan = rounds.plan
        assert plan is not None and rounds.stage == "planned" and host.lived == 0
        rounds.on_message("n2", peer.PlanAck(1, plan.map_hash))
        rounds.on_message("n3", peer.PlanAck(1, "0" * len(plan.map_hash)))
        assert rounds.stage == "planned" and host.lived == 0, "no map file is written"
        assert not any(isinstance(m, peer.Go) for _, m in host.sent)
        rounds.on_message("n3", peer.PlanAck(1, plan.map_hash))
        assert rounds.stage == "live" and host.lived == 1
        assert msgspec.structs.asdict(plan)["noderanks"] == {"n1": 0, "n2": 1, "n3": 2}

    asyncio.run(run())


def test_a_round_that_cannot_see_the_tier_serves_no_launch() -> None:
    """The prologs end and there is a map, but a launch has a round of its own, again and again until it is seen."""

    async def run() -> None:
        host = Host("n1", restart=1)
        spawned: list[asyncio.Task[None]] = []
        rounds = RecoveryRounds(host, "n1", ("n1",), lambda c: spawned.append(asyncio.create_task(c)))

        async def settle() -> None:
            while spawned:
                await spawned.pop(0)

        rounds.begin_round("")
        await settle()
        assert rounds.stage == "live" and host.lived == 1 and rounds.unseen == "not mounted"
        for number in (2, 3):
            rounds.request_round(number - 1, "7.0", again=False)
            rounds.request_round(number - 1, "7.0", again=False)  # another rank's wish
            await settle()
            assert (rounds.stage, rounds.round, rounds.step) == ("live", number, "7.0") and rounds.unseen
        host.sees = True
        rounds.request_round(3, "7.0", again=False)
        await settle()
        assert rounds.round == 4 and not rounds.unseen and host.looks == [False, True, True, True]
        assert rounds.plan is not None and [s.chosen for s in rounds.plan.trainings] == [(1, 9)]
        rounds.request_round(4, "7.0", again=False)
        await settle()
        assert rounds.round == 4, "it is served"

    asyncio.run(run())


@pytest.mark.parametrize("unbroken", [True, False])
def test_where_nothing_was_ever_sealed_there_is_nothing_on_the_tier(unbroken: bool) -> None:
    """A launch that ended before its first version; but an agent that has died may have known of one."""

    async def run() -> None:
        host = Host("n1")
        host.unbroken = unbroken
        spawned: list[asyncio.Task[None]] = []
        rounds = RecoveryRounds(host, "n1", ("n1",), lambda c: spawned.append(asyncio.create_task(c)))
        rounds.begin_round("")
        rounds.request_round(1, "7.0", again=False)
        while spawned:
            await spawned.pop(0)
        rounds.request_round(1, "7.0", again=False)
        rounds.request_round(1, "7.1", again=False)
        while spawned:
            await spawned.pop(0)
        assert rounds.stage == "live" and rounds.round == 2
        assert (rounds.unseen, host.looks) == (("", []) if unbroken else ("not mounted", [True]))

    asyncio.run(run())


@pytest.mark.parametrize("requeued", [False, True])
def test_what_a_round_has_not_seen_is_not_forgotten_by_the_next(requeued: bool) -> None:
    """Memory has version 5, and once knew that 9 was sealed; the tier, which has that, could not be seen then. The
    next round is that of a launch, or of the next incarnation, which knows of no earlier one."""

    async def run() -> None:
        host = Host("n1", restart=1)
        copy = Copy("default", 0, 1, 0, 64, 64, Stamp(1, 5), "0" * 32)
        host.older = peer.InventoryRecord("n1", {"n1": 0}, 0, 1, (copy,), (("default", Stamp(1, 9)),), 1, "i")
        spawned: list[asyncio.Task[None]] = []
        rounds = RecoveryRounds(host, "n1", ("n1",), lambda c: spawned.append(asyncio.create_task(c)))
        rounds.begin_round("")
        while spawned:
            await spawned.pop(0)
        assert rounds.plan is not None and rounds.unseen and [s.keep for s in rounds.plan.trainings] == [((1, 5),)]
        host.sees = True
        if requeued:
            host.restart = 2
            rounds = RecoveryRounds(host, "n1", ("n1",), lambda c: spawned.append(asyncio.create_task(c)))
            rounds.begin_round("")
            while spawned:
                await spawned.pop(0)
            assert rounds.plan is not None and [s.chosen for s in rounds.plan.trainings] == [(1, 9)]
            return
        rounds.request_round(1, "7.0", again=False)
        while spawned:
            await spawned.pop(0)
        assert not rounds.unseen and [s.chosen for s in rounds.plan.trainings] == [(1, 9)]
        rounds.request_round(2, "7.1", again=False)
        while spawned:
            await spawned.pop(0)
        assert rounds.round == 3 and len(host.looks) == 2, "memory has what the tier had"

    asyncio.run(run())


@pytest.mark.parametrize(("restart", "looks", "chosen"), [(1, 0, (1, 5)), (2, 1, (1, 9))])
def test_what_an_incarnation_long_ago_has_left_is_not_the_newest(
    restart: int, looks: int, chosen: tuple[int, int]
) -> None:
    """Memory has version 5 of incarnation 0, sealed and whole; the one after it may have left 9 on the tier."""

    async def run() -> None:
        host = Host("n1", restart=restart)
        host.sees = True
        copy = Copy("default", 0, 1, 0, 64, 64, Stamp(1, 5), "0" * 32)
        host.older = peer.InventoryRecord("n1", {"n1": 0}, 0, 1, (copy,), (("default", Stamp(1, 5)),), 1, "i")
        spawned: list[asyncio.Task[None]] = []
        rounds = RecoveryRounds(host, "n1", ("n1",), lambda c: spawned.append(asyncio.create_task(c)))
        rounds.begin_round("")
        while spawned:
            await spawned.pop(0)
        assert rounds.plan is not None and [s.chosen for s in rounds.plan.trainings] == [chosen]
        assert len(host.looks) == looks

    asyncio.run(run())


def test_a_tier_that_the_program_chooses_is_looked_at_before_it_is_served() -> None:
    """The first round of a restart knew of none, and had nothing."""

    async def run() -> None:
        host = Host("n1", restart=1)
        host.tier, host.sees = False, True
        spawned: list[asyncio.Task[None]] = []
        rounds = RecoveryRounds(host, "n1", ("n1",), lambda c: spawned.append(asyncio.create_task(c)))
        rounds.begin_round("")
        while spawned:
            await spawned.pop(0)
        assert rounds.stage == "live" and not host.looks
        for _ in range(2):  # the second rank says the same
            rounds.request_round(1, "7.0", again=False, tier=Tier("/t", 60))
            while spawned:
                await spawned.pop(0)
        assert rounds.round == 2 and rounds.step == "7.0" and host.looks == [True]
        assert rounds.plan is not None and rounds.plan.tier == Tier("/t", 60)
        assert [s.chosen for s in rounds.plan.trainings] == [(1, 9)]

    asyncio.run(run())
