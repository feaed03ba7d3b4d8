"""Large tensors out of the small state, planning anew in mid-training, and replicas that drift apart."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gemini_hpc as gemini
from gemini_hpc.format import small_state
from gemini_hpc.train.state import encode, lifted
from gemini_hpc.train.state.capture import Capture
from gemini_hpc.train.state.divergence import Divergence
from gemini_hpc.train.state.ownership import TensorEntry

from .fake_agent import FakeJob
from .launch import train
from .test_checkpointer import wait_armed, wait_sealed
from .test_kinds import run

MakeJob = Callable[[int, int], FakeJob]
LARGE = {"steps": 16, "width": 256, "large": True, "average": True, "norm": "layer"}


def resumed(job: FakeJob, world: int, at: int, lost: tuple[int, ...] = (), **options: Any) -> list[dict[str, Any]]:
    """Stopped at version `at` and resumed, it is the training that was never stopped. Reports of the first run."""
    job.stop_after(at)
    whole = train(job, world, armed=True, **options)
    chosen = job.requeue(lost=lost)
    assert chosen is not None and chosen.version == at
    again = train(job, world, **{**options, "seed": 9})
    for a, b in zip(whole, again, strict=True):
        assert b["start"] == at
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > at}
        assert b["digest"] == a["digest"]
    return [result["report"] for result in whole]


def small_bytes(job: FakeJob) -> int:
    """Of the newest version."""
    return max(held.small_bytes() for held in job.pairs())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), [(1, "plain"), (2, "ddp"), (2, "fsdp2")])
def test_large_buffers_and_averages_have_places_of_their_own(make_job: MakeJob, world: int, kind: str) -> None:
    job = make_job(world, world)
    reports = resumed(job, world, 7, lost=(1,) if world > 1 else (), kind=kind, **LARGE)
    assert all(report["versions"]["void"] == 0 for report in reports)
    assert 0 < small_bytes(job) < 100_000, "none of them is in the small state"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), [(1, "plain"), (2, "ddp"), (2, "fsdp2")])
def test_a_large_tensor_that_appears_late_is_planned_for(make_job: MakeJob, world: int, kind: str) -> None:
    """Before and after the ranks have new plan, it comes back."""
    options = {**LARGE, "kind": kind, "average_from": 6, "steps": 40, "sleep_s": 0.01}
    job = make_job(world, world)
    reports = resumed(job, world, 6 if world > 1 else 7, **options)  # a rank alone plans at once
    assert all("new plan" in " ".join(report["findings"]) for report in reports)
    job = make_job(world, world)
    resumed(job, world, 36, **options)
    assert 0 < small_bytes(job) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("apart_from", [1, 4])
def test_replicas_that_drift_apart_are_each_ranks_own(make_job: MakeJob, apart_from: int) -> None:
    """Local steps: parameters were equal when the state was dealt out."""
    options = {"kind": "ddp", "norm": "layer", "steps": 40, "apart_from": apart_from, "sleep_s": 0.01}
    job = make_job(2, 2)
    (first, _) = resumed(job, 2, 36, lost=(0,), **options)
    if apart_from > 1:
        assert "no longer the same on all ranks" in " ".join(first["findings"])


@pytest.mark.slow
def test_state_of_an_optimizer_that_does_not_keep_its_shape(make_job: MakeJob) -> None:
    """The ranks plan anew, twice; then it is part of the small state."""
    options = {"kind": "ddp", "norm": "layer", "steps": 60, "fickle": True, "sleep_s": 0.02}
    reports = resumed(make_job(2, 2), 2, 56, lost=(0,), **options)
    for report in reports:
        planned = [line for line in report["findings"] if "new plan" in line]
        assert len(planned) == 2 and report["state"] == "protected", report["findings"]


@pytest.mark.slow
def test_what_is_the_same_everywhere_is_not_planned_anew(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    for report in train(job, 2, kind="ddp", norm="layer", steps=40, sleep_s=0.01):
        assert not [line for line in report["report"]["findings"] if "planned" in line]


def entries(*keys: str, printed: int = 1) -> list[TensorEntry]:
    return [TensorEntry(key, (4,), (0,), (4,), 4, printed) for key in keys]


def round_of(sides: list[Divergence], tensors: list[dict[str, torch.Tensor]]) -> bool:
    words = [side.compute_words(t) for side, t in zip(sides, tensors, strict=True)]
    assert {len(w) for w in words} == {sides[0].count}
    return Divergence.shows_difference([max(column) for column in zip(*words, strict=True)])


def test_each_group_of_ranks_is_compared_within_itself() -> None:
    """Two stages of a pipeline, each on two ranks; a key on one rank alone is nobody's copy."""
    gathered = [entries("a", "b"), entries("a", "b", "mine"), entries("c"), entries("c")]
    sides = [Divergence(gathered, frozenset("b"), rank) for rank in range(4)]
    one, other = torch.ones(4), torch.zeros(4)
    state = [{"a": one, "b": one}, {"a": one, "b": other, "mine": one}, {"c": other}, {"c": other}]
    assert not any(round_of(sides, state) for _ in range(3))
    state[3] = {"c": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    assert not round_of(sides, state), "a round says what was seen when the one before began"
    assert round_of(sides, state)
    assert not Divergence.shows_difference([]) and sides[0].count == 4


def test_more_groups_than_a_round_has_room_for_take_turns() -> None:
    names = [f"{i:02}" for i in range(20)]
    gathered = [entries(*names[: i + 1]) for i in range(20)]
    sides = [Divergence(gathered, frozenset(), rank) for rank in range(20)]
    state = [{n: torch.ones(4) for n in names[: i + 1]} for i in range(20)]
    assert sides[0].count == 16 and not any(round_of(sides, state) for _ in range(6))
    state[19]["10"] = torch.zeros(4)
    assert sum(round_of(sides, state) for _ in range(6)) in (2, 3)


def test_what_is_lifted_is_put_back() -> None:
    big, other = torch.arange(20000.0), torch.arange(30000.0)
    small = {
        "rng": [big],
        "buffers": {"model.x": big, "model.few": torch.ones(2)},
        "stateful": {
            "average": OrderedDict(shadow=[other, (big[:5], 3)], part=encode.DTensorPart(big, (2, 20000), "S"))
        },
        "odd": {(0, "model.w", "history"): [big, other]},
        "loose": [{}],
    }
    lift = lifted.Lift(lambda name, tensor: not name.endswith(".1"))
    without = lift.lift_tensors(small)
    assert sorted(lift.found) == [
        "model.x", "odd.0.model.w.history.0", "stateful.average.part", "stateful.average.shadow.0",
    ]  # fmt: skip
    assert list(lift.left) == ["odd.0.model.w.history.1"]
    assert without["rng"] is small["rng"] and without["loose"] is small["loose"]
    decoded = encode.decode(encode.encode(without))
    loaded = {}
    for each in lifted.list_lifted(decoded):
        loaded[each.key] = lifted.allocate_tensor(each).copy_(lift.found[each.key])
    back = lifted.put_back(decoded, loaded)
    assert encode.encode(back) == encode.encode(small)
    assert [row.key for row, _ in small_state.list_buffers(encode.encode(without))] == ["model.few"]


@pytest.mark.parametrize(
    "words",
    [
        ("k", "float32", (2,)),
        ("k", "float33", (2,), False),
        ("k", "float32", (-1,), False),
        ("k", "float32", [2], True),
    ],
)
def test_a_word_about_a_tensor_elsewhere_that_is_none_is_refused(words: tuple[Any, ...]) -> None:
    out: list[bytes] = []
    encode._put_items(out, b"L", words, "state", 0)
    with pytest.raises(ValueError, match=r"encoded state (refers to|has an invalid reference to) a tensor"):
        encode.decode(b"".join(out))


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(1).expand(40000),
        torch.ones(40000).to_sparse(),
        torch.view_as_complex(torch.ones(20000, 2)).conj(),
        torch.nn.Parameter(torch.ones(40000)).as_subclass(type("Mine", (torch.Tensor,), {})),
    ],
    ids=["expanded", "sparse", "conjugated", "subclass"],
)
def test_what_cannot_be_captured_as_bytes_is_left_alone(odd: torch.Tensor) -> None:
    lift = lifted.Lift(lambda name, tensor: True)
    assert lift.lift_tensors({"buffers": {"x": odd}})["buffers"]["x"] is odd and not lift.found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_large_tensor_that_keeps_growing_stays_in_the_small_state(make_job: MakeJob, world: int) -> None:
    """It has a place only until its shape changes: versions that lack it are not sealed, and protection goes on."""
    options = {**LARGE, "kind": "ddp" if world > 1 else "plain", "history": 16380, "steps": 60, "sleep_s": 0.01}
    job = make_job(world, world)
    reports = resumed(job, world, 56, **options)
    assert all(report["state"] == "protected" for report in reports)


