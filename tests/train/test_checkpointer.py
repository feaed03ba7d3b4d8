"""One process, one agent: state of many shapes comes back; what cannot work is said at once."""

from __future__ import annotations

import copy
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gemini_hpc as gemini
from gemini_hpc.core import wait_budget
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format.shard_manifest import ShardManifest, place_boxes
from gemini_hpc.train.state import ownership
from gemini_hpc.train.state.capture import Capture, CaptureJob
from gemini_hpc.train.state.tree import StateTree

from .fake_agent import PROTECTED, FakeJob

MakeJob = Callable[[int, int], FakeJob]


class Uneven(nn.Module):
    """A parameter without a gradient, a scalar, a bfloat16, a channels-last, a frozen one; two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.late = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.low = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, use_late: bool) -> torch.Tensor:
        self.seen += 1
        self.hidden += 0.5
        h = self.conv(x).mean((2, 3)) * self.scale + self.low.float().sum() * 0.01 + self.frozen.sum()
        return self.late(h) if use_late else h


def wait_sealed(job: FakeJob, version: int) -> None:
    for _ in range(20_000):
        if job.sealed is not None and job.sealed.version >= version:
            return
        torch.rand(1)  # yields the GIL as training does
        time.sleep(0.001)
    raise AssertionError(f"version {version} is not sealed; sealed: {job.sealed}")


def assert_comes_back(job: FakeJob, train: Callable[[int, int], tuple[int, list[str], dict[str, Any]]]) -> None:
    """Fail unless a training, by seed and last step, goes on from version 5 with the losses that it had."""
    job.stop_after(5)
    _, losses, report = train(1, 9)
    assert report["state"] in PROTECTED, report
    wait_sealed(job, 5)
    assert (chosen := job.requeue()) is not None and chosen.version == 5
    assert train(2, 9)[:2] == (5, losses[5:])


def wait_armed(ckpt: gemini.Checkpointer) -> None:
    """Until memory is there, or will not be: not every version of so short a run is saved."""
    deadline = time.monotonic() + 5
    while ckpt._session.protected and not ckpt._session.verdict.vote and time.monotonic() < deadline:
        time.sleep(0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "capturable-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def run(job: FakeJob, make: Callable[[Any], torch.optim.Optimizer], seed: int, stop: int, late_from: int) -> Any:
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed)
    model = Uneven()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make([{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}])
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    ]
    ema = copy.deepcopy(model)
    own = torch.Generator().manual_seed(seed)

    class Position:
        at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "generator": own}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]
            state["generator"].restore(own)

    position = Position()
    losses = []
    extra, traffic = (
        {"ema": ema, "position": position},
        gemini.Traffic(every=1, overhead=0.99),
    )  # each version, however short
    with gemini.Checkpointer(model, optimizer, schedulers, extra=extra, audit=1, traffic=traffic) as ckpt:
        start = ckpt.resume()
        for step in range(start + 1, stop + 1):
            x = torch.rand(5, 3, 6, 6, generator=own) + torch.rand(()) + random.random() + np.random.rand()
            loss = (model(x, step >= late_from) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedulers[0].step()
            schedulers[1].step(loss.item())
            with torch.no_grad():
                for a, b in zip(ema.parameters(), model.parameters(), strict=True):
                    a.lerp_(b, 0.1)
            position.at = step
            losses.append(loss.item().hex())
            ckpt.step()
            if step == 1 or step == start + 1:
                wait_armed(ckpt)
        report = ckpt.report()
    state = [*model.parameters(), *model.buffers(), *ema.parameters(), *ema.buffers()]
    state += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in state]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return start, losses, flat, repr((groups, [s.state_dict() for s in schedulers], position.at)), report


def wait_a_little() -> None:
    time.sleep(0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_comes_back(job: FakeJob, name: str) -> None:
    make = OPTIMIZERS[name]
    job.stop_after(4)
    _, losses, flat, plain, report = run(job, make, seed=1, stop=8, late_from=3)
    assert report["captured"]["eager"] == {}
    wait_sealed(job, 4)
    chosen = job.requeue()
    assert chosen is not None and chosen.version == 4
    start, losses2, flat2, plain2, _ = run(job, make, seed=2, stop=8, late_from=3)
    assert start == 4
    assert losses2 == losses[4:]
    assert plain2 == plain
    assert flat2 == flat


def test_state_that_appears_late_is_captured(job: FakeJob) -> None:
    """`late` gets optimizer state only in step 6, long after the plan was made; resumed before and after."""
    make = OPTIMIZERS["adamw"]
    for stop_at in (4, 7):
        job.stop_after(stop_at)
        _, losses, flat, plain, _ = run(job, make, seed=1, stop=9, late_from=6)
        assert (chosen := job.requeue()) is not None and chosen.version == stop_at
        start, losses2, flat2, plain2, _ = run(job, make, seed=2, stop=9, late_from=6)
        assert (start, losses2, plain2, flat2) == (stop_at, losses[stop_at:], plain, flat)
        job.chosen, job.sealed, job.chosen_world = None, None, 0
        job.nodes[0].forget()


class Growing:
    data = b""

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data = state["data"]


def test_growing_small_state(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    growing = Growing()
    with gemini.Checkpointer(model, optimizer, extra={"g": growing}) as ckpt:
        ckpt.resume()
        for step in range(1, 9):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            growing.data = b"x" * (200_000 * step)
            ckpt.step()
            wait_a_little()
    wait_sealed(job, 8)
    assert job.requeue() is not None
    growing.data = b""
    other = gemini.Checkpointer(model, optimizer, extra={"g": growing})
    assert other.resume() == 8
    assert growing.data == b"x" * 1_600_000
    other.close()


def test_outgrown_slots_are_handed_back_until_something_newer_is_sealed(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    growing = Growing()
    with gemini.Checkpointer(model, optimizer, extra={"g": growing}, seal_timeout_s=0.2) as ckpt:

        def step() -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.step()
            while ckpt._session.verdict.vote == 0 or ckpt._engine.under_way:
                wait_a_little()

        while ckpt.version < 4:
            step()
        wait_sealed(job, 4)
        job.seal_until = 4
        growing.data = b"x" * 600_000
        step()
        assert ckpt._engine.running is not None
        keeper = ckpt._engine.running.replicator
        assert len(keeper.former) == 1
        job.nodes[0].die()
        for held in job.ancestors:
            for fd in held.fds:
                os.close(fd)
        job.ancestors.clear()
        job.nodes[0].start()
        for _ in range(1000):
            if job.ancestors:
                break
            wait_a_little()
        assert [held.pair.find_slot(Stamp(1, 4)) is not None for held in job.ancestors] == [True], "sealed, and kept"
        job.seal_until = 1 << 30
        while ckpt._session.client is not None and ckpt._session.client.lost:
            wait_a_little()
        step()
        wait_sealed(job, 6)
        step()
        assert not keeper.former


def test_a_refusal_whose_telling_fails_ends_protection_all_the_same(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.refuse_register, job.delay["Register"] = "no memory", 0.3
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini.Checkpointer(model, optimizer) as ckpt:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.step()
            while ckpt._session.verdict.vote == 0:
                wait_a_little()

            def broken() -> bool:
                raise RuntimeError("connection closed by peer")

            monkeypatch.setattr(ckpt._engine, "arm", broken)
        assert not ckpt._session.protected and ckpt.report()["state"] == "unprotected"


def train_until_captured(ckpt: gemini.Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer) -> CaptureJob:
    """Train until a version was captured and its copy has ended; return that version."""
    while ckpt._gate.job is None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step()
        wait_a_little()
    assert ckpt._gate.job.left.wait(10)
    return ckpt._gate.job


def test_the_end_of_protection_lets_a_training_go_that_waits_for_a_copy(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini.Checkpointer(model, optimizer) as ckpt:
        held = train_until_captured(ckpt, model, optimizer)
        held.left.clear()  # as if the copy had not begun
        ckpt._session.end_protection("the agent answers nonsense")
        assert held.left.is_set() and not ckpt._session.protected


def test_the_wait_for_a_copy_is_part_of_the_wait_for_its_seal(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bounds_s: list[float] = []
    with gemini.Checkpointer(model, optimizer) as ckpt:
        held = train_until_captured(ckpt, model, optimizer)
        assert ckpt._engine.running is not None
        controller = ckpt._engine.running.controller
        held.left.clear()  # as if the copy took 0.3 s longer
        monkeypatch.setattr(controller, "is_due", lambda version: True)
        monkeypatch.setattr(type(controller), "patience_s", 5.0)
        monkeypatch.setattr(ckpt._session.gate, "wait", lambda *bounds, **_: not bounds_s.append(bounds[3]))
        threading.Timer(0.3, held.left.set).start()
        optimizer.step()
    assert 4.0 < bounds_s[0] < 4.8, "the timer begins before the wait"


def test_a_scheme_chosen_before_the_first_step_counts(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini.Checkpointer(model, optimizer) as ckpt:
        ckpt.scheme = "none"
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step()
        assert ckpt.scheme == ckpt.report()["traffic"]["scheme"] == "none"


def test_user_mistakes_are_errors(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": [1]}, TypeError, "wanted a torch.nn.Module"),
        ({"optimizer": "adam"}, TypeError, "wanted a torch.optim.Optimizer"),
        ({"optimizer": []}, ValueError, "empty"),
        ({"scheduler": 3}, TypeError, "scheduler.0 is a int"),
        ({"loader": object()}, TypeError, "no state_dict"),
        ({"max_repeated": 0}, ValueError, "max_repeated"),
        ({"ownership": "half"}, ValueError, "ownership"),
        ({"name": ""}, ValueError, "name"),
    ]
    for wrong, kind, words in cases:
        arguments: dict[str, Any] = {"model": model, "optimizer": optimizer, **wrong}
        with pytest.raises(kind, match=words):
            gemini.Checkpointer(**arguments)


def test_going_on_without_a_seal_is_said(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is dead and nothing degraded: the version is on its way, for longer than the training may wait."""
    monkeypatch.setattr(wait_budget, "FIRST_S", 0.05)
    monkeypatch.setattr(wait_budget, "MOST_SAVED_S", 0.05)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()

    with gemini.Checkpointer(model, optimizer, traffic=gemini.Traffic(every=1, overhead=0.99)) as ckpt:
        ckpt.resume()
        version = 0
        while ckpt.report()["state"] != "protected":
            iterate()
            version += 1
            assert version < 500
            time.sleep(0.02)
        wait_sealed(job, version)
        assert not job.saw("late")
        job.delay["Landed"] = 0.4
        for _ in range(2):
            iterate()  # to be sealed in time for the next
        job.delay["Landed"] = 0.0
        wait_sealed(job, version + 1)
        assert ckpt.report()["state"] == "protected" and ckpt.report()["traffic"]["unsealed"] == 1
    assert [event.version for event in job.saw("late")] == [version + 1]
    assert capfd.readouterr().err.count(f"version {version + 1} was not sealed when the training had to go on") == 1


