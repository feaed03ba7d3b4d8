"""Starting from what another training has left: the tier (any number of ranks), DCP, torch.save."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict as set_both

from gemini_hpc.cli import main
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders, version
from gemini_hpc.train import start
from gemini_hpc.train.state.tree import StateTree
from tests.cli.test_export import mpi, store
from tests.cli.test_export import train as made
from tests.tier.test_worker import carry_out

from .fake_agent import FakeJob
from .launch import Run, train
from .worker import WRAPPERS, Net, digest

MakeJob = Callable[[int, int], FakeJob]
OPTIONS: dict[str, Any] = {"steps": 4, "norm": "layer", "samples": 210}


def drain(job: FakeJob, tier: Path) -> Path:
    """What agents do with a sealed version: the newest one of this job to the tier, in real files."""
    stamp = job.sealed
    assert stamp is not None
    wire = (stamp.epoch, stamp.version)
    files = []
    for number, node in enumerate(job.nodes):
        shards, fds = [], []
        for rank, held in node.held.items():
            if held.home != number:
                continue
            index = held.pair.find_slot(stamp)
            assert index is not None
            slot = held.pair.slots[index]
            fds.append(held.fds[index])
            shards.append(orders.Source(fds[-1], rank, number, held.bytes, slot.bytes_used, slot.digest or ""))
        written = carry_out(orders.Write(str(tier), 7, "default", wire, number, tuple(shards)), *fds)
        assert isinstance(written, orders.Written), written
        files.append(written.file)
    world = sum(len(file.shards) for file in files)
    finished = carry_out(orders.Finish(str(tier), 7, "default", wire, world, tuple(files)))
    assert isinstance(finished, orders.Finished), finished
    return tier / "gemini-7" / "default" / version.format_name(stamp)


def left(make_job: MakeJob, tier: Path, kind: str, world: int, **more: Any) -> tuple[Path, dict[str, Any]]:
    """A version on the tier, and what the training that left it told at its end."""
    tier.mkdir(exist_ok=True)
    job = make_job(1, 1)
    told = train(job, world, kind=kind, sleep_s=0.05, **{**OPTIONS, **more})
    return drain(job, tier), told[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(("fsdp2", 4), ("fsdp2", 3)), (("ddp", 2), ("fsdp2", 3))],
)
def test_other_ranks(make_job: MakeJob, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]) -> None:
    where, told = left(make_job, tmp_path, *before)
    loaded = train(None, after[1], kind=after[0], seed=77, **OPTIONS, kwargs={"start": str(where)})
    assert [r["start"] for r in loaded] == [4] * after[1]
    assert {r["digest"] for r in loaded} == {told["digest"]}


@pytest.mark.slow
def test_as_many_ranks_go_on_bit_by_bit(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    straight = train(None, 2, kind="ddp", **{**OPTIONS, "steps": 9})
    went_on = train(None, 2, kind="ddp", seed=5, **{**OPTIONS, "steps": 9}, kwargs={"start": str(where)})
    for a, b in zip(straight, went_on, strict=True):
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 4}
        assert a["digest"] == b["digest"]


@pytest.mark.slow
def test_what_the_job_has_itself_comes_first(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path / "tier", "ddp", 2)
    job = make_job(1, 1)
    options = {**OPTIONS, "kind": "ddp", "kwargs": {"start": str(where)}}
    assert [r["start"] for r in train(job, 2, **{**options, "steps": 7}, sleep_s=0.05)] == [4, 4]
    assert job.requeue() is not None
    assert [r["start"] for r in train(job, 2, **{**options, "steps": 9})] == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "readers"),
    [
        pytest.param(
            *("ddp", 2, {"torch": ("plain", 1), "dcp": ("fsdp2", 2)}),
            marks=pytest.mark.witness("what is exported is started from, in another number of processes"),
            id="ddp",
        ),
        pytest.param("fsdp2", 3, {"torch": ("fsdp2", 2), "dcp": ("plain", 1)}, id="fsdp2"),
    ],
)
def test_exported_and_started_from(
    make_job: MakeJob, tmp_path: Path, kind: str, world: int, readers: dict[str, tuple[str, int]]
) -> None:
    """Parameters and moments come back by name, in one process and in several."""
    where, told = left(make_job, tmp_path / "tier", kind, world)
    for form in ("torch", "dcp", "safetensors"):
        assert main.main(["export", str(where), "--format", form, "-o", str(tmp_path / form)]) == 0, form
    for form, (again, ranks) in readers.items():
        kwargs = {"start": str(tmp_path / form)}
        loaded = train(None, ranks, kind=again, seed=77, **{**OPTIONS, "steps": 0}, kwargs=kwargs)
        assert [r["start"] for r in loaded] == [0] * ranks, form
        assert {r["digest"] for r in loaded} == {told["digest"]}, form
    from safetensors import safe_open

    with safe_open(tmp_path / "safetensors", "pt") as file:
        assert "model.embed.weight" in set(file.keys())


def fresh(seed: int = 5, norm: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    """The model and optimizer of the trainings here."""
    torch.manual_seed(seed)
    net = Net(32, norm)
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_torch_loads_an_export_with_its_own_functions(make_job: MakeJob, tmp_path: Path, form: str) -> None:
    where, told = left(make_job, tmp_path / "tier", "ddp", 2)
    out = tmp_path / "out"
    assert main.main(["export", str(where), "--format", form, "-o", str(out)]) == 0
    net, optimizer = fresh()
    if form == "torch":
        found = torch.load(out, weights_only=True)
        set_model_state_dict(net, found["model"])
        set_optimizer_state_dict(net, optimizer, found["optimizer"])
    else:
        optimizer.param_groups[0]["initial_lr"] = 0.0  # as its scheduler has it
        model, state = get_state_dict(net, optimizer)
        dcp.load({"model": model, "optimizer": state}, checkpoint_id=out, no_dist=True)
        set_both(net, optimizer, model_state_dict=model, optim_state_dict=state)
    assert digest(net, optimizer) == told["digest"]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (0.01 * math.cos(4 / 40), 0.01, 0.1)


@pytest.mark.slow
def test_an_export_has_what_appeared_after_the_first_step(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path / "tier", "plain", 1, thaw_at=3)
    out = tmp_path / "out"
    assert main.main(["export", str(where), "--format", "torch", "-o", str(out)]) == 0
    found = torch.load(out, weights_only=True)["optimizer"]
    assert found["param_groups"][0]["params"][-1] == "frozen"
    assert found["state"]["frozen"].keys() == found["state"]["norm.weight"].keys()
    assert found["state"]["frozen"]["exp_avg"].shape == (32,)


Foreign = Callable[[Net, torch.optim.Optimizer, Path], Any]


def as_lightning(net: Net, optimizer: torch.optim.Optimizer, out: Path) -> None:
    state = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    more = {"epoch": 1, "callbacks": {}, "loops": {"fit": {"state_dict": {}}}, "lr_schedulers": []}
    torch.save({**more, "state_dict": state, "optimizer_states": [optimizer.state_dict()]}, out)


def as_named(net: Net, optimizer: torch.optim.Optimizer, out: Path) -> None:
    """By name, in an order that is not this training's."""
    model, state = get_state_dict(net, optimizer)
    state["param_groups"][0]["params"].reverse()  # type: ignore[index,union-attr,call-arg]
    torch.save({"model": model, "optimizer": state}, out)


