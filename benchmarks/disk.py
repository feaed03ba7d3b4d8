"""A user's own model, checkpointed to a file and in memory: examples/disk_or_memory.py with one rank and with four.

The measures, and three runs, are those of the KAUST report (Albahrani and Alkhalifah, 2025, tables 1 and 2), which
has 100 iterations, a file after every 25th, and 2.5 GB on A100 GPUs. Here it is 40, every tenth and 0.3 GB: all nodes
share one machine, its two cores and its disk.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.bench import PYTHON, USER, MeasureError, Options, cluster, directory, wait_for
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_NAME = "disk_or_memory"
_WORDS = ("--iterations", "40", "--every", "10")
_TINY = ("--iterations", "10", "--every", "4", "--model", "tiny:build")
_MODEL = """
import torch
def build():
    return torch.nn.Linear(8, 8), lambda model: model(torch.ones(1, 8)).sum()
"""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def measure(options: Options) -> list[Row]:
    """All rows of the family."""

    def run(ranks: int) -> list[dict[str, dict[str, float]]]:
        found: list[dict[str, dict[str, float]]] = []
        with cluster(ranks) as on:
            for number in range(options.count(3)):
                options.progress.say("disk", f"{ranks} ranks: run {number + 1}")
                found.append(_once(options, on, ranks))
        return found

    return [row for ranks, found in options.each((1, 4), 2, run) for row in _rows(ranks, found)]


def _once(options: Options, on: Cluster, ranks: int) -> dict[str, dict[str, float]]:
    where = directory(on)
    for suffix in (".py", ".sh"):
        shutil.copy(_EXAMPLES / f"{_NAME}{suffix}", where)
    (where / "tiny.py").write_text(_MODEL)
    asked = [f"-N{ranks}", f"--gemini-replicas={min(2, ranks)}", f"--output={where}/out", f"--chdir={where}"]
    job = on.submit_job(
        [*asked, str(where / f"{_NAME}.sh"), *options.pick(_WORDS, _TINY)], user=USER, env={"PYTHON": PYTHON}
    )
    wait_for("the job ends", lambda: on.read_job(job).get("JobState") in _ENDED, 300.0, 0.5)
    said = (where / "out").read_text()
    if on.read_job(job).get("JobState") != "COMPLETED":
        raise MeasureError(said)
    notes = [json.loads(line) for line in (where / f"{_NAME}.{job}.jsonl").read_text().splitlines()]
    return {way: _figures([note for note in notes if note["way"] == way]) for way in ("disk", "memory")}


def _figures(notes: list[dict[str, Any]]) -> dict[str, float]:
    by_name = {note["name"]: note for note in notes}
    killed, back = by_name["killed"], by_name["back"]
    if not back["iteration"]:
        raise MeasureError("it began at the first iteration again")
    saves = sorted(killed["saves"])
    return {
        "save_ms": 1000 * saves[len(saves) // 2],
        "load_ms": 1000 * back["seconds"],
        "rate": killed["rate"],
        "repeated": killed["iteration"] - back["iteration"],
    }


def _rows(ranks: int, found: list[dict[str, dict[str, float]]]) -> list[Row]:
    rows = []
    for name, what, unit in (
        ("save_ms", "a checkpoint keeps the training waiting", "ms"),
        ("load_ms", "model and optimizer are loaded after a SIGKILL", "ms"),
        ("rate", "iterations a second", "1/s"),
        ("repeated", "iterations that are repeated after the SIGKILL", ""),
    ):
        for way in ("disk", "memory"):
            of = "one rank" if ranks == 1 else f"{ranks} ranks"
            rows.append(
                median_row(
                    f"disk.{way}{ranks}_{name}", f"{way}, {of}: {what}", unit, [run[way][name] for run in found]
                )
            )
    return rows