def test_resume_once_and_step_never_after_close(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    ckpt = gemini.Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ckpt.resume() == 0
    with pytest.raises(RuntimeError, match="already called"):
        ckpt.resume()
    ckpt.close()
    ckpt.close()
    with pytest.raises(RuntimeError, match="after close"):
        ckpt.step()


def test_report_names_what_was_not_given(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forgotten = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with gemini.Checkpointer(model, optimizer) as ckpt:
        missing = ckpt.report()["not_given"]
    assert "torch.optim.lr_scheduler.StepLR" in missing
    del forgotten


def test_a_parameter_outside_the_model_is_captured(job: FakeJob) -> None:
    model = nn.Linear(2, 2)
    temperature = nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1, momentum=0.5)
    with gemini.Checkpointer(model, optimizer) as ckpt:
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * temperature).backward()
            optimizer.step()
            ckpt.step()
            wait_a_little()
        assert ckpt.report()["captured"]["not_in_model"] == ["optimizer.0.param.0.2"]
    wait_sealed(job, 4)
    wanted = temperature.item()
    assert job.requeue() is not None
    with torch.no_grad():
        temperature.zero_()
    with gemini.Checkpointer(model, optimizer) as ckpt:
        assert ckpt.resume() == 4
    assert temperature.item() == wanted


