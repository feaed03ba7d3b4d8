"""Who leads when a node is missing, who writes what, and that nobody leaves too early: real `Salvage`s, of their
agents and of the network only what they ask for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import virtual

from gemini_hpc import clock
from gemini_hpc.agent.peers import incarnation
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.tier import flush, salvage, salvage_rules
from gemini_hpc.agent.tier.flush import FlushRequests
from gemini_hpc.agent.tier.node_writer import Told, WantedVersion
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core.slots import SlotPair, Stamp
from gemini_hpc.core.views import View
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.wire.flush import FlushAsk, Flushing
from gemini_hpc.wire.local import Attach
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile, Stored

from .contexts import made_context

SEALED, DIGEST = Stamp(1, 5), "0" * 32


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"REACH_S": 0.2, "COLLECT_S": 0.5, "ASKED_S": 0.5, "AGAIN_S": 0.05, "LOST_S": 0.4}
    for name, value in times.items():
        monkeypatch.setattr(salvage_rules, name, value)
    monkeypatch.setattr(salvage, "_TICK_S", 0.01)
    monkeypatch.setattr(incarnation, "_SILENT_S", 0.3)
    monkeypatch.setattr(flush, "_LOOK_S", 0.005)


class Network:
    """Agents by host; `cut` holds pairs between which nothing goes."""

    def __init__(self, hosts: str, *, m: int = 2) -> None:
        self.hosts, self.m = tuple(hosts), m
        self.agents: dict[str, Agent] = {}
        self.cut: set[frozenset[str]] = set()
        self.sent: Counter[str] = Counter()
        self.tier: dict[str, Stamp] = {}
        self.tier_down = False
        self.rejected: set[Stamp] = set()
        self.published: list[tuple[str, list[str]]] = []
        for host in self.hosts:
            self.agents[host] = Agent(self, host)

    def alive(self, a: str, b: str) -> bool:
        return a in self.agents and b in self.agents and frozenset((a, b)) not in self.cut

    def lose(self, host: str, *, known: bool = True) -> None:
        del self.agents[host]
        if known:
            for agent in self.agents.values():
                agent.dead.add(host)

    async def over(self, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while any(agent.salvage.busy for agent in self.agents.values()):
                await asyncio.sleep(0.01)


class Agent:
    """One of three or more nodes in a ring of m holders, with one rank each: its links, and what its drains do."""

    silence_s = 0.1
    tier, directory = "/tier", "/tier/gemini-12"

    def __init__(self, net: Network, node: str) -> None:
        self.net, self.node = net, node
        root = net.hosts[0]
        above = None if node == root else root
        rounds: Any = SimpleNamespace(children=() if above else net.hosts[1:], parent=above)
        self.trainings: list[Any] = [SimpleNamespace(name="default", sealed=SEALED, world=len(net.hosts))]
        self.position = {host: rank for rank, host in enumerate(net.hosts)}
        mine, n = self.position[node], len(net.hosts)
        self.store: list[Any] = [self._shard((mine - step) % n) for step in range(net.m)]
        self.dead: set[str] = set()
        self.last_heard = dict.fromkeys(net.hosts, clock.monotonic())
        self.saved: dict[str, tuple[Stamp, float]] = {}
        self.last = True
        self.unable = ""
        self.wrote: list[set[int]] = []
        self.events: list[str] = []
        self.left: set[str] = set()
        self.tasks: list[asyncio.Task[Any]] = []
        me: Any = self
        self.membership = Membership()
        attach = Attach(12, 0, "", node, net.m)
        self.membership.incarnation = Incarnation(attach, View(net.hosts), me, rounds, me)
        self.membership.noderanks = self.position
        rejections: Any = SimpleNamespace(is_rejected=lambda name, stamp: stamp in net.rejected)
        context = made_context(self.membership, node, job=12, log=me.log, spawn=me.spawn)
        self.salvage = Salvage(context, me.trainings, me.store, rejections, me, me)
        self.flush = FlushRequests(context, me.trainings, me, self.salvage)

    @property
    def saver(self) -> Agent:
        return self

    def _shard(self, rank: int) -> Any:
        pair = SlotPair()
        pair.complete_slot(pair.begin_version(SEALED, None, frozenset(), voted=frozenset()), SEALED, DIGEST, 10)
        return SimpleNamespace(training="default", rank=rank, world=len(self.net.hosts), home=rank, pair=pair)

    def knows_nothing(self) -> None:
        self.trainings.clear()
        self.store.clear()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    def log(self, name: str, **_: Any) -> None:
        self.events.append(name)

    def send(self, host: str, message: Message) -> bool:
        if not self.net.alive(self.node, host):
            return False
        self.net.sent[type(message).__name__] += 1

        def arrive() -> None:
            if self.net.alive(self.node, host):
                other = self.net.agents[host]
                other.last_heard[self.node] = clock.monotonic()
                other.salvage.on_message(self.node, message)

        asyncio.get_running_loop().call_later(0.001, arrive)
        return True

    async def ensure_link(self, host: str, timeout_s: float) -> bool:
        await asyncio.sleep(0.001 if self.net.alive(self.node, host) else timeout_s)
        if self.net.alive(self.node, host):
            self.last_heard[host] = clock.monotonic()
        return self.net.alive(self.node, host)

    def is_due(self, *, last: bool = False) -> bool:
        return self.salvage.is_due(clock.monotonic(), last=last)

    # ---- of the drains

    def record_last_stored(self) -> None:
        self.last = False

    def count_written_bytes(self, name: str) -> int:
        return 7

    def say(self, name: str, number: int, reason: str) -> None:
        self.events.append(f"not saved: {reason}")

    def cancel(self) -> None:
        pass

    def begin_save(self, what: WantedVersion, tier: str, told: Told) -> bool:
        assert what.homes is not None
        self.wrote.append(set(what.homes))
        if self.unable:
            told((), self.unable)
            return True
        shards = [shard for shard in self.store if shard.home in what.homes]
        files = [NodeFile(f"node-{s.home:04d}.h5", 10, (Stored(s.rank, s.home, 10, 10, DIGEST),)) for s in shards]
        asyncio.get_running_loop().call_later(0.02, told, tuple(files), "")
        return True

    async def wait_idle(self, stalled_s: float) -> None:
        pass

    async def find_stored(self, without: Any, within_s: float) -> tuple[Any, ...]:
        if self.net.tier_down:
            raise TierFailed("not mounted")
        self.saved.update({name: (stamp, 0.0) for name, stamp in self.net.tier.items()})
        return tuple(SimpleNamespace(training=name, stamp=stamp) for name, stamp in self.net.tier.items())

    async def publish(self, name: str, gathering: SaveProgress) -> str:
        assert gathering.whole and gathering.stamp == SEALED
        self.net.published.append((self.node, sorted(gathering.files)))
        self.net.tier[name] = gathering.stamp
        return ""

    async def clean(self, *_: Any) -> None:
        pass


def run(test: Callable[[Network], Awaitable[None]], hosts: str = "abcd", *, m: int = 2) -> None:
    async def inside() -> None:
        net = Network(hosts, m=m)
        await test(net)
        tasks = [task for agent in net.agents.values() for task in agent.tasks]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result

    virtual.run(inside())


FILES = [f"node-{rank:04d}.h5" for rank in range(4)]


def test_a_version_that_a_training_has_rejected_is_not_saved() -> None:
    async def test(net: Network) -> None:
        net.rejected.add(SEALED)
        net.lose("c")
        net.agents["a"].salvage.begin_try()
        await net.over()
        assert not net.published and not net.tier
        assert all(agent.salvage.saved for agent in net.agents.values()), "nobody waits for it"

    run(test)


@pytest.mark.parametrize(("gone", "begins"), list(permutations("abcd", 2)))
def test_whoever_is_lost_and_whoever_begins(gone: str, begins: str) -> None:
    async def test(net: Network) -> None:
        net.lose(gone)
        assert net.agents[begins].is_due() and net.agents[begins].is_due(last=True)
        net.agents[begins].salvage.begin_try()
        await net.over()
        leader = "b" if gone == "a" else "a"
        assert net.published == [(leader, FILES)]
        for agent in net.agents.values():
            assert agent.salvage.saved and not agent.saver.last and not agent.is_due(last=True), agent.node
            assert len(agent.wrote) <= 1, "nobody is asked to write twice"

    run(test)


def test_all_begin_at_once() -> None:
    async def test(net: Network) -> None:
        net.lose("a")
        for agent in net.agents.values():
            agent.salvage.begin_try()
        await net.over()
        assert net.published == [("b", FILES)]

    run(test)


def test_the_same_leader_tries_again() -> None:
    """The tier was away the first time."""

    async def test(net: Network) -> None:
        net.lose("b")
        net.tier_down = True
        net.agents["c"].salvage.begin_try()
        await net.over()
        assert not net.published and all(a.saver.last for a in net.agents.values()), "nobody may leave"
        assert not net.agents["c"].is_due() and net.agents["c"].is_due(last=True)
        net.tier_down = False
        net.agents["c"].salvage.begin_try(last=True)
        await net.over()
        assert net.published == [("a", FILES)]

    run(test)


@pytest.mark.parametrize("late_s", [0.0, 0.01, 0.05])
def test_a_follower_that_begins_while_the_leader_does(late_s: float) -> None:
    async def test(net: Network) -> None:
        net.lose("d")
        net.agents["a"].salvage.begin_try()
        await asyncio.sleep(late_s)
        net.agents["c"].salvage.begin_try()
        await net.over()
        assert net.published == [("a", FILES)] and all(a.salvage.saved for a in net.agents.values())

    run(test)


def test_of_two_leaders_one_yields() -> None:
    """They did not reach each other at first."""

    async def test(net: Network) -> None:
        net.lose("d")
        net.cut.add(frozenset("ab"))
        for agent in net.agents.values():
            agent.salvage.begin_try()
        await asyncio.sleep(0.3)
        net.cut.clear()
        await net.over()
        assert [leader for leader, _ in net.published] == ["a"]
        assert not net.agents["b"].saver.last and net.agents["b"].salvage.saved

    run(test)


def test_the_leader_is_lost_too() -> None:
    """With three copies: another one takes the lead."""

    async def test(net: Network) -> None:
        net.lose("d")
        for agent in net.agents.values():
            agent.salvage.begin_try()
        await asyncio.sleep(0.01)
        net.lose("a", known=False)
        await net.over()
        assert net.published == [("b", FILES)]

    run(test, m=3)


def test_who_cannot_write_is_left_out() -> None:
    """There is no way to the tier on one node; the other holder of its shards has one."""

    async def test(net: Network) -> None:
        net.lose("d")
        net.agents["b"].unable = "/tier: permission denied"
        net.agents["a"].salvage.begin_try()
        await net.over()
        assert net.published == [("a", FILES)]

    run(test, m=3)


def test_what_is_gone_is_told_and_nobody_says_that_it_is_saved() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        net.lose("c")
        net.agents["a"].salvage.begin_try()
        await net.over()
        assert not net.published and not any(a.salvage.saved for a in net.agents.values())
        [said] = [event for event in net.agents["a"].events if event.startswith("not saved")]
        assert said == "not saved: the shards of rank 1 are gone with b, c"

    run(test)


def test_where_nothing_is_known_nothing_is_called_saved() -> None:
    async def test(net: Network) -> None:
        net.lose("d")
        for agent in net.agents.values():
            agent.trainings.clear()
        net.agents["a"].salvage.begin_try()
        await net.over()
        assert not any(agent.salvage.saved for agent in net.agents.values())

    run(test)


def test_one_that_missed_the_end_hears_of_it_and_is_quiet() -> None:
    async def test(net: Network) -> None:
        net.lose("d")
        net.cut.update(frozenset(("c", other)) for other in "ab")
        net.agents["a"].salvage.begin_try()
        await net.over()
        net.cut.clear()
        before = sum(net.sent.values())
        net.agents["c"].salvage.begin_try()
        await net.over()
        assert net.agents["c"].salvage.saved and not net.agents["c"].saver.last
        assert sum(net.sent.values()) - before < 10

    run(test, m=3)


def test_a_neighbour_that_falls_silent_is_missing_only_while_all_should_be_there() -> None:
    async def test(net: Network) -> None:
        agent = net.agents["b"]
        assert not agent.is_due(last=True)
        agent.last_heard["a"] -= 5
        assert agent.is_due(last=True)
        agent.saver.last = False  # all is saved, so it may leave
        assert not agent.is_due(last=True)

    run(test)


def test_the_job_comes_back_in_the_middle() -> None:
    async def test(net: Network) -> None:
        net.lose("d")
        net.agents["a"].salvage.begin_try()
        await asyncio.sleep(0.01)
        for agent in net.agents.values():
            agent.salvage.reset()
        async with asyncio.timeout(10):
            while any(agent.salvage.busy for agent in net.agents.values()):
                await asyncio.sleep(0.02)
        assert not net.published

    run(test)


# ---- by hand -------------------------------------------------------------------------------------------


class Caller:
    """A `gemini-hpc flush`, at the agent's end."""

    def __init__(self) -> None:
        self.told: list[Flushing] = []

    async def receive(self) -> Message:
        return FlushAsk()

    async def flush(self, message: Flushing) -> None:
        self.told.append(message)

    @property
    def over(self) -> list[Flushing]:
        return [word for word in self.told if word.over]


