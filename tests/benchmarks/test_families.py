"""The families of `make bench`: each runs, tiny, and gives the figures that it declares. No figure is looked at."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.families import FAMILIES, Family
from benchmarks.rows import Row

ROOT = Path(__file__).resolve().parents[2]
# Figures of plans; in a run of so few iterations there may be none.
OF_PLANS = re.compile(r"fig8\.|fig13\.(j|before|after)_|fig16\..*_j$")
UNITS = {"", "s", "ms", "us", "x", "GB/s", "MB/s", "1/s", "MB", "MiB", "iterations", "nodes", "steps", "core-s/GB"}
LIMIT_S = 280.0
EACH = [
    pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.cluster] if family.cluster else [])])
    for name, family in FAMILIES.items()
]


@pytest.mark.parametrize("name", EACH)
def test_a_tiny_run_gives_every_figure(tmp_path: Path, name: str) -> None:
    argv = [sys.executable, "-m", "benchmarks", "--only", name, "--tiny", "--json", "tiny.json"]
    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.terminate()  # it takes its cluster down
            raise
    assert process.returncode == 0, said[-4000:]
    rows = json.loads((tmp_path / "tiny.json").read_text())
    assert sorted(row["id"] for row in rows) == sorted(FAMILIES[name].names())
    for row in rows:
        is_unmeasured = OF_PLANS.match(row["id"]) and math.isnan(row["value"])
        assert (math.isfinite(row["value"]) or is_unmeasured) and row["unit"] in UNITS and row["ok"] is None, row
        assert f"\n{row['id']}  " in said, row
    assert "they say nothing" in said and not (tmp_path / "bench.json").exists()


def test_figures_that_a_program_names_are_declared_with_units_that_are_known() -> None:
    declared = {name for family in FAMILIES.values() for name in family.names()}
    found = 0
    for path in (ROOT / "benchmarks").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("Row", "median_row"):
                continue
            match call.args[:3]:
                case [ast.Constant(value=str(name)), _, ast.Constant(value=unit)] if "." in name:
                    assert name in declared and unit in UNITS, f"{path.name}: {name} in {unit!r}"
                    found += 1
    assert found > 20


def test_a_figure_that_is_missing_or_not_declared_is_told() -> None:
    family = Family("none", ("f.{a,b}_{s,ms}", "f.c"))
    assert family.names() == ["f.a_s", "f.a_ms", "f.b_s", "f.b_ms", "f.c"]
    rows = [Row(name, "", "s", 1.0) for name in family.names()]
    assert family.amiss(rows) == ""
    assert family.amiss([*rows[1:], rows[-1], Row("f.d", "", "s", 1.0)]) == "missing: f.a_s; not declared: f.c, f.d"
