"""Production recovery rounds under every kind of death and loss: see `cluster`. A failure names its seeds; one is
told by `Cluster(size, seed, ...)`, `run(faulty)` and `story`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gemini_hpc.agent.peers import recovery_round
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Effect, Resume
from gemini_hpc.agent.recovery_member import RecoveryMember
from gemini_hpc.wire import peer
from gemini_hpc.wire.stored import Rejection

from .cluster import Cluster, SimulatedMember, Wrong, campaign

# size of the job, seeds, events with faults
_TREES = [
    (1, 200, 25),
    (2, 300, 40),
    pytest.param(3, 1000, 25, marks=pytest.mark.slow),
    pytest.param(3, 600, 80, marks=pytest.mark.slow),
    pytest.param(4, 600, 80, marks=pytest.mark.slow),
    pytest.param(
        *(7, 600, 120),
        marks=[pytest.mark.slow, pytest.mark.witness("a recovery round ends, whoever dies and whatever is lost")],
    ),
    pytest.param(15, 120, 250, marks=pytest.mark.slow),
]
_FULL = [
    (2, 200, 40),
    pytest.param(3, 400, 60, marks=pytest.mark.slow),
    pytest.param(7, 250, 120, marks=pytest.mark.slow),
]
_REJECTS = [
    (1, 100, 40),
    pytest.param(3, 600, 80, marks=pytest.mark.slow),
    pytest.param(7, 200, 160, marks=pytest.mark.slow),
]
_LONG = [(3, 60_000, 60), (4, 40_000, 80), (7, 40_000, 120), (15, 8_000, 250), (31, 2_000, 400)]


@pytest.fixture
def never_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plan that is not acknowledged is never given up: what mends everything in the end is to hide nothing."""
    monkeypatch.setattr(recovery_round, "NEXT_ROUND_S", math.inf)
    monkeypatch.setattr(recovery_round, "NEXT_ROUND_MOST_S", math.inf)
    yield


@pytest.mark.parametrize(("size", "seeds", "faulty"), _TREES)
def test_a_round_ends_whoever_dies_and_whatever_is_lost(size: int, seeds: int, faulty: int, never_anew: None) -> None:
    assert not campaign(size, range(seeds), faulty)


@pytest.mark.parametrize(("size", "seeds", "faulty"), _FULL)
def test_a_full_disk_does_not_keep_a_round_from_its_end(size: int, seeds: int, faulty: int) -> None:
    assert not campaign(size, range(seeds), faulty, full=True)


@pytest.mark.parametrize(("size", "seeds", "faulty"), _REJECTS)
def test_what_was_rejected_is_never_chosen_again(size: int, seeds: int, faulty: int) -> None:
    """Whoever dies: an agent that has answered a rank has it on its disk, and every plan knows it."""
    assert not campaign(size, range(seeds), faulty, rejects=True)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("size", "seeds", "faulty"), _LONG)
def test_the_long_campaign(size: int, seeds: int, faulty: int, never_anew: None) -> None:
    assert not campaign(size, range(1_000_000, 1_000_000 + seeds), faulty)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("size", "seeds", "faulty"), _LONG[:4])
