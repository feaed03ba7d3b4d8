"""What launchers and neighbours say of a step's attempts, at agents without links: messages are carried by hand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gemini_hpc.agent.launches import MAX_STEPS, Launches
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.core.attempts import End
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.views import View
from gemini_hpc.wire import local, peer

from .contexts import made_context


def end(rank: int, cause: Cause = Cause.RAISED, text: str = "ended") -> dict[str, Any]:
    """A rank that has failed."""
    return {"end": End(f"rank {rank} {text}", cause, rank, 1), "failed": f"rank {rank} {text}"}


def timeless(end: End) -> End:
    return replace(end, t=0.0)


class Net:
    """Agents in a line: n1 - n2 - n3, the first is the root."""

    def __init__(self, count: int = 3) -> None:
        self.names = [f"n{at}" for at in range(1, count + 1)]
        self.events: list[tuple[str, str]] = []
        self.sent: deque[tuple[str, str, peer.Launch]] = deque()
        self.lost = False
        self.ended: list[tuple[str, str, int, int, Cause]] = []
        self.red: list[tuple[str, int, str]] = []
        self.incarnations = {name: self._incarnation(at) for at, name in enumerate(self.names)}
        self.agents = {name: self.agent(name) for name in self.names}

    def _incarnation(self, at: int) -> Any:
        name, names = self.names[at], self.names
        rounds = SimpleNamespace(
            parent=names[at - 1] if at else None,
            children=tuple(names[at + 1 : at + 2]),
        )
        return SimpleNamespace(
            rounds=rounds,
            changed=asyncio.Event(),
            leads=at == 0,
            view=View(tuple(names)),
            send=lambda host, message: self.sent.append((name, host, message)),
        )

    def agent(self, name: str) -> Launches:
        membership = Membership()
        membership.incarnation, membership.detached = self.incarnations[name], False
        return Launches(
            made_context(membership, name, log=self._log(name), health_check="/site/check"),
            lambda *end: self.ended.append((name, *end)),
            lambda *red: self.red.append((name, *red)),
            lambda: 30,
        )

    def _log(self, name: str) -> Callable[..., None]:
        return lambda event, detail="": self.events.append((name, event))

    def carry(self) -> int:
        """Until nobody has anything to say; how many messages that were."""
        count = 0
        while self.sent:
            source, target, message = self.sent.popleft()
            count += 1
            if not self.lost:
                self.agents[target].on_message(self.incarnations[target], source, message)
        return count

    def link(self, one: str, other: str) -> None:
        self.agents[one].on_link(self.incarnations[one], other)
        self.agents[other].on_link(self.incarnations[other], one)

    async def state(self, name: str, **more: Any) -> local.LaunchState:
        found = await self.agents[name].answer(local.LaunchRequest(**{"step": "7.0", "attempt": 0, **more}))
        assert isinstance(found, local.LaunchState)
        self.carry()
        return found


def test_a_rank_that_fails_ends_the_attempt_for_all() -> None:
    async def play() -> None:
        net = Net()
        waiting = [asyncio.create_task(net.state(name, wait_s=5.0)) for name in net.names]
        await asyncio.sleep(0)
        killed = end(2, Cause.CRASHED, "ended with SIGKILL")
        said = await net.state("n3", **killed, wait_s=5.0)
        expected = local.LaunchState(1, killed["end"], check="/site/check")
        assert said == expected and [await task for task in waiting] == [expected] * 3
        assert net.events == [("n3", "rank_failed"), ("n1", "relaunch")]
        assert await net.state("n1", **end(0)) == expected, "of the attempt before"
        assert (await net.state("n2", attempt=1)).attempt == 1 and net.carry() == 0

    asyncio.run(play())


def test_what_the_end_of_a_rank_shows_is_told_however_late() -> None:
    async def play() -> None:
        net = Net()
        await net.state("n3", **end(2, Cause.CRASHED))
        await net.state("n1", end=End("rank 0 ended"))
        await net.state("n2", attempt=1)
        await net.state("n3", rank=2, unhealthy="Xid 79")
        assert net.red == [("n3", 2, "Xid 79")]
        assert net.ended == [("n3", "7.0", 0, 2, Cause.CRASHED, 30), ("n1", "7.0", 0, 0, Cause.CONSEQUENCE, 30)]

    asyncio.run(play())


def test_what_was_lost_with_a_link_is_told_to_the_next_one() -> None:
    async def play() -> None:
        net = Net()
        net.lost = True
        await net.state("n3", **end(2))
        net.lost = False
        assert (await net.state("n1")).attempt == 0
        net.link("n2", "n3")
        net.carry()
        assert (await net.state("n1")).attempt == 1

    asyncio.run(play())


def test_an_agent_that_has_died_hears_of_it_from_its_launchers_and_neighbours() -> None:
    async def play() -> None:
        net = Net(1)
        net.agents["n1"] = net.agent("n1")
        assert (await net.state("n1", attempt=4)).attempt == 4
        assert (await net.state("n1", attempt=4, **end(0))).attempt == 5

    asyncio.run(play())


def test_the_end_is_told_to_all_and_stays() -> None:
    async def play() -> None:
        net = Net()
        await net.state("n1", done=True)
        waiting = asyncio.create_task(net.state("n3", wait_s=5.0))
        await asyncio.sleep(0)
        said = await net.state("n2", **end(1))
        assert said.over.startswith("rank 1 ended; another rank") and (await waiting).over == said.over
        assert (await net.state("n1", attempt=3)).over
        net = Net()
        assert (await net.state("n3", over="--max-restarts=3 is reached")).over
        assert (await net.state("n1", wait_s=5.0)).over == "--max-restarts=3 is reached"

    asyncio.run(play())


def test_a_rank_that_hangs_begins_the_next_attempt() -> None:
    async def play() -> None:
        net = Net()
        assert not net.agents["n2"].record_hang("7.0", 1, "rank 1"), "no launchers"
        await net.state("n2")
        assert net.agents["n2"].record_hang("7.0", 1, "rank 1") and net.carry() == 2
        first = End("hung: n2: rank 1", Cause.HUNG, 1, host="n2")
        assert timeless((await net.state("n3")).first) == first
        await net.state("n1")
        assert net.agents["n2"].record_hang("7.0", 1, "rank 1") and net.agents["n1"].record_hang("7.0+1", 0, "rank 0")
        net.carry()
        said = await net.state("n3", attempt=1)
        assert said.attempt == 2 and timeless(said.before) == first
        assert timeless(said.first) == End("hung: n1: rank 0", Cause.HUNG, 0, host="n1")
        assert not net.agents["n2"].record_hang("7.0+x", 1, "") and not net.agents["n2"].record_hang("7.1+1", 1, "")
        assert net.events == [("n1", "relaunch")] * 2

    asyncio.run(play())


def test_launchers_and_agents_of_an_earlier_version() -> None:
    async def play() -> None:
        net = Net()
        said = await net.state("n3", failed="rank 2 ended", rank=2, cause=Cause.CRASHED)
        assert said.attempt == 1 and said.first == End("rank 2 ended", Cause.CRASHED, 2)
        net.agents["n1"].on_message(net.incarnations["n1"], "n2", peer.Launch("7.1", 3, "rank 0 ended", "", False))
        assert (await net.state("n1", step="7.1", attempt=2)).first == End("rank 0 ended")

    asyncio.run(play())


def test_who_failed_first_is_named_however_late_it_is_heard() -> None:
    async def play() -> None:
        net = Net()
        await net.state("n3", **end(2, Cause.CONSEQUENCE))
        assert (await net.state("n1")).first.rank == 2
        said = await net.state("n2", **end(1))
        assert said.attempt == 1 and said.first.rank == 1
        assert [(await net.state(name)).first.rank for name in net.names] == [1] * 3
        assert net.events.count(("n1", "relaunch")) == 1

    asyncio.run(play())


def test_a_step_that_is_given_up_is_told_to_who_asks_for_the_verdict() -> None:
    """`gemini-hpc run` would start another step, which fails in the same way."""

    async def play() -> None:
        net = Net()
        await net.state("n3", end=end(2)["end"], over="SIGTERM was sent to the step")
        last = net.agents["n1"].last
        assert last is not None and not last.given_up and last.end.rank == 2
        await net.state("n3", step="7.1", end=end(2)["end"], over="it fails at step 8 each time", given_up=True)
        why = "rank 2 ended; it fails at step 8 each time"
        for agent in net.agents.values():
            assert agent.last == local.StepEnd("7.1", end(2)["end"], why)

    asyncio.run(play())


def test_a_rank_without_a_launcher_is_told_of_to_all() -> None:
    """No attempt begins of it, and nobody takes a launcher for there."""

    async def play() -> None:
        net = Net()
        one, other = End("rank 1 ended", Cause.RAISED, 1, t=5.0), End("rank 2 ended", Cause.RAISED, 2, t=6.0)
        net.agents["n3"].record_end("7.0", other)
        net.agents["n2"].record_end("7.0", one)
        net.carry()
        assert [agent.last for agent in net.agents.values()] == [local.StepEnd("7.0", one)] * 3
        assert not net.agents["n2"].has_launchers("7.0") and not net.agents["n2"].record_hang("7.0", 1, "rank 1")
        net.agents["n1"].record_loss(["n9"])
        await net.state("n2")
        assert net.agents["n2"].has_launchers("7.0+3") and not net.agents["n2"].has_launchers("7.1")
        assert (await net.state("n1")).attempt == 0 and net.events == []

    asyncio.run(play())


def test_steps_are_apart_and_not_without_number() -> None:
    async def play() -> None:
        net = Net(1)
        await net.state("n1", **end(0))
        assert (await net.state("n1", step="7.1")).attempt == 0
        for at in range(2 * MAX_STEPS):
            await net.state("n1", step=f"8.{at}")
        assert len(net.agents["n1"]._steps) == MAX_STEPS
        net.agents["n1"].reset()
        assert (await net.state("n1", step=f"8.{at}")).attempt == 0

    asyncio.run(play())


def test_strangers_and_jobs_that_have_ended_are_not_heard() -> None:
    async def play() -> None:
        net = Net()
        net.agents["n1"].on_message(net.incarnations["n1"], "n3", peer.Launch("7.0", 9, "", "", False))
        assert (await net.state("n1")).attempt == 0
        net.agents["n1"]._membership.detached = True
        assert isinstance(await net.agents["n1"].answer(local.LaunchRequest("7.0", 0)), local.Error)

    asyncio.run(play())
