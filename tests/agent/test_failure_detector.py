"""When a peer is suspected, when it is dead, and when it is alive again: the decisions, without network or clock."""

from __future__ import annotations

import random

import pytest

from gemini_hpc.agent.peers.failure_detector import BACK, Dead, Doubt, FailureDetector, Liveness, Probe

HOSTS = ("a", "b", "c", "d", "e", "f")
SILENCE_S = 2.0


class Watch:
    """The detector of `a`, which has links to all others and heard of them at time 0."""

    def __init__(self) -> None:
        self.detector = FailureDetector("a", HOSTS, SILENCE_S, 0.0)
        self.links = [*HOSTS[1:]]
        for host in self.links:
            self.detector.partners.add(host)
            assert self.detector.record_message(host, 0.0) == []

    def hear(self, at: float, *silent: str) -> None:
        """Of all but these."""
        for host in HOSTS[1:]:
            if host not in silent:
                self.detector.record_message(host, at)

    def probes(self, now: float, late_s: float = 0.0) -> list[Probe]:
        found = self.detector.suspect_silent(now, self.links, late_s)
        assert all(isinstance(effect, Probe) for effect in found)
        return [effect for effect in found if isinstance(effect, Probe)]

    def suspect(self, host: str) -> Probe:
        """Silent from 0 to 3, while all others are heard and the clock is looked at."""
        for now in (1.0, 2.0):
            self.hear(now, host)
            assert self.probes(now) == []
        self.hear(3.0, host)
        (probe,) = self.probes(3.0)
        return probe


def test_a_silent_partner_is_probed_once_by_itself_and_by_three_others() -> None:
    watch = Watch()
    assert watch.suspect("b") == Probe("b", ("c", "d", "e"), 1.0, 2.0)
    assert watch.detector.list_silent(watch.links) == {"b"} and not watch.detector.dead
    watch.hear(4.0, "b")
    assert watch.probes(4.0) == [], "it is being probed"


def test_who_is_heard_after_the_jobs_end_was_not_lost_before_it() -> None:
    watch = Watch()
    watch.detector.record_job_end(0.5)
    watch.hear(1.0, "b")
    assert [probe.host for probe in watch.probes(2.5)] == ["b"], "it may have been lost before"
    assert watch.probes(4.0) == [], "the others may have ended since, as their jobs have"


def test_where_one_was_lost_before_the_jobs_end_another_loss_is_news() -> None:
    watch = Watch()
    watch.detector.on_report("c", "b", alive=False, now=1.5)
    watch.detector.record_job_end(1.6)
    watch.hear(2.0, "b", "c")
    assert {probe.host for probe in watch.probes(3.0)} == {"c"}
    assert {probe.host for probe in watch.probes(4.5)} == {"d", "e", "f"}


def test_who_has_an_agent_already_is_expected() -> None:
    """A survivor that dies before it is in the next incarnation is missed there."""
    detector = FailureDetector("a", HOSTS, SILENCE_S, 10.0, expected=("b", "c", "z"))
    detector.partners.update(HOSTS[1:])
    detector.record_message("c", 15.9)
    assert (
        detector.suspect_silent(11.0, ["c"])
        == detector.suspect_silent(13.0, ["c"])
        == detector.suspect_silent(16.0, ["c"])
        == []
    )
    assert detector.suspect_silent(16.1, ["c"]) == [Probe("b", ("c",), 1.0, 2.0)], "of d nobody knows when it comes"
    stopped = FailureDetector("a", HOSTS, SILENCE_S, 10.0, expected=("b",))
    stopped.partners.add("b")
    assert (
        stopped.suspect_silent(20.0, [], late_s=9.0)
        == stopped.suspect_silent(23.0, [])
        == stopped.suspect_silent(25.0, [])
        == []
    )
    assert stopped.suspect_silent(25.1, []) != []


def test_who_is_no_partner_or_was_never_heard_is_not_suspected() -> None:
    watch = Watch()
    watch.detector.partners.discard("b")
    del watch.detector.last_heard["c"]
    watch.hear(1.9, "b", "c")
    watch.probes(1.9)
    watch.hear(3.8, "b", "c")
    assert watch.probes(3.8) == [] and watch.detector.list_silent([]) == {"d", "e", "f"}


def test_suspects_are_no_witnesses() -> None:
    watch = Watch()
    watch.hear(1.9, "b", "c")
    watch.probes(1.9)
    watch.hear(3.8, "b", "c")
    assert {probe.host: probe.witnesses for probe in watch.probes(3.8)} == {
        "b": ("d", "e", "f"),
        "c": ("d", "e", "f"),
    }


