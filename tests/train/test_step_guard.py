"""A step is not completed that a node's death would have repeated; and nothing waits for longer than it may."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from gemini_hpc.client.step_guard import LEAVES_S, SUSPECT_S, StepGuard
from gemini_hpc.wire import control_page


class Scene:
    """A brake with a clock of its own; `happens` runs at each look."""

    def __init__(self, hold_s: float) -> None:
        self.fd = os.memfd_create("page")
        os.ftruncate(self.fd, control_page.PAGE_BYTES)
        self.page = control_page.ControlPage(self.fd, writable=True)
        self.page.set_state(control_page.STATE_PROTECTED)
        self.page.set_sealed(3, 6)
        self.now, self.lost = 100.0, False
        self.said: list[str] = []
        self.happens: Callable[[], None] = lambda: None
        self.brake = StepGuard(
            lambda: self.page,
            lambda: self.lost,
            hold_s,
            self.said.append,
            3,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.happens()

    def held(self, version: int = 7) -> float:
        began = self.now
        self.brake.wait_for_seal((3, version))
        return self.now - began

    def at(self, when: float, action: Callable[[], None]) -> None:
        self.happens = lambda: action() if self.now >= when else None

    def missing(self, *, dead: int = 0) -> None:
        self.page.set_state(control_page.STATE_DEGRADED)
        self.page.set_dead_nodes(dead)

    def well(self) -> None:
        self.page.set_state(control_page.STATE_PROTECTED)
        self.page.set_dead_nodes(0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(15.0)
    yield made
    os.close(made.fd)


def test_all_nodes_are_there(scene: Scene) -> None:
    assert not scene.held()


def test_what_must_be_sealed_is(scene: Scene) -> None:
    scene.missing(dead=1)
    assert not scene.held(6) and not scene.said


def test_a_dead_node_holds_until_slurm_ends_it(scene: Scene) -> None:
    scene.missing(dead=1)
    assert scene.held() == pytest.approx(15, abs=0.1)
    assert scene.said == [
        "1 of the job's nodes is dead, and version 7 is not sealed: waiting up to 15 s for Slurm before another step"
    ]
    assert not scene.held(8), "once is enough: the training goes on"


@pytest.mark.parametrize("state", [control_page.STATE_FROZEN, control_page.STATE_DEGRADED])
def test_a_silent_node_is_given_the_time_to_be_found_dead(scene: Scene, state: int) -> None:
    scene.page.set_state(state)
    scene.at(scene.now + 2.0, lambda: scene.page.set_dead_nodes(1))
    assert scene.held() == pytest.approx(17, abs=0.1)


def test_a_silent_node_that_is_not_found_dead(scene: Scene) -> None:
    scene.missing()
    assert scene.held() == pytest.approx(SUSPECT_S, abs=0.1) and not scene.said
    assert not scene.held(8)


def test_an_agent_that_comes_back_ends_it_and_the_next_death_counts_anew(scene: Scene) -> None:
    scene.missing()
    scene.at(scene.now + 1.0, scene.well)
    assert scene.held() == pytest.approx(1, abs=0.1)
    scene.happens = lambda: None
    assert not scene.held(8)
    scene.missing()
    assert scene.held(9) == pytest.approx(SUSPECT_S, abs=0.1)


def test_a_seal_ends_it(scene: Scene) -> None:
    scene.missing(dead=1)
    scene.at(scene.now + 0.5, lambda: scene.page.set_sealed(3, 7))
    assert scene.held() == pytest.approx(0.5, abs=0.1)


def test_without_an_agent_nobody_knows(scene: Scene) -> None:
    scene.missing(dead=1)
    scene.at(scene.now + 0.5, lambda: setattr(scene, "lost", True))
    assert scene.held() == pytest.approx(0.5, abs=0.1)


def test_no_hold_is_wanted() -> None:
    scene = Scene(0.0)
    scene.missing(dead=1)
    assert not scene.held() and not scene.said
    os.close(scene.fd)


def stood_by(scene: Scene) -> float:
    began = scene.now
    if scene.brake.is_leaving():
        scene.brake.stand_by()
    return scene.now - began


def test_a_node_that_is_left_is_waited_for(scene: Scene) -> None:
    assert not stood_by(scene)
    scene.page.set_held(2)
    assert not stood_by(scene), "ranks of the attempt before"
    scene.page.set_held(3)
    scene.at(103.0, lambda: scene.page.set_held(0))
    assert stood_by(scene) == pytest.approx(3, abs=0.1) and not stood_by(scene)


def test_agents_that_do_not_leave_it_are_waited_for_once(scene: Scene) -> None:
    scene.page.set_held(3)
    assert stood_by(scene) == pytest.approx(LEAVES_S, abs=0.1) and not stood_by(scene)
    scene.page.set_held(0)
    assert not stood_by(scene)
    scene.page.set_held(3)
    assert stood_by(scene) == pytest.approx(LEAVES_S, abs=0.1), "another time"


def test_an_agent_that_has_gone_on_does_not_let_its_ranks_go(scene: Scene) -> None:
    scene.page.set_held(3)
    scene.at(101.0, lambda: setattr(scene, "lost", True))
    assert stood_by(scene) == pytest.approx(LEAVES_S, abs=0.1)
