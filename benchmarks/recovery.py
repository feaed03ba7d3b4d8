"""A node loses its power: `gemini-hpc demo` measures how long until the job trains again, and whose time that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import faults
from benchmarks.bench import MeasureError, Options
from benchmarks.rows import Row, median_row
from gemini_hpc.cli import demo
from gemini_hpc.config import Settings
from gemini_hpc.devcluster.profiles import PROFILES

_STEPS_A_CUT = 25
_BUDGET = Settings().fence_budget_nodes
_TOTAL = "power cut to the end of the first new iteration"
_OWN = "our own share of it: what is marked with * below; the rest is Slurm's and Python's"
_SLURM = "Slurm's own: DOWN to pending, and pending to running beyond the 2 s that we ask for (own_s counts that too)"
_START_MARGIN_S = 2.0
# (figure, what, from, to): the parts of a recovery, one after the other; ours marked with a star
_PARTS = (
    ("detect_s", "* cut to detected by its peers", "cut", "detected"),
    ("confirm_s", "* detected to confirmed by the controller", "detected", "confirmed"),
    ("fence_s", "* confirmed to DOWN (survivors reserved)", "confirmed", "down"),
    ("requeue_s", "DOWN to pending again: Slurm ends the step, epilogs", "down", "requeued"),
    ("start_s", "* pending to running: the start margin that we ask Slurm for", "requeued", "running"),
    ("agree_s", "* running to agents agreed: prolog, start of the new agent, inventory", "running", "agreed"),
    ("python_s", "agreed to imports done: the step starts, Python imports torch", "agreed", "imports_done"),
    ("load_s", "* imports done to state loaded: processes meet, resume()", "imports_done", "resumed"),
    ("iterate_s", "* state loaded to the end of the first new iteration", "resumed", "first_iteration"),
)


def measure(options: Options) -> list[Row]:
    """All rows of the family: with the development cluster's tuned timers, then, without bars, as sites run Slurm."""
    cuts = _cuts(options, "fast", 5)
    totals, owns = [cut["total_s"] for cut in cuts], [cut["own_s"] for cut in cuts]
    lost = [cut["lost"] for cut in cuts]
    rows = [
        median_row("recovery.total_s", _TOTAL, "s", totals, limit=12, goal=7),
        Row("recovery.total_worst_s", "the longest of them", "s", max(totals), tuple(totals)),
        median_row("recovery.own_s", _OWN, "s", owns, limit=4, goal=2),
        Row("recovery.own_worst_s", "the longest of them", "s", max(owns), tuple(owns)),
        Row(
            "recovery.lost_iterations",
            "completed iterations that are repeated, the most seen",
            "iterations",
            max(lost),
            tuple(lost),
            limit=1,
        ),
        *_part_rows(cuts, ""),
    ]
    for profile in ("stock", "site"):
        cuts = cuts if options.tiny else _cuts(options, profile, 4)
        rows += [
            median_row(f"recovery.total_s.{profile}", _TOTAL, "s", [cut["total_s"] for cut in cuts]),
            median_row(f"recovery.own_s.{profile}", _OWN, "s", [cut["own_s"] for cut in cuts]),
            median_row(f"recovery.slurm_s.{profile}", _SLURM, "s", [_slurms(_moments(cut)) for cut in cuts]),
            *_part_rows(cuts, f".{profile}"),
        ]
    return rows + faults.measure(options)


def _slurms(moments: dict[str, float]) -> float:
    ending = moments["requeued"] - moments["down"]
    return ending + max(0.0, moments["running"] - moments["requeued"] - _START_MARGIN_S)


def _part_rows(cuts: list[dict[str, Any]], suffix: str) -> list[Row]:
    rows = []
    moments = [_moments(cut) for cut in cuts]
    for name, what, since, until in _PARTS:
        took = [m[until] - m[since] for m in moments if since in m and until in m]
        if took:
            rows.append(median_row(f"recovery.{name}{suffix}", what, "s", took))
    pulled = [m["pulled"] - m["agreed"] for m in moments if "pulled" in m and "agreed" in m]
    if pulled:
        what = "agreed to pulled from the peers, hidden by Python's imports"
        rows.append(median_row(f"recovery.pull_s{suffix}", what, "s", pulled))
    return rows


def _moments(cut: dict[str, Any]) -> dict[str, float]:
    """Seconds after the cut, by the name of the event."""
    names = {text: name for name, text in demo._TIMELINE}
    found = {"cut": 0.0, **{names[text]: t for t, text, _ in cut["rows"] if text in names}}
    if "agreed" in found and "running" in found:  # the controller may hear of the start later than the agents
        found["agreed"] = max(found["agreed"], found["running"])
    return found


def _cuts(options: Options, profile: str, usual: int) -> list[dict[str, Any]]:
    """The figures of so many cuts; of one cluster no more than its controller's budget allows."""
    wanted, most = options.count(usual), PROFILES[profile].gemini.get("fence_budget_nodes", _BUDGET)
    found: list[dict[str, Any]] = []
    while len(found) < wanted:
        found += _of_one_cluster(options, profile, min(int(most), wanted - len(found)))
    return found


def _of_one_cluster(options: Options, profile: str, runs: int) -> list[dict[str, Any]]:
    steps = options.pick(_STEPS_A_CUT, 10) * (runs + 1)
    with tempfile.TemporaryDirectory() as directory:
        figures, log = Path(directory) / "demo.json", Path(directory) / "log"
        argv = [sys.executable, "-m", "gemini_hpc.cli.main", "demo", "--name", f"bench{os.getpid()}"]
        argv += ["--profile", profile]
        argv += ["--cuts", str(runs), "--steps", str(steps), "--json", str(figures)]
        with log.open("w") as out, subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT) as process:
            try:
                while True:
                    try:
                        process.wait(2)
                        break
                    except subprocess.TimeoutExpired:
                        last = log.read_text().strip().splitlines()[-1:]
                        options.progress.say("recovery", f"{profile}: {last[0].strip()}" if last else profile)
            except BaseException:
                process.terminate()
                raise
        if process.returncode or not figures.exists():
            raise MeasureError(f"the demo failed:\n{log.read_text()[-3000:]}")
        cuts: list[dict[str, Any]] = json.loads(figures.read_text())["cuts"]
    if len(cuts) != runs:
        raise MeasureError(f"{len(cuts)} recoveries in the demo's figures, {runs} wanted")
    return cuts