@pytest.mark.parametrize("mine, theirs", [(True, [False, False, False]), (False, [None, True, False])])
def test_whom_anybody_reaches_is_alive(mine: bool, theirs: list[bool | None]) -> None:
    watch = Watch()
    probe = watch.suspect("b")
    assert watch.detector.declare_by_probe(probe, mine, theirs, 4.5) == []
    assert not watch.detector.suspects and not watch.detector.dead and watch.detector.last_heard["b"] == 4.5
    watch.hear(5.0, "b")
    assert watch.probes(5.0) == [], "as if it had been heard then"


def test_whom_nobody_reaches_is_dead_and_all_are_told() -> None:
    """A witness that does not answer is none."""
    watch = Watch()
    found = watch.detector.declare_by_probe(watch.suspect("b"), False, [False, None, False], 4.5)
    assert found == [Liveness("b", alive=False), Dead("b", ("a", "c", "e"), known=False)]
    assert watch.detector.dead == {"b"} and watch.detector.list_silent(watch.links) == set()
    watch.hear(5.0, "b")
    assert watch.probes(5.0) == [], "the dead are not probed"


def test_who_stopped_watching_buries_nobody() -> None:
    watch = Watch()
    probe = watch.suspect("b")
    watch.detector.watching = False
    assert watch.detector.declare_by_probe(probe, False, [False, False, False], 4.5) == [] and not watch.detector.dead
    watch.hear(5.5, "c")
    assert watch.probes(5.5) == [] and not watch.detector.suspects


def test_a_probe_that_is_given_up_may_come_again() -> None:
    watch = Watch()
    watch.detector.give_up(watch.suspect("b"))
    watch.hear(4.0, "b")
    assert [probe.host for probe in watch.probes(4.0)] == ["b"]


def test_who_was_stopped_itself_hears_first() -> None:
    watch = Watch()
    watch.probes(1.0)
    assert watch.probes(6.0, late_s=4.5) == [], "nothing was heard, for nobody listened"
    assert watch.probes(6.4) == [], "silent for 1.9 s in which it listened"
    assert {probe.host for probe in watch.probes(6.6)} == set(HOSTS[1:])


@pytest.mark.parametrize("late_s", [0.3, 1.0, 1.9, 2.5])
def test_who_has_no_processor_for_a_while_suspects_nobody(late_s: float) -> None:
    """Also where the beats are late again and again, each by less than what makes a suspect."""
    watch, now = Watch(), 0.0
    for _ in range(20):
        now += 0.5 + late_s
        watch.hear(now - late_s)
        assert watch.probes(now, late_s=late_s) == []
    assert watch.probes(now + SILENCE_S + 0.1) != [], "whoever is silent from now on is missed"


def test_an_obituary_is_believed_unless_the_peer_was_just_heard() -> None:
    watch = Watch()
    detector = watch.detector
    watch.hear(5.0, "b", "c")
    assert detector.on_report("d", "e", alive=False, now=5.0 + SILENCE_S / 2) == [] and not detector.dead
    assert detector.on_report("d", "e", alive=False, now=6.1) != [], (
        "silent for longer than half of what makes a suspect"
    )
    assert detector.record_message("e", 6.1)
    dead = [Liveness("b", alive=False), Dead("b", ("d",), known=False)]
    assert detector.on_report("d", "b", alive=False, now=5.0) == dead
    assert detector.on_report("c", "b", alive=False, now=5.0) == [], "it is known"
    assert detector.on_report("c", "a", alive=False, now=5.0) == [], "this agent knows better"
    assert detector.on_report("c", "x", alive=False, now=5.0) == [], "no host of this incarnation"
    assert detector.dead == {"b"}


def test_the_dead_come_back_and_all_are_told_once() -> None:
    for back in ("heard", "told"):
        detector = Watch().detector
        detector.on_report("d", "b", alive=False, now=5.0)
        alive = [Liveness("b", alive=True)]
        if back == "heard":
            assert detector.record_message("b", 6.0) == alive and detector.record_message("b", 6.1) == []
        else:
            assert detector.on_report("c", "b", alive=True, now=6.0) == alive
            assert detector.on_report("d", "b", alive=True, now=6.0) == []
        assert not detector.dead


def test_who_was_cut_off_itself_looks_for_the_others_again() -> None:
    detector = Watch().detector
    for host in "bcdef":
        detector.on_report("f" if host != "f" else "e", host, alive=False, now=5.0)
    dead = set(detector.dead)
    assert len(dead) > 3
    first, *doubts = detector.record_message("b", 6.0)
    assert first == Liveness("b", alive=True) and doubts == [Doubt(host, SILENCE_S / 2) for host in "cde"]
    again, *more = detector.record_reached("c", 6.1)
    assert again == Liveness("c", alive=True) and not {"d", "e"} & {
        doubt.host for doubt in more if isinstance(doubt, Doubt)
    }
    assert detector.record_message("d", 6.0 + SILENCE_S)[1:], "those that are dead still, after a while once more"