def test_fence_lets_weights_be_swapped(job: FakeJob) -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gemini.Checkpointer(model, optimizer, audit=1) as ckpt:
        for step in range(1, 9):
            optimizer.zero_grad()
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            ckpt.step()
            wait_a_little()
            kept = copy.deepcopy(model.state_dict())
            ckpt.fence()
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.load_state_dict(kept)
            assert step
        report = ckpt.report()
    assert report["captured"]["eager"] == {} and report["versions"]["void"] == 0


# ---- capture, without an agent -------------------------------------------------------------------------


def capture_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Capture, StateTree, torch.Tensor]:
    tree = StateTree(model, [optimizer], {}, {})
    leaves, _ = tree.find_leaves()
    described = [tree.describe(leaf, 1) for leaf in leaves]
    rows, entries = tuple(r for r, _ in described), [e for _, e in described]
    blocks = ownership.deal_blocks([entries])[0]
    manifest = ShardManifest(0, 1, rows, place_boxes(rows, [(b.entry, b.offset, b.size) for b in blocks]))
    capture = Capture(manifest, leaves, entries, blocks)
    capture.bind(leaves)
    return capture, tree, torch.zeros(manifest.count_tensor_bytes(), dtype=torch.uint8)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(300, 20), nn.Linear(20, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


def pieces(capture: Capture, area: torch.Tensor, key: str) -> torch.Tensor:
    """The content of a whole captured tensor."""
    manifest = capture.manifest
    found = [p for p in manifest.pieces if manifest.rows[p.row].key == key]
    row = manifest.rows[found[0].row]
    out = torch.full(row.shape, torch.nan)
    for p in found:
        view = out
        for dim, (start, length) in enumerate(zip(p.offset, p.size, strict=True)):
            view = view.narrow(dim, start, length)
        view.copy_(area[p.start : p.start + manifest.count_bytes(p)].view(torch.float32).view(p.size))
    return out


def test_a_version_bump_voids_and_makes_eager() -> None:
    model, optimizer = fresh()
    capture, tree, area = capture_of(model, optimizer)
    job = capture.begin_job(1, b"", audit=False)
    with torch.no_grad():
        model[1].weight.add_(1.0)
    capture.copy(job, 0, area)
    assert capture.find_changed(job, 0, area) == ["model.1.weight"]
    capture.bind(tree.find_leaves()[0])
    job = capture.begin_job(2, b"", audit=False)
    wanted = model[1].weight.detach().clone()
    with torch.no_grad():
        model[1].weight.add_(1.0)
    capture.copy(job, 1, area)
    assert capture.find_changed(job, 1, area) == []
    assert torch.equal(pieces(capture, area, "model.1.weight"), wanted)


def test_only_the_audit_sees_a_change_through_data() -> None:
    """Of one element, that is; see test_sample for whole tensors."""
    for audit, found in ((False, []), (True, ["model.0.weight"])):
        model, optimizer = fresh()
        capture, _, area = capture_of(model, optimizer)
        job = capture.begin_job(1, b"", audit=audit)
        model[0].weight.data[7, 123] += 1.0
        capture.copy(job, 0, area)
        assert capture.find_changed(job, 0, area) == found


def test_the_audit_at_the_pre_hook() -> None:
    model, optimizer = fresh()
    capture, _, area = capture_of(model, optimizer)
    job = capture.begin_job(1, b"", audit=True)
    capture.copy(job, 0, area)
    assert capture.find_changed(job, 0, area) == []
    optimizer.state[model[0].weight]["exp_avg"].data[0, 0] += 1.0
    assert capture.audit(job) == ["optimizer.0.model.0.weight.exp_avg"]


def test_replaced_tensors_are_found_again() -> None:
    model, optimizer = fresh()
    capture, tree, area = capture_of(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.state[model[0].weight]["exp_avg"].fill_(7.0)
    assert capture.bind(tree.find_leaves()[0]) == ([], {})
    job = capture.begin_job(1, b"", audit=False)
    capture.copy(job, 0, area)
    assert torch.equal(pieces(capture, area, "optimizer.0.model.0.weight.exp_avg"), torch.full((20, 300), 7.0))


def replace_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model[0].weight]["exp_avg"] = torch.full((20, 300), 7.0)


def replace_all_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.state[model[0].weight]["exp_avg"].fill_(7.0)


def replace_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model[0].weight]["exp_avg"].data = torch.full((20, 300), 7.0)


