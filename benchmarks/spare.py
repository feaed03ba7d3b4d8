"""A node loses power in a job that has a spare: how long until the training goes on, and of what that consists."""

from __future__ import annotations

import time

from benchmarks.bench import Options, cluster
from benchmarks.launched_job import Job
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

_NODES, _SPARES = 4, 1
_PARTS = {
    "without": "the agents have found the node dead, and go on without it",
    "agreed": "they agree on map, epoch and version; launchers fork the ranks",
    "resumed": "ranks have loaded their state",
}


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(5)
    cuts: list[dict[str, float]] = []
    for at in range(runs):
        options.progress.say("spare", f"cut {at + 1} of {runs}")
        with cluster(_NODES + 1) as on:
            cuts.append(_cut(options, on))
    totals = [cut["first_iteration"] for cut in cuts]
    rows = [
        median_row(
            "spare.total_s",
            "power cut of one of three training nodes to the end of the first iteration after it, with a spare",
            "s",
            totals,
            goal=3,
        ),
        Row("spare.total_worst_s", "the longest of them", "s", max(totals), tuple(totals)),
    ]
    return rows + [
        median_row(f"spare.{name}_s", f"of it, until {what}", "s", [cut[name] for cut in cuts])
        for name, what in _PARTS.items()
    ]


def _cut(options: Options, on: Cluster) -> dict[str, float]:
    asked = ("--no-kill", f"--gemini-spares={_SPARES}")
    job = Job(on, _NODES, run="srun", module="-m gemini_hpc.launch", options=asked)
    try:
        job.warm(options)
        victim, began = job.hosts()[1], time.time()
        on.cut_power(victim)
        return job.goes_on(began)
    finally:
        job.end()
