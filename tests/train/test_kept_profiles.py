"""What does not change is sent once: later versions refer to what the holder's slot had."""

from __future__ import annotations

from typing import Any

import pytest

from gemini_hpc.core import ranges

from .conftest import HOST, Pause
from .launch import train
from .test_host import MakeJob, Start, both_hold

pytestmark = pytest.mark.slow

STEPS = 40
# Each version is sealed before the next step.
ADAPTER: dict[str, Any] = {"adapter": True, "width": 128, "steps": STEPS, "norm": "layer"}
ADAPTER |= {"armed": True, "sealed_until": STEPS}


def kept_share(result: dict[str, Any]) -> float:
    """The part of all offered bytes that the holder had already. An offered version need not become a saved one."""
    versions = result["report"]["versions"]
    return float(versions["kept_bytes"] / (versions["kept_bytes"] + versions["sent_bytes"]))


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "fsdp2"}, {"thaw_at": 30}, {"grow_at": 30}, {"large": True}],
    ids=lambda o: "".join(map(str, o)) or "ddp",
)
def test_an_adapter_is_all_that_travels_and_the_whole_state_comes_back(
    make_agents: MakeJob,
    start: Start,
    options: dict[str, Any],
) -> None:
    """Also where a tensor that had not changed is thawed, or written behind the version counter's back; a slot that
    is made larger has nothing of an earlier version."""
    settings = {**ADAPTER, **options}
    whole = train(None, 2, **{"kind": "ddp", **settings})
    job = make_agents(2, 2)
    start(job, die_at=25, **settings).wait(codes=(1,))
    job.all["n2"].die()
    job.requeue(["n1", "n3"])
    results = start(job, **settings).wait()
    assert {r["start"] for r in results} in ({24}, {25}), "one step repeated at most"
    assert [r["digest"] for r in results] == [r["digest"] for r in whole]
    for result in results:
        least = 0 if "grow_at" in options else 0.5  # what it grows by is never the same
        assert kept_share(result) > least, result["report"]["versions"]
        assert result["report"]["state"] == "protected"


def test_a_tensor_that_is_written_unseen_voids_one_version(make_agents: MakeJob, start: Start) -> None:
    job = make_agents(2, 2)
    settings = {**ADAPTER, "swap_at": 15}
    started = start(job, **settings, die_at=25)
    reports = [r["report"] for r in started.wait(codes=(1,))]
    assert sum(report["versions"]["void"] for report in reports) >= 1
    assert any("model.blocks.1.weight" in report["captured"]["eager"] for report in reports)
    job.requeue(["n1", "n2"])
    results = start(job, **settings).wait()
    whole = train(None, 2, kind="ddp", **settings)
    assert [r["digest"] for r in results] == [r["digest"] for r in whole], "the change is in what was sealed later"


def test_an_agent_that_dies_gets_the_next_version_whole(make_agents: MakeJob, start: Start, pause: Pause) -> None:
    """Its successor's slots are handed back; what it does not have is sent."""
    job = make_agents(2, 2)
    training = start(job, **ADAPTER, **pause.at(20), kwargs={**HOST, "scheme": "background"})
    pause.wait(20)
    both_hold(job, 20)
    job.nodes[1].die()
    job.nodes[1].start(again=True)
    pause.end(20)
    results = training.wait()
    both_hold(job, STEPS)
    assert all(r["report"]["sealed"][1] >= STEPS - 1 for r in results)


@pytest.mark.parametrize(
    ("given", "gap", "wanted"),
    [
        ([], 0, []),
        ([(5, 9), (0, 3)], 0, [(0, 3), (5, 9)]),
        ([(5, 9), (0, 3)], 2, [(0, 9)]),
        ([(0, 8), (2, 4), (8, 9)], 0, [(0, 9)]),
    ],
)
def test_ranges_are_merged(given: list[ranges.Range], gap: int, wanted: list[ranges.Range]) -> None:
    assert ranges.merge_ranges(given, gap) == wanted
    assert ranges.count_bytes(wanted) + ranges.count_bytes(ranges.list_gaps(wanted, 12)) == 12


def test_only_the_largest_ranges_go_into_a_message() -> None:
    many = [(10 * n, 10 * n + 1 + n % 5) for n in range(100)]
    found = ranges.choose_largest(many)
    assert len(found) == ranges.MOST and found == sorted(found)
    assert min(b - a for a, b in found) >= 2 and not ranges.find_fault(found, 1000)
    assert list(ranges.list_gaps([(0, 5), (7, 20)], 10)) == [(5, 7)]


@pytest.mark.parametrize(
    "odd",
    [
        [(3, 3)],
        [(0, 5), (4, 6)],
        [(5, 9), (0, 3)],
        [(0, 101)],
        [(0, 1), (2, 3)] * 33,
        [(n, n + 1) for n in range(65)],
    ],
)
def test_ranges_that_are_none_are_refused(odd: list[ranges.Range]) -> None:
    assert ranges.find_fault(odd, 100)
