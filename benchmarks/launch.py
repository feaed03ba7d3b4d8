"""A rank is killed on healthy nodes: how long until the training goes on, under launchers and with a new step."""

from __future__ import annotations

import statistics
import time

from benchmarks.bench import MeasureError, Options, cluster
from benchmarks.launched_job import Job
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

_WAYS = {"launcher": "-m gemini_hpc.launch", "new step": ""}
_NODES = 2


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(7)
    took: dict[str, list[float]] = {way: [] for way in _WAYS}
    with cluster(_NODES) as on:
        for at in range(runs):
            for way, module in _WAYS.items():
                options.progress.say("launch", f"kill {at + 1} of {runs}, {way}")
                job = Job(on, _NODES, run="gemini-hpc run -- srun --kill-on-bad-exit=1", module=module)
                try:
                    took[way].append(_killed(options, on, job))
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


def _killed(options: Options, on: Cluster, job: Job) -> float:
    """Kill the rank that is not rank 0, once; seconds until an iteration has come to its end again."""
    job.warm(options)
    node = job.hosts()[-1]
    rank = on.exec(node, ["pgrep", "-n", "-f", "train_gpt.py"]).stdout.strip()
    began = time.time()
    done = on.exec(node, ["kill", "-9", rank])
    if done.returncode:
        raise MeasureError(f"no rank on {node}: {done.stderr}")
    return job.goes_on(began)["first_iteration"]
