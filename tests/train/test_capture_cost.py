"""The time of step() itself counts for the ceiling: large small state makes versions rarer, and is named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.core import pace
from gemini_hpc.core.spans import Op, Trace
from gemini_hpc.train.schedule import capture_cost
from gemini_hpc.train.schedule.capture_cost import CaptureCost, find_costliest
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.interval_controller import IntervalController
from gemini_hpc.train.schedule.link_model import LinkMeter
from gemini_hpc.train.schedule.overhead_monitor import subtract_capture
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.planner import Planner
from gemini_hpc.train.schedule.traffic import Traffic

from .fake_agent import FakeJob
from .launch import Run
from .rank_session import rank_session
from .stopped_clock import Time
from .test_checkpointer import wait_armed
from .worker import Replay

MakeJob = Callable[[int, int], FakeJob]
EVERY = pace.PACE_EVERY


def capture(cost: Any, time: Time, seconds: float, *, device: bool | None = None) -> None:
    """device: whether there is one, and it has done all that it had by now."""
    began = time.now
    time.now += seconds
    cost.record_capture(began, None if device is None else SimpleNamespace(query=lambda: device))


# ---- what a capture costs ------------------------------------------------------------------------------


def test_the_shortest_of_the_last_captures_counts(time: Time) -> None:
    cost = CaptureCost(4)
    for seconds in (0.3, 0.2):
        capture(cost, time, seconds)
        assert cost.seconds == 0.0, "one alone may have met anything"
    capture(cost, time, 0.9)
    assert cost.seconds == pytest.approx(0.2) and cost.usual_s == pytest.approx(0.3)
    for _ in range(3):
        capture(cost, time, 0.5)
    assert cost.seconds == pytest.approx(0.5), "it has grown"


def test_a_short_one_is_a_part_of_the_iteration(time: Time) -> None:
    cost = CaptureCost(4)
    for _ in range(5):
        capture(cost, time, 0.5 * capture_cost.LEAST_S)
        cost.begin_iteration()
    assert cost.seconds == cost.read_past_s(0) == 0.0


def test_a_device_that_is_behind_loses_nothing(time: Time) -> None:
    cost = CaptureCost(4)
    for _ in range(5):
        capture(cost, time, 0.2, device=False)
    assert cost.seconds == 0.0
    for _ in range(5):
        capture(cost, time, 0.2, device=True)
    assert cost.seconds == pytest.approx(0.2)


def test_each_iteration_has_its_own(time: Time) -> None:
    cost = CaptureCost(3)
    for seconds in (0.1, 0.2, 0.3):
        capture(cost, time, seconds)
        cost.begin_iteration()
    cost.begin_iteration()  # a version that is not saved
    assert [cost.read_past_s(ago) for ago in range(4)] == [0.0, pytest.approx(0.3), pytest.approx(0.2), 0.0]


def test_an_iteration_without_its_capture() -> None:
    trace = Trace(5.0, 1.0, 0.9, (Op(1, 8, 0.1, 0.35), Op(2, 8, 0.6, 0.7)))
    found = subtract_capture(trace, 0.25)
    assert (found.length_s, found.gate_s, found.started_s) == (0.75, pytest.approx(0.65), 5.0)
    assert [(op.start_s, op.end_s) for op in found.ops] == [
        (0.0, pytest.approx(0.1)),
        (pytest.approx(0.35), pytest.approx(0.45)),
    ]
    assert subtract_capture(trace, 0.0) == trace


def test_an_iteration_without_what_its_first_collective_has_waited_for() -> None:
    """Another rank's capture. What was launched meanwhile was not late; what came after that was."""
    ops = (Op(1, 8, 0.1, 0.5), Op(1, 8, 0.2, 0.52), Op(1, 8, 0.45, 0.55), Op(2, 8, 0.7, 0.8))
    found = subtract_capture(Trace(5.0, 1.0, 0.9, ops), 0.05, 0.25)
    assert (found.length_s, found.gate_s) == (pytest.approx(0.7), pytest.approx(0.6))
    assert [op.start_s for op in found.ops] == pytest.approx([0.05, 0.15, 0.2, 0.4])
    assert [op.end_s for op in found.ops] == pytest.approx([0.2, 0.22, 0.25, 0.5])
    short = subtract_capture(Trace(5.0, 1.0, 0.9, ops[3:]), 0.0, 0.25)
    assert short.length_s == pytest.approx(0.9), "it has not waited longer than it took"
    assert subtract_capture(Trace(5.0, 1.0, 0.9, ()), 0.0, 0.25).length_s == 1.0


class Fails:
    def state_dict(self) -> Any:
        raise RuntimeError("not now")

    def load_state_dict(self, state: Any) -> None: ...


