"""Starting from what another training has left: the tier (any number of ranks), DCP, torch.save."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.cli import main
from gemini_hpc.tier import orders, version
from tests.tier.test_worker import carry_out

from .fake_agent import FakeJob
from .launch import Run, train

MakeJob = Callable[[int, int], FakeJob]
OPTIONS: dict[str, Any] = {"steps": 4, "norm": "layer"}


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
            index = held.pair.find(stamp)
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
    return tier / "gemini-7" / "default" / version.name(stamp)


def left(make_job: MakeJob, tier: Path, kind: str, world: int, **more: Any) -> tuple[Path, dict[str, Any]]:
    """A version on the tier, and what the training that left it told at its end."""
    tier.mkdir(exist_ok=True)
    job = make_job(1, 1)
    told = train(job, world, kind=kind, sleep_s=0.05, **{**OPTIONS, **more})
    return drain(job, tier), told[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ddp", 4), ("ddp", 2)),
        (("fsdp2", 4), ("fsdp2", 3)),
        (("fsdp2", 2), ("plain", 1)),
        (("ddp", 2), ("fsdp2", 3)),
    ],
)
def test_other_ranks(make_job: MakeJob, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]) -> None:
    where, told = left(make_job, tmp_path, *before)
    loaded = train(None, after[1], kind=after[0], seed=77, **OPTIONS, kwargs={"start": str(where)})
    assert [r["start"] for r in loaded] == [4] * after[1]
    assert {r["digest"] for r in loaded} == {told["digest"]}


def test_as_many_ranks_go_on_bit_by_bit(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    straight = train(None, 2, kind="ddp", **{**OPTIONS, "steps": 9})
    went_on = train(None, 2, kind="ddp", seed=5, **{**OPTIONS, "steps": 9}, kwargs={"start": str(where)})
    for a, b in zip(straight, went_on, strict=True):
        assert b["losses"] == {s: loss for s, loss in a["losses"].items() if int(s) > 4}
        assert a["digest"] == b["digest"]


def test_what_the_job_has_itself_comes_first(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path / "tier", "ddp", 2)
    job = make_job(1, 1)
    options = {**OPTIONS, "kind": "ddp", "kwargs": {"start": str(where)}}
    assert [r["start"] for r in train(job, 2, **{**options, "steps": 7}, sleep_s=0.05)] == [4, 4]
    assert job.requeue() is not None
    assert [r["start"] for r in train(job, 2, **{**options, "steps": 9})] == [7, 7]


@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 3)])
def test_exported_and_started_from(
    make_job: MakeJob, tmp_path: Path, kind: str, world: int, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters and moments come back by name, in one process and in several."""
    where, told = left(make_job, tmp_path / "tier", kind, world)
    out = tmp_path / "out"
    assert main.main(["export", str(where), "--format", form, "-o", str(out)]) == 0, capsys.readouterr().err
    if form == "safetensors":
        from safetensors import safe_open

        with safe_open(out, "pt") as file:
            assert "model.embed.weight" in set(file.keys())
        return
    for again, ranks in (("plain", 1), ("fsdp2", 2)):
        loaded = train(None, ranks, kind=again, seed=77, **{**OPTIONS, "steps": 0}, kwargs={"start": str(out)})
        assert [r["start"] for r in loaded] == [0] * ranks
        assert {r["digest"] for r in loaded} == {told["digest"]}


def refused(start: Path, **more: Any) -> str:
    run = Run(None, 2, {**OPTIONS, "kind": "ddp", "kwargs": {"start": str(start)}, **more})
    run.wait(codes=(1,))
    last = run.stderr[0].strip().splitlines()[-1].removeprefix("[rank0]: ")
    assert last.startswith(f"ValueError: cannot start from {start}"), run.stderr[0]
    return last


def test_a_model_of_another_size_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    assert "does not fit this training" in refused(where, width=48)


def test_a_damaged_tensor_is_noticed(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    file = where / "node-0000.h5"
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(b ^ 0xFF for b in data[middle : middle + 64])
    file.write_bytes(data)
    assert "damaged" in refused(where)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "nothing")
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "cannot be loaded as a file of torch.save" in refused(tmp_path / "text.pt")


def test_half_a_version_is_none(make_job: MakeJob, tmp_path: Path) -> None:
    where, _ = left(make_job, tmp_path, "ddp", 2)
    os.unlink(where / version.MANIFEST)
    assert "is not whole" in refused(where)
    assert "has no whole version" in refused(where.parent)