class Historic(torch.optim.Optimizer):
    """Keeps the last gradients in a list, as LBFGS does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            history = self.state[p].setdefault("history", [])
            history.append(p.grad.clone())
            del history[:-2]
            p.sub_(0.1 * sum(history))


def test_history_of_an_optimizer(job: FakeJob) -> None:
    """A list of large tensors is put back before the optimizer has its state."""

    def once(seed: int) -> tuple[int, list[str], Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 9000, bias=False)
        return run(model, Historic(model.parameters()), 9)

    job.stop_after(5)
    _, losses, _ = once(1)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    assert once(2)[:2] == (5, losses[5:])


class Played:
    """A replay buffer of numpy's: rows are written at any time, and no version counter hears of it."""

    def __init__(self) -> None:
        self.rows = np.zeros((4096, 8), dtype=np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": torch.from_numpy(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"].numpy()


def test_memory_that_is_not_torchs_alone(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_pairs = Capture.copy_pairs

    def late(*args: Any) -> float:
        time.sleep(0.05)
        return copy_pairs(*args)

    monkeypatch.setattr(Capture, "copy_pairs", late)

    def once(seed: int) -> tuple[int, list[float]]:
        torch.manual_seed(seed)
        model, played, sums = torch.nn.Linear(3, 2), Played(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gemini.Checkpointer(model, optimizer, extra={"played": played}) as ckpt:
            start = ckpt.resume()
            for step in range(start + 1, 10):
                sums.append(float(played.rows.sum()))
                played.rows[37 * step] = step
                optimizer.zero_grad()
                model(torch.rand(4, 3)).sum().backward()
                optimizer.step()
                ckpt.step()
                if step == start + 1:
                    wait_armed(ckpt)
        return start, sums

    job.stop_after(5)
    _, sums = once(1)
    wait_sealed(job, 5)
    assert job.requeue() is not None
    assert once(2) == (5, sums[5:])
