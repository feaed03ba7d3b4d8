"""m = 3: a rank sends its shard to both holders one after the other, or the first passes it on to the second.

Where all ranks save at once, each link carries 2 C out and 2 C in whichever way is taken, so a chain can gain no
bandwidth: (m-1) C/B is the bound of both. It can where one rank saves alone. Measured are the time until every shard
is on both holders, and until it is on one. Links of 1 Gbit/s; `programs/holders.py`; a row's ratio is the median of
those to `sequence` in the same round.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.bench import Line, Options, TrainingJob, cluster
from benchmarks.interleave import RATE, prepare
from benchmarks.rows import Row
from gemini_hpc.devcluster.network import parse_rate

ROUNDS = 10
USUAL = "sequence"
WAYS = {
    USUAL: "one holder after the other",
    "flowing": "one holder after the other, without waiting for the first one's last chunks",
    "both": "each chunk to both holders",
    "chain": "the first holder passes on, in turns with its own chunks",
    "own_first": "the first holder passes on when its own chunks are away",
}
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Setting:
    """One job. suffix: of its rows."""

    nodes: int
    shard_bytes: int
    ways: tuple[str, ...]
    alone: bool
    suffix: str


# with the larger shard is seen what is a cost of each version, and what grows with its bytes
SETTINGS = (
    Setting(3, 24 << 20, tuple(WAYS), True, "3"),
    Setting(4, 24 << 20, tuple(WAYS), True, "4"),
    Setting(3, 96 << 20, (USUAL, "flowing", "chain"), False, "3_large"),
)
TINY = Setting(3, 1 << 20, tuple(WAYS), True, "")


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rounds = options.count(ROUNDS)

    def run(setting: Setting) -> list[Line]:
        with cluster(setting.nodes) as on:
            prepare(on)
            words = ["--bytes", str(setting.shard_bytes), "--ways", ",".join(setting.ways), "--rounds", str(rounds)]
            job = TrainingJob(on, setting.nodes, 0, words + ["--alone"] * setting.alone, "holders.py")

            def meanwhile(job: TrainingJob = job, suffix: str = setting.suffix) -> None:
                last = job.lines("copy")[-1:]
                options.progress.say(f"holders, {suffix}", f"round {last[0]['round']}" if last else "starting")

            job.finish(TIMEOUT_S, meanwhile)
            return job.lines("copy")

    return [
        row
        for setting, lines in options.each(SETTINGS, TINY, run)
        for alone in ((False, True) if setting.alone else (False,))
        for row in _rows(setting, alone, [line for line in lines if (line["saving"] == 1) == alone])
    ]


def _by_round(lines: list[Line], way: str) -> tuple[list[float], list[float]]:
    """Of each round: seconds until every shard is on one more node, and until it is on both."""
    copies: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["way"] == way and line["round"] >= 0:
            copies[line["round"]][line["shard"]].append(line["seconds"])
    rounds = [copies[number].values() for number in sorted(copies)]
    return [max(min(c) for c in r) for r in rounds], [max(max(c) for c in r) for r in rounds]


def _rows(setting: Setting, alone: bool, lines: list[Line]) -> list[Row]:
    usual_one, usual_both = _by_round(lines, USUAL)
    who = "one saves" if alone else "all save"
    where = f"{setting.nodes} nodes, {who}, C = {setting.shard_bytes / 1e6:.1f} MB"
    suffix = setting.suffix + ("_alone" if alone else "")
    rows = []
    bound = 2 * setting.shard_bytes / (parse_rate(RATE) / 8)
    for way in setting.ways:
        one, both = _by_round(lines, way)
        for name, what, values, usual in (
            ("all", "every shard on both holders", both, usual_both),
            ("one", "every shard on one holder", one, usual_one),
        ):
            rows.append(
                Row(
                    f"holders.{name}.{way}.{suffix}",
                    f"{where}: {what}; {WAYS[way]}",
                    "s",
                    statistics.median(values),
                    tuple(values),
                    peers={"bound": bound} if name == "all" else {},
                    ratio=statistics.median(a / b for a, b in zip(values, usual, strict=True)),
                )
            )
    return rows
