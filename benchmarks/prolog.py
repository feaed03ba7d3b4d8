"""What the option adds to the start of a job: the same trivial job with and without it, in turns."""

from __future__ import annotations

import statistics
import time

from benchmarks.bench import USER, MeasureError, Options, cluster
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

NODES = 3


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(15)
    plain: list[float] = []
    protected: list[float] = []
    with cluster(NODES) as on:
        for turn in range(runs + 1):
            options.progress.say("prolog", f"pair {turn + 1} of {runs + 1}")
            pair = [(plain, []), (protected, ["--gemini-replicas=2"])]
            for found, extra in pair if turn % 2 else reversed(pair):
                took = _start(on, extra)
                if turn:  # the first pair warms up
                    found.append(took)
    return [
        median_row(
            "prolog.added_s",
            f"--gemini-replicas=2 adds to the start of a job on {NODES} nodes: submission to the last task at work, "
            "paired",
            "s",
            [b - a for a, b in zip(plain, protected, strict=True)],
            limit=0.5,
        ),
        median_row(
            "prolog.start_s",
            "the start with it",
            "s",
            protected,
            peers={"without the option": statistics.median(plain)},
            baseline="without the option",
        ),
    ]


def _start(on: Cluster, extra: list[str]) -> float:
    """Seconds from the call of srun to the last of its tasks at work."""
    on.wait_idle()
    began = time.time()
    done = on.run(["srun", f"-N{NODES}", "--ntasks-per-node=1", *extra, "date", "+%s.%N"], user=USER, timeout_s=60)
    if done.returncode or len(done.stdout.split()) != NODES:
        raise MeasureError(f"srun {' '.join(extra)}: {done.stdout} {done.stderr}")
    return max(map(float, done.stdout.split())) - began