@pytest.mark.parametrize("back", ["heard", "told"])
def test_who_was_cut_off_is_not_believed_about_the_others(back: str) -> None:
    """b was in a part of the network of its own, and takes those for dead whom it could not reach."""
    detector = Watch().detector
    detector.on_report("d", "b", alive=False, now=5.0)
    assert detector.on_report("b", "e", alive=False, now=5.0) == [], "it counts as dead itself"
    alive = (
        detector.record_message("b", 6.0) if back == "heard" else detector.on_report("c", "b", alive=True, now=6.0)
    )
    assert alive and detector.on_report("b", "e", alive=False, now=6.0) == [] and detector.dead == set()
    assert detector.on_report("b", "e", alive=False, now=6.0 + BACK * SILENCE_S) != [], "it has been back for long"


def test_who_has_left_is_neither_suspected_nor_buried_until_it_is_heard_again() -> None:
    """Agents end one after the other when a job does: their epilogs may run seconds apart."""
    watch = Watch()
    detector, probe = watch.detector, watch.suspect("b")
    detector.on_report("d", "c", alive=False, now=6.1)
    assert detector.record_leave("b") == [] and detector.record_leave("c") == [Liveness("c", alive=True)]
    assert detector.declare_by_probe(probe, False, [False, False, False], 6.2) == []
    assert detector.on_report("d", "b", alive=False, now=9.0) == [] and not detector.dead
    watch.hear(9.0, "b", "c")
    assert watch.probes(9.0) == [] and detector.list_silent(HOSTS[3:]) == set()
    detector.record_message("b", 10.0)
    watch.hear(11.9, "b", "c")
    watch.probes(11.9)
    watch.hear(12.1, "b", "c")
    assert [probe.host for probe in watch.probes(12.1)] == ["b"]


def test_one_that_is_buried_while_it_is_probed_is_buried_once() -> None:
    watch = Watch()
    probe = watch.suspect("b")
    assert watch.detector.on_report("c", "b", alive=False, now=4.0)
    assert watch.detector.declare_by_probe(probe, False, [False, False, False], 4.5) == [
        Dead("b", ("a", "c", "d", "e"), known=True)
    ], "more witnesses, and no news"


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes(seed: int) -> None:
    """One is probed once at a time; nobody dies who is heard, or without news that says so; news alternate."""
    rng, watch, now = random.Random(seed), Watch(), 0.0
    detector, told, under_way = watch.detector, dict.fromkeys(HOSTS, True), list[Probe]()
    deaths = 0
    for _ in range(400):
        now += rng.expovariate(4.0)
        host, before = rng.choice(HOSTS[1:]), set(detector.dead)
        kind = rng.choice(["hear", "tick", "tick", "judge", "told", "found"])
        if kind == "hear":
            effects = detector.record_message(host, now) if host != "b" else []
        elif kind == "tick":
            effects = detector.suspect_silent(now, rng.sample(HOSTS[1:], 3))
        elif kind == "judge" and under_way:
            probe = under_way.pop(rng.randrange(len(under_way)))
            answers = [rng.choice([False, None, False, True]) for _ in probe.witnesses]
            effects = detector.declare_by_probe(probe, probe.host != "b" and rng.random() < 0.5, answers, now)
        elif kind == "found" and host != "b" and host in detector.dead:
            effects = detector.record_reached(host, now)
        else:
            effects = detector.on_report("f", host, alive=rng.random() < 0.5, now=now)
        for effect in effects:
            if isinstance(effect, Probe):
                assert effect.host not in {probe.host for probe in under_way} | detector.dead
                assert effect.host not in effect.witnesses and "a" not in effect.witnesses
                under_way.append(effect)
            elif isinstance(effect, Doubt):
                assert effect.host in detector.dead
            elif isinstance(effect, Liveness):
                assert told[effect.host] is not effect.alive
                told[effect.host] = effect.alive
            else:
                deaths += not effect.known
                assert effect.host in detector.dead and effect.known is (effect.host in before)
        assert {probe.host for probe in under_way} == detector.suspects
        assert detector.dead == {name for name, alive in told.items() if not alive} and "a" not in detector.dead
        if kind == "hear" and host != "b":
            assert host not in detector.dead
    assert deaths