def test_what_takes_most_of_it_is_named() -> None:
    large = SimpleNamespace(state_dict=lambda: {"average": torch.zeros(1 << 22)}, load_state_dict=id)
    stateful: Any = {"scheduler.0": large, "extra.replay": Replay(20_000), "extra.fails": Fails()}
    assert find_costliest(stateful, 1e-3) == "extra.replay", "large tensors are captured beside the training"
    assert find_costliest(stateful, 1e3) == find_costliest({}, 1e-3) == ""


# ---- how often versions are saved where no traffic is planned ------------------------------------------


class Paced:
    """A controller of a training without copies, iteration by iteration."""

    def __init__(self, time: Time, **traffic: Any) -> None:
        self.time, self.said, self.version = time, list[str](), 0
        self.controller = IntervalController(
            rank_session(self.said.append),
            Planner(Traffic(**traffic), 0, (), 0, LinkMeter(), None),
            None,
            CollectiveMonitor(lambda ranks: True),
            Pacer(1 << 20, 4),
            SimpleNamespace(send_summary=lambda state, now: state()),  # type: ignore[arg-type]
            find_costliest=lambda seconds: "extra.replay",
        )

    def run(self, iterations: int, length_s: float, capture_s: float) -> list[int]:
        """The versions that are saved."""
        saved = []
        for _ in range(iterations):
            self.time.now += length_s
            self.version += 1
            self.controller.step(self.version, False)
            if self.controller.saves(self.version):
                saved.append(self.version)
                capture(self.controller, self.time, capture_s)
        assert not self.controller.problem
        return saved


def test_a_single_rank_saves_as_rarely_as_the_ceiling_asks_for(time: Time) -> None:
    paced = Paced(time)
    assert paced.run(EVERY - 1, 0.04, 0.27) == [1, 2, 3, 4, 5], "then the cost of a capture is known"
    assert len(paced.run(2000, 0.04, 0.27)) == pytest.approx(2000 / 675, abs=1)
    assert paced.controller.repeats == 675
    (line,) = paced.said
    assert "step() takes 0.27 s to capture the state, mostly extra.replay, in iterations of 0.04 s" in line
    assert line.endswith("saving one version in 675; a failure repeats at most 675 steps")


def test_and_as_often_as_before_when_it_has_become_small(time: Time) -> None:
    paced = Paced(time, overhead=0.5)
    paced.run(40, 0.04, 0.27)
    assert paced.controller.repeats > 10
    paced.run(200, 0.04, 0.0)
    assert paced.controller.repeats == 1


def test_state_that_grows_is_followed_and_told_now_and_then(time: Time) -> None:
    paced, repeats = Paced(time), list[int]()
    for tenth in range(1, 11):
        paced.run(2000, 0.04, 0.027 * tenth)
        repeats.append(paced.controller.repeats)
    assert repeats == sorted(repeats) and repeats[0] == 68 and 675 / 1.25 < repeats[-1] <= 676
    assert len(paced.said) == 2


def test_cheap_captures_change_nothing(time: Time) -> None:
    paced = Paced(time)
    assert len(paced.run(200, 0.001, 0.0015)) == 200 and not paced.said


def test_a_frequency_that_the_user_forces_stays(time: Time) -> None:
    assert Paced(time, every=5).run(12, 0.04, 0.27) == [5, 10]


# ---- trainings -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_of_one_rank_with_a_large_replay_buffer(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    model, replay = nn.Linear(4, 4), Replay(10_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = gemini.Checkpointer(model, optimizer, extra={"replay": replay}, traffic=gemini.Traffic())
    ckpt.resume()
    for step in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ckpt.step()
        if not step:
            wait_armed(ckpt)
    report = ckpt.report()
    assert report["traffic"]["j"] > 100, "a capture takes many iterations"
    assert report["versions"]["saved"] <= 34
    assert "mostly extra.replay" in capsys.readouterr().err
    ckpt.close()


@pytest.mark.slow
def test_the_rank_that_has_it_makes_all_save_rarely_and_says_so(make_job: MakeJob) -> None:
    """Of two ranks the second has a large buffer: told is what it costs, and by whom."""
    options: dict[str, Any] = {"kind": "ddp", "steps": 90, "replay": [10, 10_000], "norm": "layer", "armed": True}
    options["kwargs"] = {"overhead": gemini.Traffic().overhead}
    training = Run(make_job(2, 2), 2, options)
    reports = [result["report"] for result in training.wait()]
    assert [report["state"] for report in reports] == ["protected"] * 2
    assert len({report["traffic"]["j"] for report in reports}) == 1
    assert reports[0]["traffic"]["j"] > 50 and reports[1]["traffic"]["capture_s"] > 0
    said = "".join(training.stderr)
    assert said.count("rank 1: step() takes") >= 1 and "mostly extra.replay" in said
    assert "rank 0: step() takes" not in said
