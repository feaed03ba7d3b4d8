"""How long `gemini-hpc inspect` takes on a running job."""

from __future__ import annotations

import statistics
import time

from benchmarks.bench import PYTHON, USER, MeasureError, Options, TrainingJob, cluster
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

NODES = 3
_STATE_BYTES = 10_000_000


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs, nodes = options.count(15), options.pick(NODES, 2)
    with cluster(nodes) as on:
        plan = ["--bytes", str(_STATE_BYTES), "--iteration", "0.3", "--plan", "first,gemini:1000000"]
        job = TrainingJob(on, nodes, 2, plan)
        options.progress.say("inspect", "starting a training")
        job.wait_line("first", nodes, 120)
        text, document, python = (
            [_wall(on, argv, expect) for _ in range(runs + 1)][1:]
            for argv, expect in (
                (["gemini-hpc", "inspect", str(job.id)], "may be lost"),
                (["gemini-hpc", "inspect", str(job.id), "--json"], '"schema"'),
                ([PYTHON, "-I", "-c", "pass"], ""),
            )
        )
        job.check()
        job.cancel()
    bare = {"python -I -c pass": statistics.median(python)}
    return [
        median_row(
            "inspect.wall_s",
            f"gemini-hpc inspect JOBID on a training of {nodes} nodes, from the login side",
            "s",
            text,
            limit=0.5,
            peers=bare,
            baseline="python -I -c pass",
        ),
        median_row("inspect.json_wall_s", "the same with --json", "s", document),
    ]


def _wall(on: Cluster, argv: list[str], expect: str) -> float:
    began = time.monotonic()
    done = on.run(argv, user=USER)
    took = time.monotonic() - began
    if done.returncode or expect not in done.stdout:
        raise MeasureError(f"{' '.join(argv)}: status {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return took