async def by_hand(net: Network, host: str) -> Flushing:
    """As the command asks."""
    caller: Any = Caller()
    await net.agents[host].flush.answer(caller)
    (word,) = caller.over
    assert all((t.training, t.stamp, t.bytes) == ("default", SEALED, 7) for t in caller.told if not t.over)
    assert not word.root
    return word


@pytest.mark.parametrize(("gone", "asked"), [(gone, asked) for gone, asked in permutations("abcd", 2)])
def test_whoever_is_asked_by_hand(gone: str, asked: str) -> None:
    async def test(net: Network) -> None:
        net.lose(gone)
        word = await by_hand(net, asked)
        assert (word.training, word.stamp, word.reason) == ("default", SEALED, "")
        assert word.where == "/tier/gemini-12/default/e0000001-v0000000000005"
        assert [files for _, files in net.published] == [FILES]
        await net.over()
        for host in net.agents:  # again, of any: it is there
            assert await by_hand(net, host) == word
        assert len(net.published) == 1

    run(test)


def test_by_hand_while_it_is_under_way() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        net.agents["d"].salvage.begin_try()
        words = await asyncio.gather(*(by_hand(net, host) for host in "acd"))
        assert {word.stamp for word in words} == {SEALED} and not any(word.reason for word in words)
        assert len(net.published) == 1

    run(test)


