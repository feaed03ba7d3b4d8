"""SITE 17: the map is agreed before anybody has it: a round ends only when every agent has the same one."""

from __future__ import annotations

import asyncio

import msgspec

from gemini_hpc.agent.rounds import Rounds
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message


class Host:
    job, restart, replicas = 7, 0, 2

    def __init__(self, name: str) -> None:
        self.name, self.sent, self.lived = name, list[tuple[str, Message]](), 0

    def send(self, host: str, message: Message) -> bool:
        self.sent.append((host, message))
        return True

    def freeze(self, step: str) -> None:
        pass

    async def inventory(self) -> peer.InventoryRecord:
        return peer.InventoryRecord(self.name, None, -1, 0, (), (), 1, "i")

    async def outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        return ()

    def apply(self, plan: peer.PlanDown) -> None:
        pass

    def live(self, plan: peer.PlanDown) -> None:
        self.lived += 1

    def bound(self, plan: peer.PlanDown) -> None:
        pass

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        pass


def test_site_17_an_agent_with_another_map_keeps_everybody_from_having_one() -> None:
    async def run() -> None:
        host = Host("n1")
        spawned: list[asyncio.Task[None]] = []
        rounds = Rounds(host, "n1", ("n1", "n2", "n3"), lambda c: spawned.append(asyncio.create_task(c)))
        rounds.begin("")
        await asyncio.gather(*spawned)
        for child in ("n2", "n3"):
            rounds.on_message(child, peer.InventoryUp(1, (await Host(child).inventory(),)))
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
