"""Pipeline parallelism: how much later each stage's optimizer comes when checkpoints are sent to the peers.

Real Slurm nodes, one stage (rank) on each, m = 2, `programs/pipeline.py`: torch's 1F1B schedule with twice as many
micro-batches as stages, Adam in fp32. A micro-batch takes a stage f seconds forward and 2f backward, and A bytes to
the next stage and back:

                 links         f           micro-batches   A         A/B      C         C/B
    2 stages     1 Gbit/s      20 ms       4               1.06 MB   9.1 ms   18.8 MB   0.161 s
    4 stages     500 Mbit/s    40 ms       8               0.53 MB   9.1 ms   18.8 MB   0.322 s

Two cores do not drive four stages of 20 ms: their iterations differ by 15 % without any checkpoints.

Stages launch different operations, and reach their optimizers one after the other, the last stage first: what a rank
sends has to fit in time in which its peer is silent as well, before the first of them waits for it.

A round goes through the schemes as in `interleave.py`. An iteration counts from the moment when the state of the one
before is complete; the optimizers' times of all stages count from that moment on the first stage, so that a stage
that waits is seen also where a bubble of the pipeline hides it. Delays are against no checkpoints in the same round.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.bench import Line, MeasureError, Options, TrainingJob, cluster
from benchmarks.interleave import BASELINE, LIMITS, LOOK_S, RATE, SCHEMES, prepare, stated
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

ROUNDS, WARM, MEASURED = 15, 2, 4
TIMEOUT_S = 900.0
USED = (BASELINE, "blocking", "background", "gemini")


@dataclass(frozen=True)
class Setting:
    """One training. forward_s: emulated compute of a block in the forward pass; rows: of a micro-batch."""

    stages: int
    forward_s: float
    rows: int
    rate: str = RATE
    dim: int = 208
    blocks: int = 3

    @property
    def microbatches(self) -> int:
        return 2 * self.stages

    @property
    def activation_bytes(self) -> int:
        """A."""
        return 4 * self.rows * self.dim


TINY = Setting(4, 0.005, 16, dim=32, blocks=1)
SETTINGS = (Setting(2, 0.00667, 1280), Setting(4, 0.01333, 640, "500mbit"))


@dataclass(frozen=True)
class Found:
    """What a training showed, as the ranks' lines of what counts. traffic: of rounds with a plan, of which there is
    the share `planned`; in the others the training was profiled anew, which counts as well."""

    setting: Setting
    iterations: list[Line]
    rate: tuple[float, ...]
    checkpoint_bytes: int
    traffic: list[Line]
    planned: float

    @property
    def sending_s(self) -> float:
        """C/B."""
        return self.checkpoint_bytes / statistics.median(self.rate)

    def seconds(self, scheme: str) -> dict[int, float]:
        """By round, the mean iteration of the first stage."""
        return _means((i["round"], i["seconds"]) for i in self.iterations if i["scheme"] == scheme and not i["rank"])

    def ratios(self, scheme: str) -> list[float]:
        """Of that to the same without checkpoints, one for each round."""
        bare = self.seconds(BASELINE)
        return [seconds / bare[number] for number, seconds in self.seconds(scheme).items()]

    def optimizer(self, scheme: str, stage: int, what: str = "went") -> dict[int, float]:
        """By round: when this stage came to its optimizer, or went on there, from the first stage's beginning."""
        began = {
            (i["round"], i["index"]): i["began"] for i in self.iterations if i["scheme"] == scheme and i["rank"] == 0
        }
        return _means(
            (i["round"], i[what] - began[i["round"], i["index"]])
            for i in self.iterations
            if i["scheme"] == scheme and i["rank"] == stage
        )

    def delays(self, scheme: str, stage: int) -> list[float]:
        """How much later this stage's optimizer begins than without checkpoints, one for each round."""
        bare = self.optimizer(BASELINE, stage)
        return [at - bare[number] for number, at in self.optimizer(scheme, stage).items()]

    def waits(self, scheme: str, stage: int) -> list[float]:
        """How long this stage waits at its optimizer."""
        came = self.optimizer(scheme, stage, "came")
        return [went - came[number] for number, went in self.optimizer(scheme, stage).items()]