def test_the_long_campaign_with_full_disks(size: int, seeds: int, faulty: int) -> None:
    assert not campaign(size, range(2_000_000, 2_000_000 + seeds // 4), faulty, full=True)


# ---- what the campaign finds --------------------------------------------------------------------------------------


class ResumesLive(RecoveryRounds):
    """A successor that takes part in a round whose end its predecessor had not heard of, as up to November 2026."""

    def _resume(self, state: Resume) -> Iterator[Effect]:
        return super()._resume(replace(state, live=state.plan is not None))


class AcknowledgesOnce(RecoveryRounds):
    """Who is live does not acknowledge the plan again."""

    def _acknowledge(self) -> Iterator[Effect]:
        return iter(()) if self.stage == "live" else super()._acknowledge()


class AsBefore(ResumesLive, AcknowledgesOnce):
    """Both."""


class AsksOnce(RecoveryRounds):
    """What is lost is lost: nothing is said again but on a new link."""

    def _tick(self, now: float, linked: Set[str]) -> Iterator[Effect]:
        return iter(())


class TakesAnyPlan(RecoveryRounds):
    """Also one that counts on the predecessor's copies."""

    def _is_counted(self, plan: peer.PlanDown) -> bool:
        return True


class WritesNoPlan(SimulatedMember):
    """It is acknowledged all the same."""

    def _write_changes(self, **changes: Any) -> None:
        if changes.get("live", True):
            super()._write_changes(**changes)


_BROKEN = [
    (AsBefore, SimulatedMember, False, {"R4", "stuck"}),
    (ResumesLive, SimulatedMember, False, {"R4"}),
    pytest.param(AcknowledgesOnce, SimulatedMember, True, {"stuck"}, marks=pytest.mark.slow),
    pytest.param(AsksOnce, SimulatedMember, False, {"stuck"}, marks=pytest.mark.slow),
    (TakesAnyPlan, SimulatedMember, False, {"counted"}),
    (RecoveryRounds, WritesNoPlan, False, {"R4"}),
]


@pytest.mark.parametrize(("broken", "member", "full", "harm"), _BROKEN)
def test_what_is_broken_on_purpose_is_found(
    broken: type[RecoveryRounds], member: type[RecoveryMember], full: bool, harm: set[str], never_anew: None
) -> None:
    found: set[str] = set()
    for size, seeds, faulty in ((3, 600, 25), (4, 1500, 80), (7, 600, 120)):
        left = frozenset(harm - found)
        found |= campaign(size, range(seeds), faulty, until=left, rounds=broken, member=member, full=full).keys()
        if found >= harm:
            return
    pytest.fail(f"found {found}, wanted {harm}")


def test_a_seed_repeats_a_run_to_the_letter() -> None:
    stories = []
    for _ in range(2):
        cluster = Cluster(7, 4)
        cluster.run(120)
        stories.append(cluster.story)
    assert stories[0] == stories[1] and len(stories[0]) > 120


# ---- what ends a wait, or tells of it -----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["n1", "n2", "n3"])
def test_whoever_waits_for_one_that_does_not_come_says_for_whom(missing: str) -> None:
    """Within seconds, by name, in the words of the agent that misses it; and no longer when it has come."""
    cluster = Cluster(4, 1)
    cluster.crash(missing)
    cluster.quiet(3 * recovery_round.TELL_S, without=missing)
    troubles = {h: t for h, (_, _, _, t) in cluster.picture().items()}
    parent = {"n1": "n0", "n2": "n0", "n3": "n1"}[missing]
    assert missing in troubles[parent] and troubles["n0"] and cluster.events["unprotected"] >= 1
    cluster.run(0)
    assert not any(t for _, _, _, t in cluster.picture().values())


def test_a_plan_that_an_agent_of_an_earlier_version_never_acknowledges_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It resumes as live and has no ack to repeat, so its parent would wait for ever."""

    for seed in range(2000):
        with monkeypatch.context() as patch:
            patch.setattr(recovery_round, "NEXT_ROUND_S", math.inf)
            old = Cluster(3, seed, rounds=AsBefore)
            try:
                old.run(25)
                continue
            except Wrong as exc:
                if not str(exc).startswith("stuck"):
                    continue
        again = Cluster(3, seed, rounds=AsBefore)
        again.run(25)
        assert again.events["round_lost"] > old.events.get("round_lost", 0)
        return
    pytest.fail("no seed leaves a parent waiting")


class ForgetsRejections(SimulatedMember):
    def perform(self, incarnation: Incarnation, effect: Effect) -> None:
        forgetful: Any = SimpleNamespace(learn=self._learn)
        self._coordinator._rejections = forgetful
        super().perform(incarnation, effect)

    def _learn(self, found: Iterable[Rejection]) -> tuple[Rejection, ...]:
        return tuple(found) if self.node.cluster.rng.random() < 0.5 else ()


def test_a_forgotten_rejection_is_found() -> None:
    found = campaign(3, range(300), 80, member=ForgetsRejections, rejects=True, until=frozenset({"forgotten"}))
    assert "forgotten" in found or "rejected" in found