@pytest.mark.parametrize("change", [replace_state, replace_all_state, replace_memory])
def test_what_is_replaced_after_steps_without_a_change_is_found(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    model, optimizer = fresh()
    capture, tree, area = capture_of(model, optimizer)
    for version in (1, 2):
        capture.bind(tree.find_leaves()[0])
        capture.copy(capture.begin_job(version, b"", audit=False), 0, area)
    assert tree.find_leaves()[0] is tree.find_leaves()[0]
    change(model, optimizer)
    assert capture.bind(tree.find_leaves()[0]) == ([], {})
    job = capture.begin_job(3, b"", audit=False)
    capture.copy(job, 0, area)
    assert capture.find_changed(job, 0, area) == []
    assert torch.equal(pieces(capture, area, "optimizer.0.model.0.weight.exp_avg"), torch.full((20, 300), 7.0))


def test_memory_that_is_replaced_before_the_copy_is_copied_as_it_was() -> None:
    """An encoder that follows another one may be written so in each forward: `p.data = ...`."""
    model, optimizer = fresh()
    capture, tree, area = capture_of(model, optimizer)
    capture.watches_all = True
    for version in (1, 2):
        capture.bind(tree.find_leaves()[0])
        before = model[0].bias.detach().clone()
        job = capture.begin_job(version, b"", audit=version == 2)
        model[0].bias.data = before + 1.0
        capture.copy(job, 0, area)
        assert capture.find_changed(job, 0, area) == []
        assert torch.equal(pieces(capture, area, "model.0.bias"), before)
        assert torch.equal(job.memory["model.0.bias"], before), "also for copies of other ranks' shards"


def test_memory_that_is_replaced_and_then_written_voids_the_copy() -> None:
    """As where an evaluation's weights and those of the training change places, and then the average goes on."""
    model, optimizer = fresh()
    capture, tree, area = capture_of(model, optimizer)
    capture.bind(tree.find_leaves()[0])
    average = torch.zeros(20)
    job = capture.begin_job(1, b"", audit=False)
    model[0].bias.data, average = average, model[0].bias.data
    average.lerp_(model[0].bias.data, 0.5)
    capture.copy(job, 0, area)
    assert capture.find_changed(job, 0, area) == ["model.0.bias"]


def test_state_that_is_no_tensor_is_read_anew_and_may_become_one() -> None:
    model, optimizer = fresh()
    tree = StateTree(model, [optimizer], {}, {})
    values = optimizer.state[model[1].bias]
    values["rounds"] = 1
    before, odd = tree.find_leaves()
    assert odd == {(0, "model.1.bias", "rounds"): 1}
    values["rounds"] = 2
    again, odd = tree.find_leaves()
    assert again is before and odd == {(0, "model.1.bias", "rounds"): 2}
    values["rounds"] = torch.tensor(3.0)
    after, odd = tree.find_leaves()
    assert not odd and {leaf.key for leaf in after} - {leaf.key for leaf in before} == {
        "optimizer.0.model.1.bias.rounds"
    }
    values["rounds"] = None
    assert len(tree.find_leaves()[0]) == len(before) and tree.find_leaves()[1] == {
        (0, "model.1.bias", "rounds"): None
    }
    optimizer.state["turn"] = 5  # type: ignore[index]  # of no parameter
    assert len(tree.find_leaves()[0]) == len(before) and tree.find_leaves()[0] is tree.find_leaves()[0]
    values["turns"] = values.pop("rounds")
    assert tree.find_leaves()[1] == {(0, "model.1.bias", "turns"): None}
    del optimizer.state[model[1].bias]
    assert len(tree.find_leaves()[0]) == len(before) - 3


def test_another_shape_is_noticed() -> None:
    model, optimizer = fresh()
    capture, tree, _ = capture_of(model, optimizer)
    optimizer.state[model[0].bias]["exp_avg"] = torch.zeros(3)
    name = "optimizer.0.model.0.bias.exp_avg"
    _, misfits = capture.bind(tree.find_leaves()[0])
    assert list(misfits) == [name] and "was (20,)" in misfits[name]
    del optimizer.state[model[0].bias]
    _, misfits = capture.bind(tree.find_leaves()[0])
    assert "is gone" in misfits[name] and len(misfits) > 1


@pytest.mark.slow  # imports the compiler
def test_names_do_not_depend_on_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = [p.fqn for p in StateTree(model, [], {}, {}).params]
    compiled = [p.fqn for p in StateTree(torch.compile(model), [], {}, {}).params]  # type: ignore[arg-type]
    assert plain == compiled == [f"model.{i}.{n}" for i, n in itertools.product((0, 1), ("weight", "bias"))]
