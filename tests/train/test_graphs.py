"""Trainings whose optimizer steps are in CUDA graphs. The graphs are the tests' own: see fake_graph.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from waiting import until

import gemini_hpc as gemini
from gemini_hpc.train.device import graphs, host_copy
from gemini_hpc.train.device.host_copy import HostCopies

from . import fake_graph
from .fake_agent import PROTECTED, FakeJob
from .fake_gpu import LiveDevice
from .fake_graph import capture
from .graph_program import Graphed
from .launch import Run
from .test_checkpointer import wait_armed, wait_sealed

MakeJob = Callable[[int, int], FakeJob]
Told = pytest.CaptureFixture[str]
UNSEEN = "weights change, and no optimizer has made a step since the last step()"
UNSTEPPED = "without an optimizer step since the last one"


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a class of graphs that nobody watches yet."""
    fake_graph.install(monkeypatch.setattr)


# ---- killed and resumed --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "made"), [("whole", "before"), ("whole", "after"), ("whole", "mid"), ("two", "before")]
)
def test_killed_and_resumed_bit_for_bit(make_job: MakeJob, parts: str, made: str) -> None:
    """made: when the Checkpointer is, as to the capture."""
    options: dict[str, Any] = {"program": "tests.train.graph_program", "graphs": parts, "made": made, "steps": 16}
    job = make_job(1, 1)
    whole = Run(None, 1, options).wait()[0]  # type: ignore[arg-type]
    killed = Run(job, 1, {**options, "die_at": 9, "kwargs": {"audit": 1}})
    killed.wait(codes=(1,))
    chosen = job.requeue()
    assert chosen is not None and chosen.version == 9, killed.stderr
    run = Run(job, 1, {**options, "seed": 4, "kwargs": {"audit": 1}})
    resumed = run.wait()[0]
    assert resumed["start"] == 9 and resumed["digest"] == whole["digest"]
    assert resumed["losses"] == {step: loss for step, loss in whole["losses"].items() if int(step) > 9}
    report = resumed["report"]
    assert report["state"] in PROTECTED and not report["captured"]["eager"] and not report["versions"]["void"]
    assert UNSEEN not in run.stderr[0] and UNSTEPPED not in run.stderr[0]


def iterate(ckpt: gemini.Checkpointer, training: Graphed, *steps: int) -> list[str]:
    """Return the losses."""
    losses = []
    for step in steps:
        losses.append(training.iterate(step))
        ckpt.step()
        wait_armed(ckpt)
    return losses


@pytest.mark.parametrize("steps", [1, 2])
def test_several_steps_in_one_graph_are_one_version(job: FakeJob, steps: int) -> None:
    job.stop_after(4)
    losses: list[list[str]] = []
    for seed in (1, 2):
        training = Graphed(seed)
        training.eager()
        with gemini.Checkpointer(training.model, training.optimizer, seal_timeout_s=0.3) as ckpt:
            training.capture(lambda made=training: [made.whole() for _ in range(steps)])
            start = ckpt.resume()
            losses.append(iterate(ckpt, training, *range(start + 1, 8)))
        if seed == 1:
            wait_sealed(job, 4)
            assert job.requeue() is not None
    assert start == 4 and losses[1] == losses[0][4:]


