"""What of a state travels that need not: replicated tensors, frozen ones; and what large late tensors cost in step().

Two ranks on two nodes with real agents (m = 2), see `programs/shares.py`. Counted are the bytes of chunks that
went to the holder, small state and headers among them; a version's share is of that rank's whole copy, or of what
changes in it.
"""

from __future__ import annotations

import statistics

from benchmarks.bench import Line, MeasureError, Options, TrainingJob, cluster
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

RANKS = 2


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    with cluster(RANKS) as on:
        ddp, lora = run(options, on, "ddp"), run(options, on, "lora")
    return [
        median_row(
            "traffic.ddp_share",
            "plain DDP on 2 nodes: bytes on the network a version, of this rank's part of the state",
            "",
            _shares(ddp, "copy"),
            limit=0.01,
        ),
        median_row(
            "traffic.lora_share",
            "one trained layer of 12, FSDP2: bytes on the network a version, of what changes",
            "",
            _shares(lora, "changing"),
            limit=1.1,
        ),
    ]


def late_row(options: Options, on: Cluster) -> Row:
    """For the family `save`."""
    lines = run(options, on, "late")
    size = max(line["late_bytes"] for line in lines) / 1e6
    return median_row(
        "save.late_step_ms",
        f"in step() with an average of {size:.1f} MB that appeared in mid-training",
        "ms",
        [1e3 * statistics.median(line["step_s"] for line in lines if line["rank"] == rank) for rank in range(RANKS)],
        limit=3.0,
    )


def run(options: Options, on: Cluster, mode: str) -> list[Line]:
    """The settled versions of both ranks. Raises MeasureError where they are not protected."""
    job = TrainingJob(on, RANKS, 2, ["--mode", mode, "--steps", str(options.pick(60, 18))], "shares.py")
    job.finish(300, lambda: options.progress.say(f"traffic, {mode}", f"{len(job.lines())} versions"))
    lines = [line for line in job.lines("version") if line["settled"]]
    if not lines or any(line["state"] != "protected" for line in lines):
        raise MeasureError(f"traffic, {mode}: the training was not protected throughout")
    return lines


def _shares(lines: list[Line], of: str) -> list[float]:
    """By rank, of all settled versions together."""
    ranks = [[line for line in lines if line["rank"] == rank] for rank in range(RANKS)]
    return [sum(line["sent"] for line in mine) / sum(line[of] for line in mine) for mine in ranks]