def test_by_hand_of_what_is_gone() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        net.lose("c")
        for host in "ad":
            word = await by_hand(net, host)
            assert word.reason == "the shards of rank 1 are gone with b, c" and not word.where

    run(test)


def test_by_hand_where_the_tier_is_away() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        net.tier_down = True
        assert (await by_hand(net, "c")).reason == "not mounted"
        net.tier_down = False
        assert (await by_hand(net, "c")).stamp == SEALED and net.published

    run(test)


def test_by_hand_when_the_job_comes_back() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        asked = asyncio.ensure_future(by_hand(net, "a"))
        await asyncio.sleep(0.01)
        net.agents["a"].membership.detached = False
        net.agents["a"].salvage.reset()
        assert (await asked).reason == "the job has started again meanwhile: repeat the command"

    run(test)


@pytest.mark.parametrize("host", "acd")
def test_by_hand_of_an_agent_that_knows_of_nothing(host: str) -> None:
    """It has been started anew: the others' versions are saved, whoever leads."""

    async def test(net: Network) -> None:
        net.lose("b")
        net.agents[host].knows_nothing()
        word = await by_hand(net, host)
        assert (word.training, word.stamp, word.reason) == ("default", SEALED, "") and net.published

    run(test, m=3)


def test_by_hand_where_nobody_knows_of_anything() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        for agent in net.agents.values():
            agent.knows_nothing()
        word = await by_hand(net, "c")
        assert (word.training, word.where, word.reason) == ("", "", "the version has not been saved")

    run(test)


