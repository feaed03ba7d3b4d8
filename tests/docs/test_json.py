"""docs/json.md has the keys of what `--json` prints: each list just those of its object."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.core.domains import Separation, Shared
from gemini_hpc.core.slots import Stamp
from gemini_hpc.forecast import goodput
from gemini_hpc.query.inspect_document import build_inspect_document
from gemini_hpc.wire.inspect_schema import CpuState, EventRecord, HeldSlot, InspectPart, TrainingState
from gemini_hpc.wire.traffic import TrafficState

from .json_fields import fields_of, with_fields, words_of
from .test_links import ROOT

JOB = ["--nodes", "64", "--state", "1TB", "--network", "200Gbps", "--iteration", "20"]
PAGE = (ROOT / "docs/json.md").read_text()


def keys(verb: str, heading: str = "") -> list[str]:
    """Return the keys in the lists below a heading of a verb's section; each document has `schema`, too."""
    part = PAGE.split(f"\n## {verb}\n")[1].split("\n## ")[0].split("\n### ")
    text = next(text for text in part if text.startswith(f"{heading}\n")) if heading else part[0]
    items = re.findall(r"^- ((?:`\w+`(?:, )?)+)(?: \(|:|$)", text, re.M)
    first = ["schema"] if heading in ("", "A figure") else []
    return [*first, *(key for item in items for key in re.findall(r"`(\w+)`", item))]


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    return found


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["plan", *JOB, "--memory", "1TB"], capsys)
    assert (list(found), list(found["failures"])) == (keys("plan"), keys("plan", "failures"))
    assert [list(one) for one in found["plans"]] == [[*keys("plan", "plans"), "domain_loss"]] * 4


def test_the_lines_that_slurm_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("PrologFlags=Alloc\n")
    assert main(["install", "--dry-run", "--json", "--slurm-conf", str(conf)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and list(found) == keys("install")
    assert [list(line) for line in found["lines"]] == [keys("install", "lines")] * 6


def test_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["simulate", *JOB, "--days", "9", "--schemes", "ours,jit"], capsys)
    assert (list(found), list(found["failures"])) == (keys("simulate"), keys("plan", "failures"))
    outcomes = [*keys("simulate", "An outcome"), "goodput"]
    assert [list(one) for one in found["schemes"].values()] == [outcomes, outcomes]
    outcome = found["schemes"]["ours"]
    parts = sum(outcome[part] for part in ("useful_s", "stalled_s", "repeated_s", "down_s"))
    assert parts == pytest.approx(outcome["total_s"])


def test_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["simulate", "--figure", "gemini-10"], capsys)
    assert list(found) == keys("simulate", "A figure")
    assert all(list(row) == keys("simulate", "rows") for row in found["rows"])


def test_goodput(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(goodput, "DAYS", 1.0)
    found = said(["simulate", "--figure", "goodput"], capsys)
    assert list(found) == [*keys("simulate", "A figure"), "published"]
    rows = len(next(iter(found["rows"])))
    listed = keys("simulate", "goodput")
    assert all(list(row) == listed[:rows] for row in found["rows"])
    assert all(list(one) == listed[rows:] for one in found["published"])


def test_inspect() -> None:
    held = HeldSlot("default", 0, 1, 0, 0, "complete", Stamp(1, 5), 100, 90, 1.0, 2.0)
    state = TrafficState(1.0, "gemini", "gloo", "steady")
    part = InspectPart(
        host="n1",
        job=7,
        uid=1,
        restart=0,
        replicas=1,
        epoch=1,
        round=1,
        state="live",
        hosts=("n1",),
        noderanks={"n1": 0},
        address="n1",
        interface="",
        port=1,
        memory_bytes=1,
        memory_cap_bytes=2,
        trainings=(TrainingState("default", 1, Stamp(1, 5), "protected", (0,), traffic=((0, state),)),),
        held=(held, replace_slot(held)),
        events=(EventRecord(1.0, "detected", "n1", 0), EventRecord(2.0, "down", "n1", 0)),
        suspects=(),
        dead=(),
        spares=1,
        domains=Separation(1, (Shared("rack1", ("n1", "n2")),)),
        cpu=CpuState(0.1, 0.5, 0.3, 0.2),
    )
    found = build_inspect_document(7, [part], [], {"state": "RUNNING", "nodes": "n1"}, (), "controller", 3.0)
    assert found["schema"] == 1
    training = found["trainings"][0]
    for heading, one in (
        ("", found),
        ("nodes", found["nodes"][0]),
        ("trainings", training),
        ("shards", training["shards"][0]),
        ("survival", training["survival"]),
        ("recoveries and events", found["events"][0]),
    ):
        assert sorted(keys("inspect", heading)) == sorted(one), heading
    assert ["rank", "host", *keys("inspect", "traffic")] == list(training["traffic"][0])
    over = build_inspect_document(
        7, [], [EventRecord(3.0, "ended", "", 0, 5, "FAILED 1:0")], {"state": "FAILED"}, (), "agents", 4.0
    )
    assert sorted(keys("inspect", "ended")) == sorted(over["ended"])
    inner = [
        found["nodes"][0]["cpu"],
        found["spares"],
        found["domains"],
        found["recoveries"][0],
        *found["domains"]["shared"],
    ]
    inner += [*training["shards"][0]["holders"], *found["recoveries"][0]["events"]]
    named = {word for span in re.findall(r"`([^`]+)`", PAGE) for word in re.findall(r"\w+", span)}
    assert {key for one in inner for key in one} <= named


def replace_slot(slot: HeldSlot) -> HeldSlot:
    """Return the other slot of the shard, empty."""
    return HeldSlot(slot.training, slot.rank, slot.world, slot.home, 1, "empty", None, 100, 0, 1.0, 0.0)


def test_each_list_is_made_from_its_class() -> None:
    assert with_fields(PAGE) == PAGE, "python -m tests.docs.tables writes it anew"
    assert PAGE.count("<!-- ") == 12


def test_a_field_without_words_is_noticed() -> None:
    @dataclass
    class Said:
        """Some fields.

        Attributes:
            a_s: The first,
                in two lines.
            b: The second.
        """

        a_s: float
        b: str | None

    assert words_of(Said) == {"a_s": "the first, in two lines.", "b": "the second."}
    assert fields_of(Said) == "- `a_s`: the first, in two lines.\n- `b` (string?): the second.\n"
    Said.__doc__ = "Some fields."
    with pytest.raises(AssertionError, match="docstring"):
        fields_of(Said)
