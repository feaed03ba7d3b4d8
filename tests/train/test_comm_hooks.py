"""State of DDP's communication hooks: it comes back, or a line says what begins anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gemini_hpc.train.state import encode
from gemini_hpc.train.state.comm_hooks import CommHooks

from .fake_agent import FakeJob
from .launch import Run, train

MakeJob = Callable[[int, int], FakeJob]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hooked(state: Any, hook: Any = powerSGD_hook.powerSGD_hook, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(3, 2), **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def carried(before: DistributedDataParallel, after: DistributedDataParallel, *, same_world: bool = True) -> list[str]:
    saved = encode.decode(encode.encode(CommHooks([before]).capture()))
    return CommHooks([after]).restore(saved, same_world=same_world)


def powersgd(seed: int = 0) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, random_seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "more"), [(32, {}), (128, {}), (32, {"use_error_feedback": False})])
def test_powersgd_goes_on_bit_for_bit(make_job: MakeJob, width: int, more: dict[str, Any]) -> None:
    """Also where what it remembers is large enough for a place of its own (yet one bucket: gloo hangs with more)."""
    options = {"kind": "ddp", "norm": "layer", "steps": 30, "width": width, "powersgd": more, "sleep_s": 0.02}
    job = make_job(2, 2)
    job.stop_after(24)
    whole = train(job, 2, armed=True, **options)
    chosen = job.requeue(lost=(1,))
    assert chosen is not None and chosen.version == 24
    again = train(job, 2, seed=5, **options)
    for a, b in zip(whole, again, strict=True):
        assert b["start"] == 24
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 24}
        assert b["digest"] == a["digest"]
        assert a["report"]["versions"]["void"] == 0


@pytest.mark.slow
def test_other_ranks_begin_it_anew_and_say_so(make_job: MakeJob) -> None:
    options = {"kind": "ddp", "norm": "layer", "steps": 4, "samples": 210, "powersgd": {}}
    job = make_job(1, 1)
    train(job, 2, sleep_s=0.05, **options)
    assert job.requeue() is not None
    run = Run(job, 3, {**options, "steps": 5})
    run.wait()
    wanted = "the state of a communication hook (PowerSGDState) begins anew: it belongs to another number of ranks"
    assert [text.count(wanted) for text in run.stderr] == [1, 0, 0] and f"ranks 0, 1, 2: {wanted}" in run.stderr[0]


def test_attributes_and_generators_come_back() -> None:
    before, after = hooked(powersgd()), hooked(powersgd(7))
    state = before._comm_hooks[0][1]
    state.error_dict[0], state.iter = torch.ones(4), 5
    state.rng.rand(3)
    assert carried(before, after) == []
    again = after._comm_hooks[0][1]
    assert again.iter == 5 and again.error_dict[0].tolist() == [1.0] * 4
    assert again.rng.rand(4).tolist() == state.rng.rand(4).tolist()


class Noisy:
    """A hook that is a method, with generators of all kinds."""

    def __init__(self, seed: int) -> None:
        self.numpy, self.plain = np.random.default_rng(seed), random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def hook(self, _, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations, and takes no text there
        return default_hooks.allreduce_hook(None, bucket)

    def draw(self) -> tuple[float, float, float]:
        return self.numpy.random(), self.plain.random(), torch.rand((), generator=self.torch).item()


def test_a_hook_that_is_a_method_has_its_objects_state() -> None:
    before, after = Noisy(1), Noisy(2)
    before.draw()
    assert carried(hooked(None, before.hook), hooked(None, after.hook)) == []
    assert after.draw() == before.draw()


class Giving:
    """Has a `state_dict`, and something that nobody else could capture."""

    def __init__(self, count: int) -> None:
        self.count, self.odd = count, object()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def with_state(state, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.allreduce_hook(None, bucket)


def test_a_state_dict_of_its_own_goes_first() -> None:
    before, after = hooked(Giving(3), with_state), hooked(Giving(0), with_state)
    assert carried(before, after) == [] and after._comm_hooks[0][1].count == 3
    assert CommHooks([before]).find_uncaptured() == {}


def test_a_mapping_is_a_state() -> None:
    after = hooked({"count": 0}, with_state)
    assert carried(hooked({"count": 3}, with_state), after) == [] and after._comm_hooks[0][1] == {"count": 3}


def test_what_has_no_state_is_not_looked_at() -> None:
    group = dist.group.WORLD
    plain = [hooked(None, default_hooks.allreduce_hook), hooked(group, default_hooks.fp16_compress_hook)]
    assert CommHooks(plain).capture() == {} and CommHooks(plain).find_uncaptured() == {}


def test_how_far_post_local_sgd_has_come_comes_back() -> None:
    def made() -> DistributedDataParallel:
        state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=9)
        return hooked(state, post_localSGD_hook.post_localSGD_hook)

    before, after = made(), made()
    before._comm_hooks[0][1].iter = 7
    assert carried(before, after) == []
    again = after._comm_hooks[0][1]
    assert again.iter == 7 and again.subgroup is dist.group.WORLD


class Odd:
    def __init__(self) -> None:
        self.count, self.handle = 3, object()


def test_what_cannot_be_captured_is_named() -> None:
    hooks = CommHooks([hooked(Odd(), with_state)])
    assert hooks.find_uncaptured() == {"the state of a communication hook (Odd)": "its handle is a object"}
    assert hooks.capture()["0.0"]["values"] == {"count": 3}


def test_buckets_that_are_built_anew_are_no_place_for_it() -> None:
    hooks = CommHooks([hooked(powersgd(), static_graph=True)])
    assert hooks.capture() == {} and "builds its buckets anew" in next(iter(hooks.find_uncaptured().values()))
    assert CommHooks([hooked(powersgd(), find_unused_parameters=True)]).find_uncaptured() == {}


@pytest.mark.parametrize(
    ("after", "same_world", "why"),
    [
        (lambda: DistributedDataParallel(nn.Linear(3, 2)), True, "no such hook is registered"),
        (lambda: hooked(Odd(), with_state), True, "no such hook is registered"),
        (lambda: hooked(powersgd(), bucket_cap_mb=1), True, "the buckets of DDP are not those of the saved run"),
        (lambda: hooked(powersgd()), False, "it belongs to another number of ranks"),
    ],
)
def test_what_does_not_fit_begins_anew(after: Any, same_world: bool, why: str) -> None:
    (line,) = carried(hooked(powersgd()), after(), same_world=same_world)
    assert line == f"the state of a communication hook (PowerSGDState) begins anew: {why}"
