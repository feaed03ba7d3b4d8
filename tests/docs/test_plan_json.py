"""docs/plan-json.md has the keys of `plan --json` and `simulate --json`, each table just those of its object."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gemini_hpc.cli.main import main
from gemini_hpc.forecast import goodput

from .test_faults import in_code, tables
from .test_links import ROOT

JOB = ["--nodes", "64", "--state", "1TB", "--network", "200Gbps", "--iteration", "20"]
TABLES = [
    [key for row in table for key in in_code(row["key"])]
    for table in tables((ROOT / "docs/plan-json.md").read_text())
]
FAILURES, PLAN, ONE_PLAN, SIMULATION, OUTCOME, FIGURE, VALUE, GOODPUT, PUBLISHED = TABLES


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    return found


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["plan", *JOB, "--memory", "1TB"], capsys)
    assert (list(found), list(found["failures"])) == (PLAN, FAILURES)
    assert [list(one) for one in found["plans"]] == [ONE_PLAN] * 4


def test_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["simulate", *JOB, "--days", "9", "--schemes", "ours,jit"], capsys)
    assert (list(found), list(found["failures"])) == (SIMULATION, FAILURES)
    assert [list(one) for one in found["schemes"].values()] == [OUTCOME, OUTCOME]
    outcome = found["schemes"]["ours"]
    parts = sum(outcome[part] for part in ("useful_s", "stalled_s", "repeated_s", "down_s"))
    assert parts == pytest.approx(outcome["total_s"])


def test_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["simulate", "--figure", "gemini-10"], capsys)
    assert list(found) == FIGURE and all(list(row) == VALUE for row in found["rows"])


def test_goodput(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(goodput, "DAYS", 1.0)
    found = said(["simulate", "--figure", "goodput"], capsys)
    assert list(found) == [*FIGURE, "published"]
    assert all(list(row) == GOODPUT for row in found["rows"])
    assert all(list(one) == PUBLISHED for one in found["published"])


def test_each_key_says_what_it_is() -> None:
    text = (ROOT / "docs/plan-json.md").read_text()
    typed = re.findall(r"^\| `\w+`(?:, `\w+`)* \| ([^|]+) \|", text, re.M)
    assert len(typed) == sum(len(table) for table in TABLES) - 1, "every and over share a row"