def test_by_hand_when_somebody_has_removed_it() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        assert not (await by_hand(net, "c")).reason
        for left in ({}, {"default": Stamp(1, 4)}):
            net.tier = left
            for host in "acd":
                word = await by_hand(net, host)
                assert word.reason == "the version was saved, but is no longer there" and not word.where

    run(test)


def test_by_hand_puts_off_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again by itself, however often somebody asks."""
    monkeypatch.setattr(salvage_rules, "GAP_S", 1.0)
    monkeypatch.setattr(salvage_rules, "LONGEST_GAP_S", 8.0)

    async def test(net: Network) -> None:
        net.lose("b")
        net.tier_down = True
        for _ in range(12):
            assert (await by_hand(net, "c")).reason == "not mounted"
        net.tier_down = False
        deadline = clock.monotonic() + 5
        while not net.published and clock.monotonic() < deadline:
            for agent in net.agents.values():
                if agent.is_due():
                    agent.salvage.begin_try()
            await asyncio.sleep(0.01)
        assert net.published

    run(test)


def test_gaps_between_tries_grow_to_a_quarter_of_an_hour() -> None:
    async def test(net: Network) -> None:
        net.lose("b")
        net.tier_down = True
        gaps = []
        for _ in range(7):
            net.agents["a"].salvage.begin_try()
            gaps.append(round(net.agents["a"].salvage._decides.again_at - clock.monotonic()))
            await net.over()
        assert gaps == [60, 120, 240, 480, 900, 900, 900]

    run(test)
