"""Versions that a training keeps for good: `Checkpointer.keep`, beside real agents that save on a real directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from waiting import until

import gemini_hpc as gemini
from gemini_hpc.tier import names, version

from .agents import RealJob
from .fake_agent import FakeJob
from .launch import Run, train

pytestmark = pytest.mark.slow

STEPS = 24
SLOW = {"kind": "ddp", "steps": STEPS, "sleep_s": 0.15, "kwargs": {"transport": "host", "seal_timeout_s": 3.0}}
MakeJob = Callable[..., RealJob]


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


def given(tier: Path) -> dict[str, int]:
    """Names on the tier, and the number of the version that has each."""
    return {
        name: stamp.version for name, (_, stamp) in names.find_training_names(f"{tier}/gemini-81/default").items()
    }


def whole(tier: Path) -> list[int]:
    return sorted(manifest.stamp[1] for manifest in version.list_whole(f"{tier}/gemini-81/default"))


def state(tier: Path, job: RealJob) -> Any:
    return job.inspect(job.nodes[0]).trainings[0].tier


def events(job: RealJob, name: str) -> list[str]:
    logs = "".join(node.log() for node in job.all.values())
    return [line for line in logs.splitlines() if f" event={name} " in line]


def test_what_is_kept_stays_and_another_job_begins_there(real_job: MakeJob, tier: Path) -> None:
    """Every second version is saved anyway, two of them stay, and beside those the ones with a name."""
    job = real_job(2, 2, tier=tier, interval_s=1)
    running = Run(job, 2, {**SLOW, "steps": 40, "keep": {"6": "six", "14": "later"}})  # type: ignore[arg-type]
    results = running.wait()
    assert all(r["kept"] == {"six": True, "later": True} for r in results)
    until(lambda: set(given(tier)) == {"six", "later"}, what="both names are given")
    kept = given(tier)
    assert 6 <= kept["six"] < 14 <= kept["later"], "these, or the first ones after them that could be"
    left = whole(tier)
    others = set(left) - set(kept.values())
    assert len(left) == len(others) + 2 and len(others) <= 2, "both that were kept are left, and two of the others"
    assert min(left) == kept["six"]

    def told_of() -> set[int]:
        return {int(line.partition(" version=")[2].split()[0]) for line in events(job, "kept")}

    until(lambda: told_of() == set(kept.values()), what="both are in the log")
    told = state(tier, job)
    assert dict(told.kept).keys() == {"six", "later"} and not told.keeping
    # Another job, elsewhere, goes on from there as the first one did.
    again = train(None, 2, kind="ddp", steps=40, seed=5, kwargs={"start": f"{tier}/gemini-81@six"})
    assert [r["start"] for r in again] == [kept["six"]] * 2
    assert [r["digest"] for r in again] == [r["digest"] for r in results]


def test_one_rank_alone_or_twice(real_job: MakeJob, tier: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not collective; the same again changes nothing; another version does not get a name that is given."""
    job = real_job(2, 2, tier=tier)
    asked = {"4": "mine", "12": "mine", "14": "other"}
    running = Run(job, 2, {**SLOW, "keep": asked, "keepers": [1]})  # type: ignore[arg-type]
    results = running.wait()
    assert "kept" not in results[0] and results[1]["kept"] == {"mine": False, "other": True}
    assert (
        "version 12 is not kept as mine: version 4 already has this name, and a name cannot be given twice"
        in (running.stderr[1])
    )
    until(lambda: given(tier).keys() == {"mine", "other"}, what="both are kept")
    kept = given(tier)
    assert 4 <= kept["mine"] < 12 and kept["other"] >= 14, "that version, or the first after it that could be saved"
    assert whole(tier) == sorted(kept.values())