def _means(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for number, value in pairs:
        found[number].append(value)
    return {number: statistics.mean(values) for number, values in sorted(found.items())}


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rounds = options.count(ROUNDS)

    def run(setting: Setting) -> Found:
        with cluster(setting.stages) as on:
            prepare(on, setting.rate)
            return train(options, on, setting, rounds)

    trained = options.each(SETTINGS, TINY, run)
    return [row for setting, found in trained for row in _rows(replace(found, setting=setting))]


def train(options: Options, on: Cluster, setting: Setting, rounds: int) -> Found:
    """One job."""
    words = {
        "--schemes": ",".join(USED),
        "--rounds": rounds,
        "--warm": WARM,
        "--measured": MEASURED,
        "--microbatches": setting.microbatches,
        "--rows": setting.rows,
        "--dim": setting.dim,
        "--blocks": setting.blocks,
        "--forward": setting.forward_s,
    }
    argv = [str(word) for pair in words.items() for word in pair]
    job = TrainingJob(on, setting.stages, 2, argv, "pipeline.py", beside=["interleave.py"])

    def meanwhile() -> None:
        last = job.lines("iteration")[-1:]
        where = f"round {last[0]['round'] + 1} of {rounds}" if last else "starting"
        options.progress.say(f"pp, {setting.stages} stages", where)

    job.finish(TIMEOUT_S, meanwhile, LOOK_S)
    traffic = [line for line in job.lines("traffic") if line["scheme"] == "gemini"]
    planned = [line for line in traffic if line["stage"] == "steady" and not line["problem"] and line["chunks"]]
    if len({line["rank"] for line in planned}) < setting.stages:
        raise MeasureError(f"job {job.id}: not all stages ever had a plan: {traffic[-1]}")
    return Found(
        setting,
        [line for line in job.lines("iteration") if line["index"] >= 0],
        tuple(line["bytes_per_s"] for line in job.lines("rate") if line["rank"] == 0),
        max(line["bytes"] for line in job.lines("checkpoint")),
        planned,
        len(planned) / len(traffic),
    )


def _rows(found: Found) -> list[Row]:
    stages = found.setting.stages
    bare = list(found.seconds(BASELINE).values())
    usual_s = statistics.median(bare)
    where = f"{stages} stages"
    rows = [
        median_row(f"pp.none_{stages}", f"{where}: length of an iteration without checkpoints", "s", bare),
        Row(
            f"pp.idle_{stages}",
            f"{where}: idle time that a stage has in common with its peer before the first optimizer, against C/B; "
            f"of the stage that has least; C = {found.checkpoint_bytes / 1e6:.1f} MB",
            "x",
            min(line["common_s"] for line in found.traffic) / found.sending_s,
            peers={
                "alone": min(line["idle_s"] for line in found.traffic) / found.sending_s,
                "C/B in s": found.sending_s,
                "C planned in spans": min(
                    line["fitting_bytes"] / (line["fitting_bytes"] + line["spilled_bytes"]) for line in found.traffic
                ),
                "rounds with a plan": found.planned,
                "j": max(line["j"] for line in found.traffic),
            },
        ),
    ]
    for scheme in USED[1:]:
        ratios = found.ratios(scheme)
        value, what = stated(scheme, ratios)
        limit, goal = LIMITS.get(scheme, (None, None))
        rows.append(
            Row(
                f"pp.{scheme}_{stages}",
                f"{where}: iteration against one without, {what}; {SCHEMES[scheme]}",
                "x",
                value,
                tuple(ratios),
                peers={"median": statistics.median(ratios)},
                limit=limit,
                goal=goal,
            )
        )
    for stage in range(stages):
        delays = [1e3 * delay for delay in found.delays("gemini", stage)]
        others = {scheme: 1e3 * statistics.median(found.delays(scheme, stage)) for scheme in USED[1:-1]}
        waits = {f"{scheme}: waits there": 1e3 * statistics.median(found.waits(scheme, stage)) for scheme in USED[2:]}
        rows += [
            median_row(
                f"pp.delay_{stages}.{stage}",
                f"{where}: stage {stage}'s optimizer comes later by",
                "ms",
                delays,
                peers=others | waits,
            ),
            Row(
                f"pp.delay_share_{stages}.{stage}",
                f"{where}: that in iterations",
                "x",
                statistics.median(delays) / 1e3 / usual_s,
            ),
        ]
    return rows
