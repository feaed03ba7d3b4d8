"""A rank is killed on healthy nodes: how long until the training goes on, under launchers and with a new step."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.bench import PYTHON, USER, MeasureError, Options, cluster, directory, wait_for
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
_WAYS = {"launcher": "-m gemini_hpc.launch", "new step": ""}
_ITERATION_S = 0.2
_BEFORE_S = 12.0  # of training: by then a launcher has imported what its rank has
_NODES = 2


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(7)
    took: dict[str, list[float]] = {way: [] for way in _WAYS}
    with cluster(_NODES) as on:
        for at in range(runs):
            for way, module in _WAYS.items():
                options.progress.say("launch", f"kill {at + 1} of {runs}, {way}")
                job = _Job(on, module)
                try:
                    took[way].append(job.recovery_s())
                finally:
                    job.end()
    return [
        median_row(
            "launch.rank_s",
            "SIGKILL of one of two ranks to the end of the first iteration after it, under launchers",
            "s",
            took["launcher"],
            peers={"gemini-hpc run alone: a new step": statistics.median(took["new step"])},
            baseline="gemini-hpc run alone: a new step",
        ),
        median_row("launch.step_s", "the same with gemini-hpc run alone", "s", took["new step"]),
    ]


class _Job:
    """A training on two nodes that ends when it is told to."""

    def __init__(self, on: Cluster, module: str) -> None:
        self._cluster = on
        where = directory(on)
        shutil.copy(_EXAMPLE, where / _EXAMPLE.name)
        self._log, self._out = where / "log", where / "out"
        script = where / "job.sh"
        words = f"{where / _EXAMPLE.name} --steps 100000 --workers 0 --iteration-s {_ITERATION_S} --log {self._log}"
        script.write_text(
            f"#!/bin/bash\nexec gemini-hpc run -- srun --kill-on-bad-exit=1 {PYTHON} {module} {words}\n"
        )
        script.chmod(0o755)
        options = [f"-N{_NODES}", "--ntasks-per-node=1", "--gemini-replicas=2", f"--output={self._out}"]
        self._id = on.sbatch([*options, str(script)], user=USER)

    def recovery_s(self) -> float:
        """Kill the rank that is not rank 0, once; seconds until an iteration has come to its end again."""
        self._reach(_BEFORE_S / _ITERATION_S)
        hosts = self._cluster.run(["scontrol", "show", "hostnames", self._cluster.job(self._id)["NodeList"]])
        node = hosts.stdout.split()[-1]
        rank = self._cluster.exec(node, ["pgrep", "-n", "-f", _EXAMPLE.name]).stdout.strip()
        began = time.time()
        done = self._cluster.exec(node, ["kill", "-9", rank])
        if done.returncode:
            raise MeasureError(f"no rank on {node}: {done.stderr}")
        found: list[float] = []

        def again() -> bool:
            found[:] = [e["t"] for e in self._events() if e["name"] == "first_iteration" and e["t"] > began]
            return bool(found)

        wait_for(f"job {self._id} goes on\n{self._output()}", again, 60, 0.5)
        resumed = [e["version"] for e in self._events() if e["name"] == "resumed" and e["t"] > began]
        if not resumed or min(resumed) == 0:
            raise MeasureError(f"job {self._id} did not resume: {resumed}\n{self._output()}")
        return min(found) - began

    def end(self) -> None:
        self._cluster.run(["scancel", str(self._id)])
        wait_for("the queue is empty", lambda: not self._cluster.run(["squeue", "-h"]).stdout.strip(), 60, 0.2)

    def _reach(self, steps: float) -> None:
        def there() -> bool:
            return self._log.exists() and self._log.read_text().count("\n") >= steps

        wait_for(f"job {self._id} makes {steps:.0f} iterations", there, 120, 0.2)

    def _events(self) -> list[dict[str, Any]]:
        done = self._cluster.run(["gemini-hpc", "inspect", str(self._id), "--json"], user=USER)
        if done.returncode:
            raise MeasureError(f"inspect: {done.stderr}")
        events: list[dict[str, Any]] = json.loads(done.stdout)["events"]
        return events

    def _output(self) -> str:
        return self._out.read_text()[-2000:] if self._out.exists() else ""