def as_dcp(*above: str) -> Foreign:
    def save(net: Net, optimizer: torch.optim.Optimizer, out: Path) -> None:
        model, state = get_state_dict(net, optimizer)
        content: dict[str, Any] = {"model": model, "optimizer": state}
        for name in above:
            content = {name: content}
        dcp.save(content, checkpoint_id=out, no_dist=True)

    return save


def prefixed(net: Net, optimizer: torch.optim.Optimizer, out: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in net.state_dict().items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, out)


FOREIGN: dict[str, Foreign] = {
    "bare": lambda n, _, out: torch.save(n.state_dict(), out),
    "numbered": lambda n, o, out: torch.save({"model": n.state_dict(), "optimizer": o.state_dict()}, out),
    "listed": lambda n, o, out: torch.save({"model": n.state_dict(), "optimizer": [o.state_dict()]}, out),
    "module.": prefixed,
    "named": as_named,
    "lightning": as_lightning,
    "dcp": as_dcp(),
    "nested dcp": as_dcp("app", "state"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", FOREIGN)
def test_checkpoints_of_others(tmp_path: Path, form: str) -> None:
    """Parameters, buffers and moments, bit by bit."""
    net, optimizer = fresh(1, norm=True)
    for _ in range(2):
        net(torch.randint(0, 50, (4, 8))).sum().backward()
        optimizer.step()
    FOREIGN[form](net, optimizer, tmp_path / "out")
    again, its = fresh(2, norm=True)
    tree = StateTree(again, [its], {}, {})
    found = start.load(tree, str(tmp_path / "out"), "default", 0, 1)
    assert found.version == 0
    for name, tensor in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    if form == "bare":
        assert not its.state and " 0 of the optimizer" in found.description
        return
    wanted, have = optimizer.state_dict()["state"], its.state_dict()["state"]
    assert have.keys() == wanted.keys()
    for number, values in wanted.items():
        assert have[number].keys() == values.keys()
        assert all(torch.equal(have[number][name], value) for name, value in values.items()), number


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("before", ["", "checkpoint"], ids=["plain", "wrapped"])
@pytest.mark.parametrize("wrap", ["checkpoint", "compile"])
def test_a_wrapped_model_starts_from_dcp(tmp_path: Path, wrap: str, before: str) -> None:
    """Wrappers below `fully_shard` have no names there, whichever model has saved it."""
    net, optimizer = fresh(1)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = WRAPPERS[before](block)
    for _ in range(2):
        net(torch.randint(0, 50, (4, 8))).sum().backward()
        optimizer.step()
    out = tmp_path / "out"
    as_dcp()(net, optimizer, out)
    known = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    assert "model.blocks.0.weight" in known and not any("wrapped" in key for key in known)
    options = {**OPTIONS, "kind": "fsdp2", "wrap": wrap, "steps": 0, "kwargs": {"start": str(out)}}
    loaded = train(None, 2, seed=77, **options)
    assert {(r["start"], r["digest"]) for r in loaded} == {(0, digest(net, optimizer))}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", FOREIGN)
def test_checkpoints_do_not_have_what_a_state_dict_leaves_out(tmp_path: Path, form: str) -> None:
    """Rotary embeddings are such buffers: each model makes its own."""
    (net, optimizer), (again, its) = fresh(1), fresh(2)
    for number, module in enumerate((net, again)):
        module.register_buffer("inv_freq", torch.full((4,), float(number)), persistent=False)
    net(torch.randint(0, 50, (4, 8))).sum().backward()
    optimizer.step()
    FOREIGN[form](net, optimizer, tmp_path / "out")
    start.load(StateTree(again, [its], {}, {}), str(tmp_path / "out"), "default", 0, 1)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    assert dict(again.named_buffers())["inv_freq"].tolist() == [1.0] * 4


def test_a_checkpoint_with_two_such_models_is_nobodys_guess(tmp_path: Path) -> None:
    net, optimizer = fresh(1)
    both = {f"{side}.{name}": t for side in ("student", "teacher") for name, t in net.state_dict().items()}
    torch.save(both, tmp_path / "out")
    with pytest.raises(ValueError, match=r"several models .* below student\., teacher\.: keep only one"):
        start.load(StateTree(net, [optimizer], {}, {}), str(tmp_path / "out"), "default", 0, 1)
    torch.save({**both, **{f"model.{name}": t for name, t in net.state_dict().items()}}, tmp_path / "out")
    start.load(StateTree(net, [optimizer], {}, {}), str(tmp_path / "out"), "default", 0, 1)


def test_an_mpi_programs_version_is_none_of_a_training(tmp_path: Path) -> None:
    where = store(tmp_path, [mpi(0, {"T": np.ones(3)}, 1)])
    net, optimizer = fresh()
    with pytest.raises(ValueError, match="or an MPI program: arrays only"):
        start.load(StateTree(net, [optimizer], {}, {}), str(where), "default", 0, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_dcp_is_noticed(tmp_path: Path) -> None:
    net, optimizer = fresh()
    as_dcp()(net, optimizer, tmp_path / "out")
    (tmp_path / "out" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be loaded"):
        start.load(StateTree(net, [optimizer], {}, {}), str(tmp_path / "out"), "default", 0, 1)


def refused(start: Path, **more: Any) -> str:
    run = Run(None, 2, {**OPTIONS, "kind": "ddp", "kwargs": {"start": str(start)}, **more})
    run.wait(codes=(1,))
    last = run.stderr[0].strip().splitlines()[-1].removeprefix("[rank0]: ")
    assert last.startswith(f"ValueError: cannot start from {start}"), run.stderr[0]
    return last


@pytest.mark.slow
def test_a_model_of_another_size_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    assert "does not fit this training" in refused(where, width=48)


@pytest.mark.slow
def test_a_damaged_tensor_is_noticed(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    file = where / "node-0000.h5"
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(b ^ 0xFF for b in data[middle : middle + 64])
    file.write_bytes(data)
    assert "damaged" in refused(where)


@pytest.mark.slow
def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nothing")
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "cannot be loaded as a file of torch.save" in refused(tmp_path / "text.pt")


def test_a_damaged_version_is_passed_over(tmp_path: Path) -> None:
    net, optimizer = fresh()
    tree = StateTree(net, [optimizer], {}, {})
    older = store(tmp_path, [made(tree)])
    newer = older.with_name(version.format_name(Stamp(1, 5)))
    newer.mkdir()
    (newer / version.MANIFEST).write_text("{")
    found = start.load(tree, str(tmp_path), "default", 0, 1)
    assert found.version == 4 and f"skipped: {newer}/manifest.json" in found.description


@pytest.mark.slow
def test_half_a_version_is_none(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    os.unlink(where / version.MANIFEST)
    assert "is not whole" in refused(where)
    assert "has no whole version" in refused(where.parent)