def test_a_scaler_in_the_graph_that_skips_a_step(job: FakeJob, capfd: Told) -> None:
    """Nothing changes but the scale; it is a version all the same."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler, batch = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3), torch.ones(4, 3)

    def whole() -> None:
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    whole()
    with gemini.Checkpointer(model, optimizer, scaler=scaler) as ckpt:
        optimizer.zero_grad()
        graph: Any = torch.cuda.CUDAGraph()
        with capture(graph):
            whole()
        ckpt.resume()
        for step in range(1, 7):
            batch.fill_(float("inf") if step == 3 else 1.0)
            before = scaler.get_scale()
            graph.replay()
            assert (scaler.get_scale() < before) == (step == 3)
            ckpt.step()
            wait_armed(ckpt)
            if step > 1:
                wait_sealed(job, step)
    assert UNSEEN not in (said := capfd.readouterr().err) and UNSTEPPED not in said


def test_an_average_of_weights_in_the_graph(job: FakeJob) -> None:
    """No gradient reaches it and nothing counts its changes, as of frozen weights. It is never an old one."""
    found: list[list[str]] = []
    for seed in (1, 2):
        training = Graphed(seed)
        training.eager()
        average = torch.nn.Linear(5, 8).requires_grad_(False)
        training.model.add_module("average", average)
        student = training.model[0]
        training.backward = lambda t=training, s=student, a=average: follow(t, s, a)  # type: ignore[method-assign]
        with gemini.Checkpointer(training.model, training.optimizer, seal_timeout_s=0.3) as ckpt:
            training.capture(training.whole)
            start = ckpt.resume()
            found.append([])
            for step in range(start + 1, 13):
                iterate(ckpt, training, step)
                found[-1].append(average.weight.sum().item().hex())
                if seed == 1 and 3 < step < 8:
                    wait_sealed(job, step)
                if seed == 1 and step == 7:
                    job.stop_after(7)
        if seed == 1:
            assert job.requeue() is not None
    assert start == 7 and found[1] == found[0][7:]


def follow(training: Graphed, student: torch.nn.Linear, average: torch.nn.Linear) -> None:
    """Do a backward pass, and follow the student."""
    loss = student(training.batch).square().mean()
    loss.backward()
    training.loss = loss.detach()
    with torch.no_grad():
        average.weight.lerp_(student.weight, 0.1)


# ---- captures and replays ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["replayed", "captured"])
def test_a_copy_is_waited_for(job: FakeJob, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A replay writes what is copied; a capture counts as a write. What was copied is what was there."""
    order, held = list[str](), threading.Event()
    held.set()

    class Slow(HostCopies):
        def bring(self, ready: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
            assert held.wait(20)
            took_s = super().bring(ready, pairs)
            order.append("copied")
            return took_s

    device = LiveDevice(3, 1)
    monkeypatch.setattr(host_copy, "create_copies", lambda _: Slow(device, lambda tensor: True))
    training = Graphed(1)
    training.eager()
    with gemini.Checkpointer(training.model, training.optimizer, audit=1) as ckpt:
        training.capture(training.whole)
        graph = training.replays[0]
        ckpt.resume()
        iterate(ckpt, training, 1, 2)
        wait_sealed(job, 2)
        held.clear()
        iterate(ckpt, training, 3)
        order.clear()
        graph.tell = order.append

        def act() -> None:
            if what == "captured":
                training.optimizer.zero_grad()
                with capture(graph):
                    training.whole()
            graph.replay()

        thread = threading.Thread(target=act)
        thread.start()
        copy = ckpt._gate.job
        assert copy is not None and copy.version == 3
        until(lambda: copy.wanted or order, 10, what="somebody who waits")
        held.set()
        thread.join(20)
        assert order[:2] == ["copied", what]
        ckpt.step()
        wait_sealed(job, 4)
        report = ckpt.report()
        assert not report["versions"]["void"] and not report["captured"]["eager"]


def test_a_capture_is_no_step_and_nothing_of_ours_is_in_the_graph(job: FakeJob, capfd: Told) -> None:
    alone, training = Graphed(1), Graphed(1)
    alone.eager()
    alone.capture(alone.whole)
    training.eager()
    with gemini.Checkpointer(training.model, training.optimizer) as ckpt:
        ckpt.resume()
        for _ in range(2):
            training.eager()
            ckpt.step()
            wait_armed(ckpt)
        wait_sealed(job, 2)
        training.capture(training.whole)
        assert len(training.replays[0].calls) == len(alone.replays[0].calls)
        ckpt.step()  # version 3: nothing has been computed
        iterate(ckpt, training, 4)
        wait_sealed(job, 4)
    assert UNSTEPPED in capfd.readouterr().err and 3 not in {seal.version for seal in job.seals}


def test_a_graph_without_an_optimizer_is_no_step(job: FakeJob, capfd: Told) -> None:
    """Gradients that two replays accumulate, and an optimizer outside."""
    training = Graphed(1)
    training.eager()
    with gemini.Checkpointer(training.model, training.optimizer) as ckpt:
        training.capture(training.backward)
        ckpt.resume()
        for step in range(1, 9):
            training.iterate(step)
            if step % 2 == 0:
                training.optimizer.step()
            ckpt.step()
            if step == 2:
                wait_armed(ckpt)
        wait_sealed(job, 8)
    assert not any(seal.version % 2 for seal in job.seals)
    assert capfd.readouterr().err.count(UNSTEPPED) == 1


def test_a_graph_is_what_was_captured_into_it_last(job: FakeJob) -> None:
    training, other = Graphed(1), Graphed(2)
    training.eager()
    other.eager()
    with gemini.Checkpointer(training.model, training.optimizer) as ckpt:
        ckpt.resume()
        graph: Any = torch.cuda.CUDAGraph()
        for part, step in ((training.whole, True), (training.backward, False), (other.whole, False)):
            training.optimizer.zero_grad()
            with capture(graph):
                part()
            graph.replay()
            assert ckpt._gate.stepped is step
            ckpt.step()
    graph.replay()  # nobody listens any more


# ---- captured before anybody watched -------------------------------------------------------------------


def test_graphs_that_cannot_be_told_apart_are_told_and_not_saved(job: FakeJob, capfd: Told) -> None:
    training = Graphed(1)
    training.eager()
    training.capture(training.backward, training.optimizer.step)
    with gemini.Checkpointer(training.model, training.optimizer) as ckpt:
        ckpt.resume()
        for step in range(1, 12):
            training.iterate(step)
            ckpt.step()
        report = ckpt.report()
        assert report["state"] == "unprotected" and UNSEEN in " ".join(report["findings"])
    said = capfd.readouterr().err
    (line,) = [text for text in said.splitlines() if UNSEEN in text]
    assert "step() at version 2" in line and "CUDA graphs were replayed" in line
    assert "Make the Checkpointer before the graphs are captured" in line
    assert UNSTEPPED not in said and job.sealed is None


def test_one_graph_alone_is_known_by_what_it_does(job: FakeJob, capfd: Told) -> None:
    """From the second iteration on. What it leaves alone it has not written."""
    training, other = Graphed(1), Graphed(2)
    training.eager()
    other.eager()
    training.capture(training.whole)
    other.capture(other.whole)
    with gemini.Checkpointer(training.model, training.optimizer) as ckpt:
        ckpt.resume()
        other.replays[0].replay()
        ckpt.step()
        other.replays[0].replay()
        ckpt.step()
        assert graphs.find_optimizers(other.replays[0]) is None
        iterate(ckpt, training, 3)
        assert graphs.find_optimizers(training.replays[0]) == [training.optimizer]
        iterate(ckpt, training, 4, 5)
        wait_sealed(job, 5)
    assert {seal.version for seal in job.seals} <= {3, 4, 5} and UNSEEN not in capfd.readouterr().err
