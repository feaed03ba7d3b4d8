"""Who leads, who writes and when it is over, in every order of what may happen: the decisions of two agents that are
left of three, without network or clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from gemini_hpc.agent.peers.round_events import Heard, Log, Send
from gemini_hpc.agent.tier import salvage_events as events
from gemini_hpc.agent.tier.salvage_rules import ASKED_S, COLLECT_S, LOST_S, SalvageRules
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.stored import NodeFile, Stored

from .every_state import every_state

HOSTS, LEFT, SET, SEALED = ("a", "b", "c"), ("a", "b"), "default", Stamp(1, 5)
HAS = {"a": (0, 2), "b": (1, 0)}  # homes; c is gone, and a has its shard
STEP_S = 2.5
Move = tuple[str, ...]


@dataclass
class World:
    """Two agents, what is on its way between them, and what each is doing. faults: how many may still happen;
    early: how often time may go by while something else could happen."""

    agents: dict[str, SalvageRules] = field(default_factory=lambda: {host: SalvageRules(host) for host in LEFT})
    links: dict[str, list[object]] = field(default_factory=lambda: {host: [] for host in LEFT})  # to whom
    doing: dict[str, list[events.Effect]] = field(default_factory=lambda: {host: [] for host in LEFT})
    told: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(LEFT, False))
    may_begin: set[str] = field(default_factory=lambda: set(LEFT))
    stored: bool = False
    published: int = 0
    faults: int = 1
    early: int = 1  # ticks while something is on its way
    now: float = 100.0
    begun: int = 0

    def key(self) -> str:
        mine = [(host, sorted(vars(agent).items(), key=lambda kv: kv[0])) for host, agent in self.agents.items()]
        rest = self.links, self.doing, self.told, sorted(self.may_begin), self.stored, self.faults, self.early
        return repr((mine, rest, self.now))

    # ---- what may happen

    def moves(self) -> list[Move]:
        found: list[Move] = [("begin", host) for host in sorted(self.may_begin)]
        for host in LEFT:
            if self.links[host]:
                found.append(("deliver", host))
                if self.faults:
                    found.append(("lose", host))
            for at in range(len(self.doing[host])):
                found.append(("done", host, str(at)))
                if self.faults:
                    found.append(("fails", host, str(at)))
        if self.busy and (not found or self.early):
            found.append(("tick",))
        return found

    def make(self, move: Move) -> None:
        what, host = move[0], move[1] if len(move) > 1 else ""
        if what == "begin":
            self.may_begin.discard(host)
            self.happens(host, events.Begin())
        elif what == "deliver":
            message = self.links[host].pop(0)
            self.happens(host, Heard("b" if host == "a" else "a", message))  # type: ignore[arg-type]
        elif what == "lose":
            self.faults -= 1
            self.links[host].pop(0)
        elif what == "tick":
            self.early -= any(self.links.values()) or any(self.doing.values()) or bool(self.may_begin)
            self.now += STEP_S
            for other in LEFT:
                self.happens(other, events.Tick())
        else:
            self.faults -= what == "fails"
            self.end(host, self.doing[host].pop(int(move[2])), what == "done")

    def end(self, host: str, effect: events.Effect, well: bool) -> None:
        """What the agent was doing has come to an end, well or not."""
        match effect:
            case events.Reach():
                self.happens(host, events.Reached(effect.run, effect.host, well and effect.host in LEFT))
            case events.Settle():
                self.happens(host, events.Settled(effect.run) if well else events.Broken(effect.run))
            case events.Look():
                there = {SET: SEALED} if self.stored else {}
                self.happens(host, events.Looked(effect.run, there if well else None, "" if well else "not mounted"))
            case events.Publish():
                assert effect.gathering.whole
                if well:
                    self.stored = True
                    self.published += 1
                self.happens(host, events.Published(effect.run, "" if well else "the disk is full"))
            case events.Clean():
                self.happens(host, events.Cleaned(effect.run))
            case events.Write():
                files = tuple(
                    NodeFile(f"node-{home:04d}.h5", 10, (Stored(home, home, 10, 10, "0" * 32),))
                    for home in effect.order.homes
                )
                reason = "" if well else "no way to the tier"
                done = peer.SalvageWrote(SET, SEALED, files if well else (), reason, effect.order.attempt)
                if effect.leader == host:
                    self.happens(host, Heard(host, done))
                else:
                    self.links[effect.leader].append(done)

    def happens(self, host: str, event: events.Event) -> None:
        agent = self.agents[host]
        for effect in agent.step(event, self.facts(host), self.now):
            match effect:
                case Send():
                    if effect.host in LEFT:
                        self.links[effect.host].append(effect.message)
                case events.Halt():
                    self.doing[host] = [e for e in self.doing[host] if isinstance(e, events.Write)]
                case events.Saved():
                    assert self.stored, "nobody may leave before it is there"
                    self.told[host] = True
                case Log() | events.Failed():
                    pass
                case _:
                    if effect not in self.doing[host]:
                        self.doing[host].append(effect)
        leads = any(
            isinstance(e, events.Settle | events.Look | events.Publish | events.Clean) for e in self.doing[host]
        )
        assert agent.leads or not leads, "who has yielded does no more of it"

    def facts(self, host: str) -> events.SalvageFacts:
        held = tuple(peer.Held(SET, home, home, SEALED) for home in HAS[host])
        return events.SalvageFacts(
            hosts=HOSTS,
            dead={"c"},
            heard=dict.fromkeys(HOSTS, self.now),
            noderanks={"a": 0, "b": 1, "c": 2},
            own=peer.SalvageHave((peer.Sealed(SET, SEALED, 3),), held),
            unwanted=False,
            is_rejected=lambda name, stamp: False,
            detached=True,
            attempt=1000 * self.agents[host].run + len(host),
        )

    # ---- how it ends

    @property
    def busy(self) -> bool:
        still = not any(self.links.values()) and not any(self.doing.values())
        return not still or any(agent.busy for agent in self.agents.values())

    def play_on(self) -> None:
        """Nothing fails any more, and nothing is left out."""
        self.faults = self.early = 0
        for _ in range(200):
            if not self.busy and not self.may_begin:
                return
            self.make(self.moves()[0])
        raise AssertionError(f"it does not end: {self}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "begins, faults, early, least", [("a", 2, 1, 5000), ("b", 1, 1, 3000), ("ab", 0, 1, 3000), ("ab", 1, 0, 1500)]
)
def test_in_every_order_of_events_it_ends_and_nobody_is_told_too_early(
    begins: str, faults: int, early: int, least: int
) -> None:
    states = 0
    for world in every_state(World(may_begin=set(begins), faults=faults, early=early)):
        states += 1
        failed = world.faults < faults
        world.play_on()
        again = [host for host in LEFT if not world.told[host]]
        assert failed or not again, "without a fault one try is enough"
        for host in again:  # what fails is tried again
            world.now = max(world.now, world.agents[host].again_at)
            assert world.agents[host].is_due(world.now, last=False)
            world.may_begin = {host}
            world.play_on()
        assert world.stored and all(world.told.values()), world
        assert failed or world.published == 1
        assert all(agent.saved for agent in world.agents.values())
    assert states > least


def lead() -> tuple[World, SalvageRules]:
    """`a` leads and waits for what the others have."""
    world = World(may_begin=set(), faults=0)
    world.happens("a", events.Begin())
    assert world.doing["a"] == [events.Settle(1, COLLECT_S)] and world.agents["a"].leads
    return world, world.agents["a"]


def test_what_comes_of_an_earlier_try_does_not_count() -> None:
    world, agent = lead()
    world.happens("a", events.Reset())
    assert not agent.busy and not agent.gathering
    for event in (
        events.Settled(1),
        events.Looked(1, {}),
        events.Published(1, ""),
        events.Cleaned(1),
        events.Reached(1, "b", True),
        events.Broken(1),
    ):
        assert agent.step(event, world.facts("a"), world.now) == []
    assert not agent.saved
    world.happens("a", events.Begin())
    assert agent.step(events.Settled(1), world.facts("a"), world.now) == [] and agent.stage == "settling"


def test_a_writer_who_has_answered_is_not_lost_by_falling_silent() -> None:
    """While another one still writes."""
    world, agent = lead()
    facts = world.facts("a")
    agent.step(events.Settled(1), facts, 100.0)
    agent.step(Heard("b", world.facts("b").own), facts, 100.0)
    orders = [e for e in agent.step(events.Looked(1, {}), facts, 100.0) if isinstance(e, events.Write | events.Reach)]
    [(own, reach)] = [(e, f) for e, f in [orders] if isinstance(e, events.Write) and isinstance(f, events.Reach)]
    assert agent.step(events.Reached(1, "b", False), facts, 101.0) == []
    files = (NodeFile("node-0001.h5", 10, (Stored(1, 1, 10, 10, "0" * 32),)),)
    done = peer.SalvageWrote(SET, SEALED, files, "", own.order.attempt)
    assert reach.host == "b" and agent.step(Heard("b", done), facts, 102.0) == []
    found = agent.step(events.Tick(), facts, 103.0 + LOST_S)
    assert agent.stage == "writing" and [type(e) for e in found] == [events.Write]


def test_a_leader_that_is_not_heard_is_followed_no_more() -> None:
    world = World(may_begin=set())
    agent, facts = world.agents["b"], world.facts("b")
    assert agent.step(Heard("a", peer.SalvageAsk()), facts, 100.0) == [Send("a", facts.own)]
    assert agent.stage == "following" and agent.leader == "a"
    agent.step(events.Tick(), facts, 100.0 + LOST_S)
    assert agent.stage == "following"
    [reach] = agent.step(events.Tick(), facts, 101.0 + LOST_S)
    assert isinstance(reach, events.Reach) and reach.host == "a" and not agent.leader
    [settle, *_] = [
        e for e in agent.step(events.Reached(agent.run, "a", False), facts, 113.0) if isinstance(e, events.Settle)
    ]
    assert agent.leads and settle.stalled_s == COLLECT_S


def test_a_follower_that_has_lost_the_end_on_its_way_asks_for_it() -> None:
    world = World(may_begin=set())
    agent, facts = world.agents["b"], world.facts("b")
    agent.step(Heard("a", peer.SalvageAsk()), facts, 100.0)
    assert agent.step(events.Tick(), facts, 99.0 + ASKED_S) == []
    heard = replace(facts, heard={"a": 100.0 + ASKED_S})
    assert agent.step(events.Tick(), heard, 100.0 + ASKED_S) == [Send("a", facts.own)]
    over = [Send("b", peer.SalvageOver(False, ""))]
    assert world.agents["a"].step(Heard("b", facts.own), world.facts("a"), 110.0) == over
    assert agent.step(Heard("a", peer.SalvageOver(False, "")), facts, 110.0) == [] and not agent.busy


def test_a_fault_of_ours_ends_the_try_and_lets_the_others_go() -> None:
    world, agent = lead()
    found = agent.step(events.Broken(1), world.facts("a"), 100.0)
    assert found == [Send(host, peer.SalvageOver(False, "")) for host in ("b", "c")] and not agent.busy
