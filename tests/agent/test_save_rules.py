"""Which versions are saved, when somebody is answered, and when all may leave: the decisions of a root, in every
order of what may happen, without a tier or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest

from gemini_hpc.agent.tier import save_events as events
from gemini_hpc.agent.tier.save_rules import AGAIN_S, FLUSH_TRIES, GATHER_S, SaveRules
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.tier_interval import choose_interval_s
from gemini_hpc.wire import peer
from gemini_hpc.wire.stored import NodeFile, Stored

from .every_state import every_state

SET, ROUND, WORLD, DIGEST = "default", 3, 2, "0" * 32
FACTS = events.SaveFacts(
    here=(0, ROUND),
    leads=True,
    parent=None,
    epoch=1,
    sealed={},
    missing=False,
    silent_s=3.0,
    salvaging=False,
    tier=True,
    interval_s=10.0,
    before_end_s=0.0,
    flushes=True,
    is_rejected=lambda name, stamp: False,
    any_rejected=False,
    find_names=lambda name, stamp: {},
    count_written_bytes=lambda name: 0,
    attempt=1,
)


def sealed(version: int, **others: object) -> events.SaveFacts:
    return replace(FACTS, sealed={SET: (Stamp(1, version), WORLD)}, **others)  # type: ignore[arg-type]


def up(order: events.Order, node: int, reason: str = "") -> events.Heard:
    m = order.message
    file = NodeFile(f"node-{node:04d}.h5", 10, (Stored(node, node, 10, 10, DIGEST),))
    return events.Heard(
        peer.SaveUp(m.round, m.training, m.stamp, f"n{node}", None if reason else file, reason, m.attempt)
    )


# ---- every order ---------------------------------------------------------------------------------------


@dataclass
class World:
    """A root, whose nodes may write or fail, with a tier that may fail.

    may: what happens once; faults: how many there may still be; ticks: how often time may go by; repeats: how often a
    node may say what it has said before, also of a save that has been given up.
    """

    saves: SaveRules = field(default_factory=SaveRules)
    version: int = 1
    orders: list[events.Order] = field(default_factory=list)
    doing: list[events.Effect] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)  # the version that it was at least
    answers: dict[int, tuple[Stamp, str]] = field(default_factory=dict)
    on_tier: int = 0
    may: list[str] = field(default_factory=lambda: ["seal", "ask", "freeze", "detach"])
    faults: int = 1
    ticks: int = 1
    repeats: int = 1
    let_go: bool = False
    cleaning: int = 0  # the last one of this round
    now: float = 0.0
    wrote: set[tuple[int, int]] = field(default_factory=set)  # which order, which node
    round: int = ROUND

    def key(self) -> str:
        return repr([sorted(vars(self.saves).items()), {k: v for k, v in vars(self).items() if k != "saves"}])

    def moves(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = [(what,) for what in sorted(set(self.may))]
        ends = ["well", "badly"] if self.faults else ["well"]
        found += [("done", str(at), how) for at in range(len(self.doing)) for how in ends]
        for at in range(len(self.orders)):
            for node in range(WORLD) if self.wrote else (0,):  # nodes are alike: the first to write is called 0
                if self.repeats or (at, node) not in self.wrote:
                    found += [("wrote", str(node), str(at), how) for how in ends]
        return [*found, ("tick",)] if self.ticks and self.saves.waits else found

    def make(self, move: tuple[str, ...]) -> None:
        what, how = move[0], move[-1]
        self.faults -= how == "badly"
        if what in self.may:
            self.may.remove(what)
        if what == "seal":
            self.version += 1
            self.happens(events.Sealed(SET, Stamp(1, self.version)))
        elif what == "ask":
            number = len(self.asked) + 1
            self.asked[number] = self.version
            self.happens(events.Ask(number, SET))
        elif what == "freeze":
            self.round += 1
            self.cleaning = 0
            self.happens(events.Freeze())
            assert not self.saves.last
        elif what == "detach":
            self.may = [other for other in self.may if other != "seal"]
            self.happens(events.Detached(False))
            assert self.saves.last or self.let_go
        elif what == "tick":
            self.ticks -= 1
            self.now += AGAIN_S
            self.happens(events.Tick())
        elif what == "wrote":
            node, at = int(move[1]), int(move[2])
            self.repeats -= (at, node) in self.wrote
            self.wrote.add((at, node))
            self.happens(up(self.orders[at], node, "" if how == "well" else "no space left on device"))
        else:
            self.end(self.doing.pop(int(move[1])), "" if how == "well" else "the disk is full")

    def end(self, effect: events.Effect, reason: str) -> None:
        match effect:
            case events.Clean():
                self.happens(events.Cleaned(effect.name, effect.number))
            case events.Publish():
                stamp = effect.gathering.stamp
                if not reason:
                    self.on_tier = max(self.on_tier, stamp.version)
                    self.happens(events.Stored({SET: (stamp, 0.0)}))
                self.happens(events.Published(effect.name, effect.gathering, reason))
            case events.Name():
                self.happens(events.Named(effect.name, effect.stamp, effect.flush, reason))

    def happens(self, event: events.Event) -> None:
        facts = sealed(self.version, attempt=len(self.orders) + 1, here=(0, self.round), interval_s=0.0)
        for effect in self.saves.step(event, facts, self.now):
            match effect:
                case events.Order():
                    tidying = [e.number for e in self.doing if isinstance(e, events.Clean)]
                    assert self.cleaning and self.cleaning not in tidying, "nothing is written until it is tidy"
                    assert Stamp(*effect.message.stamp) == self.saves.gathering[SET].stamp
                    if effect not in self.orders:
                        self.orders.append(effect)
                case events.Publish():
                    assert effect.gathering.whole
                    others = [e for e in self.doing if isinstance(e, events.Publish)]
                    assert all(e.gathering is not effect.gathering for e in others), "once"
                    self.doing.append(effect)
                case events.Answer():
                    assert effect.id in self.asked and effect.id not in self.answers, "once"
                    if not effect.reason:
                        assert self.on_tier >= effect.stamp.version >= self.asked[effect.id]
                    self.answers[effect.id] = effect.stamp, effect.reason
                case events.Down(peer.SaveOver()):
                    self.let_go = True
                case events.Clean():
                    self.cleaning = effect.number
                    self.doing.append(effect)
                case events.Name():
                    self.doing.append(effect)
        if isinstance(event, events.Freeze):
            assert SET not in self.saves.gathering

    def play_on(self) -> None:
        """Nothing fails any more."""
        self.faults = 0
        for _ in range(100):
            while self.doing:
                self.make(("done", "0", "well"))
            if not self.may and not self.saves.waits:
                return
            gathering = self.saves.gathering.get(SET)
            if gathering is not None and not gathering.whole and gathering.attempt:
                for node in range(WORLD):
                    self.make(("wrote", str(node), str(gathering.attempt - 1), "well"))
            elif self.may:
                self.make((sorted(self.may)[0],))
            else:
                self.make(("tick",))
        raise AssertionError(f"it does not end: {self}")


@pytest.mark.parametrize(
    "may, least",
    [
        (["seal", "seal", "freeze"], 150),
        pytest.param(["ask", "freeze"], 5000, marks=pytest.mark.slow),
        pytest.param(["ask", "ask", "seal"], 5000, marks=pytest.mark.slow),
        pytest.param(["ask", "detach", "seal"], 5000, marks=pytest.mark.slow),
    ],
)
def test_in_every_order_of_events_all_are_answered_and_let_go(may: list[str], least: int) -> None:
    states = 0
    for world in every_state(World(may=[*may])):
        states += 1
        failed = world.faults == 0
        world.play_on()
        assert world.answers.keys() == world.asked.keys()
        if not failed:
            assert not any(reason for _, reason in world.answers.values()), "nothing was in the way"
        if "detach" in may:
            assert world.let_go and not world.saves.last
            assert failed or world.on_tier == world.version
    assert states > least


# ---- one by one ----------------------------------------------------------------------------------------


def begun(version: int = 5, **others: object) -> tuple[SaveRules, events.Order, events.SaveFacts]:
    """A save is under way since 0."""
    saves, facts = SaveRules(), sealed(version, **others)
    [clean] = saves.step(events.Ask(1, SET), facts, 0.0)
    assert clean == events.Clean(SET, 1)
    [order] = saves.step(events.Cleaned(SET, 1), facts, 0.0)
    assert isinstance(order, events.Order)
    return saves, order, facts


@pytest.mark.parametrize(
    "at, before_end_s, ends_in_s, begins",
    [
        (9.9, 0.0, math.inf, False),
        (10.0, 0.0, math.inf, True),
        (5.0, 3.0, 8.1, False),
        (5.0, 3.0, 8.0, True),
        (5.0, 0.0, 8.0, False),
    ],
)
def test_when_a_version_is_due(at: float, before_end_s: float, ends_in_s: float, begins: bool) -> None:
    saves, facts = SaveRules(), sealed(4, before_end_s=before_end_s)
    saves.step(events.EndsIn(None if math.isinf(ends_in_s) else ends_in_s), facts, 0.0)
    assert saves.step(events.Sealed(SET, Stamp(1, 4)), facts, 0.0) == [events.Clean(SET, 1)]
    saves.step(events.Cleaned(SET, 1), facts, 1.0)
    found = saves.step(events.Sealed(SET, Stamp(1, 5)), sealed(5, before_end_s=before_end_s), at)
    assert [type(effect) for effect in found] == ([events.Order] if begins else [])


def saved(saves: SaveRules, order: events.Order, facts: events.SaveFacts, until: float) -> None:
    for node in range(WORLD):
        for effect in saves.step(up(order, node), facts, until):
            if isinstance(effect, events.Publish):
                saves.step(events.Published(SET, effect.gathering, ""), facts, until)
    assert not saves.gathering


def test_an_automatic_interval_follows_from_the_last_saves() -> None:
    """lambda is 20 a day, O 1 % of a save: one of 20 s is worth while each 42 s, later ones of 5 s each 21 s."""
    saves, order, facts = begun(5, unserved_per_day=20.0)
    assert saves.compute_duration_s(SET) is None and saves.compute_interval_s(SET, 600.0, 20.0) == 600.0
    assert saves.compute_interval_s(SET, 600.0, None) == 600.0
    saved(saves, order, facts, 20.0)
    every_s = choose_interval_s(20.0, 20.0)
    assert saves.compute_duration_s(SET) == 20.0 and saves.compute_interval_s(
        SET, 600.0, 20.0
    ) == every_s == pytest.approx(41.57, abs=0.01)
    assert saves.compute_interval_s(SET, 600.0, None) == 600.0
    now, version = 0.0, 6
    for _ in range(3):
        assert (
            saves.step(events.Sealed(SET, Stamp(1, version)), sealed(version, unserved_per_day=20.0), now + 20) == []
        )
        now += every_s
        facts = sealed(version, unserved_per_day=20.0)
        [order] = saves.step(events.Sealed(SET, Stamp(1, version)), facts, now)
        assert isinstance(order, events.Order)
        saved(saves, order, facts, now + 5.0)
        every_s, version = saves.compute_interval_s(SET, 600.0, 20.0), version + 1
    assert saves.compute_duration_s(SET) == 5.0 and every_s == choose_interval_s(5.0, 20.0) < choose_interval_s(
        20.0, 20.0
    )


@pytest.mark.parametrize(
    "others",
    [{"tier": False}, {"epoch": 2}, {"is_rejected": lambda name, stamp: True}],
)
def test_what_is_not_to_be_saved(others: dict[str, object]) -> None:
    saves = SaveRules()
    for at in (0.0, 100.0):
        assert saves.step(events.Sealed(SET, Stamp(1, 4)), sealed(4, **others), at) == []


def test_nodes_are_asked_again_until_all_have_written() -> None:
    saves, order, facts = begun()
    assert saves.step(events.Tick(), facts, AGAIN_S - 0.1) == []
    assert saves.step(events.Tick(), facts, AGAIN_S) == [order]
    assert saves.step(up(order, 0), facts, 6.0) == []
    [publish] = saves.step(up(order, 1), facts, 7.0)
    assert isinstance(publish, events.Publish)
    assert saves.step(up(order, 1), facts, 7.5) == [], "said twice"
    assert saves.step(events.Tick(), facts, 60.0) == []
    found = saves.step(events.Published(SET, publish.gathering, ""), facts, 61.0)
    assert found == [events.Answer(1, Stamp(1, 5), "")] and not saves.gathering


def test_what_an_agent_says_of_another_save_does_not_count() -> None:
    saves, order, facts = begun()
    other = events.Order(peer.SaveDown(ROUND, SET, (1, 5), order.message.attempt + 1))
    old = events.Order(peer.SaveDown(ROUND - 1, SET, (1, 5), order.message.attempt))
    for heard in (up(other, 0), up(other, 1, "no"), up(old, 0)):
        assert saves.step(heard, facts, 1.0) == []
    assert not saves.gathering[SET].files


def test_a_flush_that_fails_is_tried_so_often_and_says_why() -> None:
    saves, order, facts = begun()
    for tries in range(1, FLUSH_TRIES + 1):
        found = saves.step(up(order, 1, "no space"), facts, float(tries))
        assert found[0] == events.Failed(SET, Stamp(1, 5), "no space", "n1")
        if tries < FLUSH_TRIES:
            assert found[1:] == [events.Clean(SET, tries + 1)]
            facts = replace(facts, attempt=tries + 1)
            [again] = saves.step(events.Cleaned(SET, tries + 1), facts, float(tries))
            assert isinstance(again, events.Order)
            order = again
    assert found[1:] == [events.Answer(1, Stamp(1, 5), "n1: no space")]


def test_a_save_that_does_not_come_to_an_end_is_given_up() -> None:
    saves, _, facts = begun()
    assert not any(isinstance(e, events.Failed) for e in saves.step(events.Tick(), facts, GATHER_S - 1.0))
    failed, *_ = saves.step(events.Tick(), facts, GATHER_S)
    assert isinstance(failed, events.Failed) and "within 3600 s" in failed.reason


def test_what_is_wanted_for_good_goes_first() -> None:
    saves, order, facts = begun(5)
    wish = replace(sealed(8, attempt=2), find_names=lambda name, stamp: {"best": 7} if stamp.version >= 7 else {})
    [again] = saves.step(events.Keep(SET), wish, 1.0)
    assert isinstance(again, events.Order) and again.message.stamp == (1, 8)
    assert saves.step(events.Keep(SET), wish, 2.0) == [], "it is on its way"
    assert saves.step(up(order, 0), facts, 2.0) == []
    saves.step(events.Stored({SET: (Stamp(1, 8), 0.0)}), wish, 3.0)
    assert saves.step(events.Keep(SET), wish, 3.0) == [events.Name(SET, Stamp(1, 8), 0)]
    assert saves.step(events.Keep(SET), wish, 3.0) == []
    found = saves.step(events.Named(SET, Stamp(1, 8), 0, "gone"), wish, 4.0)
    assert found == [events.Failed(SET, Stamp(1, 8), "gone")] and not saves.saved


@pytest.mark.parametrize("missing, stored, over", [(False, False, True), (True, False, False), (True, True, True)])
def test_after_a_save_that_fails_a_lost_node_is_waited_for_before_all_are_let_go(
    missing: bool, stored: bool, over: bool
) -> None:
    saves, facts = SaveRules(), sealed(5, salvaging=True)
    assert saves.step(events.Detached(False), facts, 0.0) == [
        events.NotSaved(Stamp(1, 5), "a node is missing, and the other nodes save the version by themselves")
    ]
    if stored:
        saves.step(events.Stored({SET: (Stamp(1, 5), 0.0)}), facts, 1.0)
    facts = replace(facts, missing=missing)
    assert saves.step(events.Tick(), facts, facts.silent_s - 0.1) == []
    found = saves.step(events.Tick(), facts, facts.silent_s)
    assert found == ([events.Down(peer.SaveOver(ROUND))] if over else []) and saves.last != over


def test_the_next_incarnation_is_not_let_go_by_the_end_of_the_one_before() -> None:
    saves, facts = SaveRules(), sealed(5, salvaging=True)
    saves.step(events.Detached(False), facts, 0.0)
    assert saves.step(events.Tick(), replace(facts, here=(1, 1)), 10.0) == []


@pytest.mark.parametrize("dead", [False, True])
def test_a_node_below_waits_for_the_roots_word(dead: bool) -> None:
    saves, facts = SaveRules(), sealed(5, leads=False, parent="n0")
    assert saves.step(events.Detached(dead), facts, 0.0) == [] and saves.last
    assert saves.step(events.Ended(), facts, 1.0) == [events.Down(peer.SaveOver(ROUND))] and not saves.last
    assert saves.step(events.Detached(dead), facts, 2.0) == [] and not saves.last, "said before the epilog came"


def test_what_gets_on_is_waited_for_before_a_salvage_and_what_does_not_is_given_up() -> None:
    saves, _, facts = begun()
    written = [0]
    facts = replace(facts, count_written_bytes=lambda name: written[0], salvaging=True)
    assert saves.step(events.Settle(1, 10.0), facts, 0.0) == []
    for at in (9.0, 18.0, 27.0):
        written[0] += 1
        assert events.Settled(1) not in saves.step(events.Tick(), facts, at)
    found = saves.step(events.Tick(), facts, 37.0)
    reason = "a node is missing: the other nodes save the copies that are left"
    assert found == [events.Answer(1, Stamp(1, 5), reason), events.Settled(1)]
    assert not saves.gathering and not saves.waits


def test_what_the_root_wants_is_passed_on_and_written() -> None:
    saves, message = SaveRules(), peer.SaveDown(ROUND, SET, (1, 5), 9)
    facts = sealed(5, leads=False, parent="n0")
    assert saves.step(events.Wanted(message), facts, 0.0) == [events.Down(message), events.Write(message)]
    for others in ({"tier": False}, {"salvaging": True}, {"here": (0, ROUND + 1)}, {"here": None}):
        assert saves.step(events.Wanted(message), replace(facts, **others), 0.0) == []  # type: ignore[arg-type]
    heard = up(events.Order(message), 1)
    assert saves.step(heard, facts, 1.0) == [events.Up("n0", heard.message)]