def test_the_last_version_is_kept_though_the_training_ends(real_job: MakeJob, tier: Path) -> None:
    job = real_job(2, 2, tier=tier)
    Run(job, 2, {**SLOW, "steps": 8, "keep": {"8": "final"}}).wait()  # type: ignore[arg-type]
    job.end("0")
    until(lambda: given(tier) == {"final": 8}, what="the last version is kept")
    until(lambda: all(node.ended() for node in job.nodes), what="the agents have gone")


def test_a_node_is_lost_while_a_version_is_being_kept(real_job: MakeJob, tier: Path) -> None:
    """The wish outlives the node that had it, and the version is kept in the next incarnation."""
    job = real_job(2, 2, tier=tier)
    os.rename(tier, tier.parent / "gone")  # as a file system that is away
    running = Run(job, 2, {**SLOW, "keep": {"6": "six"}, "keepers": [1], "die_at": 10})  # type: ignore[arg-type]
    running.wait(codes=(1,))
    until(lambda: state(tier, job).keeping == ("six",), what="the first node knows of it")
    job.all["n2"].die()
    os.rename(tier.parent / "gone", tier)
    job.requeue(["n1", "n3"])
    results = Run(job, 2, SLOW).wait()  # type: ignore[arg-type]
    assert all(r["start"] in (9, 10) for r in results)
    until(lambda: set(given(tier)) == {"six"}, what="a version has the name")
    assert given(tier)["six"] >= 9, "version 6 went with the node, or was overwritten"
    assert names.find_training_names(f"{tier}/gemini-81/default")["six"][0] == 6


def test_agents_die_while_a_version_is_being_kept(real_job: MakeJob, tier: Path) -> None:
    """All of them: the wish is on disk."""
    job = real_job(2, 2, tier=tier)
    os.rename(tier, tier.parent / "gone")
    running = Run(job, 2, {**SLOW, "keep": {"6": "six"}, "keepers": [1]})  # type: ignore[arg-type]
    until(
        lambda: "six" in (state(tier, job).keeping if job.inspect(job.nodes[0]).trainings else ()),
        what="it is wanted",
    )
    for node in job.nodes:
        node.die()
        node.start(again=True)
    os.rename(tier.parent / "gone", tier)
    running.wait()
    until(lambda: set(given(tier)) == {"six"}, what="a version has the name")


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    made = nn.Linear(3, 2)
    return made, torch.optim.SGD(made.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "name",
    ["", "..", ".", "a/b", "/a", "a" * 65, "a\n", "a\0", "ä", "-a", ".a", "a b", "a@b", None, 3, b"a"],
    ids=repr,
)
def test_what_cannot_be_a_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_SOCKET", raising=False)
    with gemini.Checkpointer(*model()) as ckpt, pytest.raises((ValueError, TypeError), match="a version's name"):
        ckpt.keep(name)


@pytest.mark.parametrize("agent", [True, False])
def test_where_nothing_can_be_kept(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], agent: bool
) -> None:
    """One line, and the training goes on."""
    if not agent:
        monkeypatch.delenv("GEMINI_SOCKET")
    net, optimizer = model()
    with gemini.Checkpointer(net, optimizer) as ckpt:
        assert ckpt.resume() == 0 and not ckpt.keep("early")
        for _ in range(3):
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            ckpt.step()
        assert ckpt.keep("a") is False
    said = [line for line in capfd.readouterr().err.splitlines() if "is not kept as" in line]
    assert len(said) == 2 and "version 0 is not kept as early: no step has been completed" in said[0], said
    assert "version 3 is not kept as a: " in said[1]


def test_a_job_without_a_tier_says_so(real_job: MakeJob) -> None:
    job = real_job(1, 1)
    steps = {"steps": 6, "keep": {"4": "four"}, "armed": True, "sealed_until": 4}
    running = Run(job, 1, steps)  # type: ignore[arg-type]
    (result,) = running.wait()
    assert result["kept"] == {"four": False} and result["report"]["state"] == "protected"
    assert running.stderr[0].count("is not kept as four: the job has no tier; submit it with --gemini-tier") == 1
