"""Measure the ceiling: the cost of copies for trainings whose iterations may be shorter than a seal.

Each rank has `state_bytes` of state, all of which changes in each iteration; compute is a sleep (see
`programs/trainer.py`). After the first seal and the first plan, blocks of iterations with and without checkpoints
take turns in one job. A row is the median of the blocks' mean iterations with checkpoints, each against the blocks
without before and after it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.bench import Line, Options, TrainingJob, cluster
from benchmarks.rows import Row, median_row

BLOCKS, WITH, WITHOUT = 4, 48, 12
TIMEOUT_S = 1800.0
LIMIT = 1.01


@dataclass(frozen=True)
class Setting:
    """One training: a rank on each of `nodes` nodes, `replicas` copies of its state, iterations of `length_s`."""

    row: str
    nodes: int
    replicas: int
    length_s: float


SETTINGS = (
    Setting("own_01", 1, 1, 0.1),
    Setting("own_05", 1, 1, 0.5),
    Setting("pair_own_01", 2, 1, 0.1),
    Setting("host_01", 2, 2, 0.1),
    Setting("host_1", 2, 2, 1.0),
)


def measure(options: Options) -> list[Row]:
    """Return all rows of the family."""
    rows = list[Row]()
    with cluster(2) as on:
        for setting in SETTINGS:
            blocks = options.count(BLOCKS)
            turns = f"none:{options.pick(WITHOUT, 3)},gemini:{options.pick(WITH, 6)}"
            plan = ",".join(["first", "settle", *[turns] * blocks, f"none:{options.pick(WITHOUT, 3)}"])
            words = ["--bytes", str(options.state_bytes), "--iteration", str(setting.length_s), "--plan", plan]
            job = TrainingJob(on, setting.nodes, setting.replicas, words)
            _finish(options, job, setting, blocks)
            rows += _rows(setting, job.lines(), options.state_bytes)
    return rows


def _finish(options: Options, job: TrainingJob, setting: Setting, blocks: int) -> None:
    def meanwhile() -> None:
        last = job.lines("iteration")[-1:]
        where = f"block {last[0]['block']} of {2 * blocks + 1}" if last else "starting"
        options.progress.say(f"ceiling.{setting.row}", where)

    job.finish(TIMEOUT_S, meanwhile)


def _rows(setting: Setting, lines: list[Line], state_bytes: int) -> list[Row]:
    lengths: dict[tuple[int, str], list[float]] = defaultdict(list)
    for line in lines:
        if line["what"] == "iteration" and line["index"] and line["rank"] == 0:
            lengths[line["block"], line["mode"]].append(line["seconds"])
    mean = {key: statistics.mean(seconds) for key, seconds in lengths.items()}
    ratios = [
        seconds / statistics.mean([mean[block - 1, "none"], mean[block + 1, "none"]])
        for (block, mode), seconds in mean.items()
        if mode == "gemini"
    ]
    told = [line for line in lines if line["what"] == "traffic" and line["rank"] == 0][-1]
    where = f"{setting.nodes} nodes, m = {setting.replicas}, {state_bytes / 1e9:g} GB a rank, {setting.length_s:g} s"
    peers = {"j": float(told["j"]), "s": float(told["s"]), "sealed_s": float(told["sealed_s"])}
    first = max(line["waited_s"] for line in lines if line["what"] == "first")
    return [
        median_row(
            f"ceiling.{setting.row}",
            f"{where}: iteration against one without checkpoints",
            "x",
            ratios,
            limit=LIMIT,
            peers=peers,
        ),
        Row(
            f"ceiling.{setting.row}_first",
            f"{where}: what the training waits until its first version is sealed",
            "s",
            first,
            limit=5.0,
        ),
    ]
