"""What the option adds to the start of a job: the same trivial job with and without it, in turns.

Batch jobs give the bar's figure, for they are what the option is for. srun is shown beside: it asks Slurm in steps of
about 0.3 s whether its nodes are ready, so a prolog that takes a little longer costs it a whole step more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.bench import USER, MeasureError, Options, cluster, directory, wait_for
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

NODES = 3
_OPTION = "--gemini-replicas=2"
_NODES = (f"-N{NODES}", "--ntasks-per-node=1")
Start = Callable[[Cluster, list[str]], float]


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs = options.count(15)
    with cluster(NODES) as on:
        batch = _pairs(on, _sbatch, runs, options, "sbatch")
        direct = _pairs(on, _srun, runs, options, "srun")
    return [
        median_row(
            "prolog.added_s",
            f"{_OPTION} adds to the start of a batch job on {NODES} nodes: submission to the script at work, paired",
            "s",
            [with_it - without for without, with_it in batch],
            limit=0.5,
        ),
        _whole("prolog.start_s", "the batch job's start with it", batch),
        median_row(
            "prolog.srun_added_s",
            "the same for srun: to the last task at work; srun looks for ready nodes every 0.3 s or so",
            "s",
            [with_it - without for without, with_it in direct],
        ),
        _whole("prolog.srun_start_s", "srun's start with it", direct),
    ]


def _whole(id: str, what: str, pairs: list[tuple[float, float]]) -> Row:
    peers = {"without the option": statistics.median(without for without, _ in pairs)}
    return median_row(id, what, "s", [took for _, took in pairs], peers=peers, baseline="without the option")


def _pairs(on: Cluster, start: Start, runs: int, options: Options, name: str) -> list[tuple[float, float]]:
    """(without, with the option) for each run; the first one warms up."""
    found = []
    for turn in range(runs + 1):
        options.progress.say("prolog", f"{name}, pair {turn + 1} of {runs + 1}")
        took = {}
        for extra in ([], [_OPTION]) if turn % 2 else ([_OPTION], []):
            on.wait_idle()
            took[bool(extra)] = start(on, extra)
        found.append((took[False], took[True]))
    return found[1:]


def _sbatch(on: Cluster, extra: list[str]) -> float:
    """Seconds from the call of sbatch to its script at work."""
    out = directory(on) / "out"
    began = time.time()
    on.submit_job([*_NODES, f"--output={out}", *extra, "--wrap=date +%s.%N"], user=USER)
    wait_for("a trivial batch job starts", lambda: out.exists() and out.read_text().endswith("\n"), 30, 0.01)
    try:
        return float(out.read_text()) - began
    except ValueError:
        raise MeasureError(f"sbatch {' '.join(extra)}: {out.read_text()}") from None


def _srun(on: Cluster, extra: list[str]) -> float:
    """Seconds from the call of srun to the last of its tasks at work."""
    began = time.time()
    done = on.run(["srun", *_NODES, *extra, "date", "+%s.%N"], user=USER, timeout_s=60)
    if done.returncode or len(done.stdout.split()) != NODES:
        raise MeasureError(f"srun {' '.join(extra)}: {done.stdout} {done.stderr}")
    return max(map(float, done.stdout.split())) - began
