"""The paper's Figure 11 without GPUs: time of a checkpoint to the peers' memory against one to a remote store.

One state, shared out between N nodes, one rank on each; links of several rates; and a store behind one link that all
nodes share. The rates are to each other as the paper's: its network has 5, 10 or 20 times the bandwidth of its FSx.
Ours is the real thing: Slurm job, agents, m = 2, scheme `blocking` (the paper's checkpoint time is of the copies
alone, too); from step() until the version is sealed on all nodes. Theirs is torch.save of each rank's part to memory,
then over TCP to a store that is infinitely fast behind its link: the paper's Strawman and HighFreq, which differ only
in how often they save. Each ends when the last rank's has. In one job rates take turns, and so do the two; the store
is measured at another link rate in each round, which must not matter.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench import PYTHON, USER, Line, MeasureError, Options, TrainingJob, cluster, directory
from benchmarks.interleave import prepare
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

NODES = (2, 4, 8)
RATES = {"250mbit": 250, "500mbit": 500, "1gbit": 1000}
STORE_RATE, STORE_MBIT, STORE_PORT = "50mbit", 50, 7300
TOTAL_BYTES = 56 << 20
ROUNDS, SAVES = 3, 4
TIMEOUT_S = 400.0


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rounds = options.count(ROUNDS)

    def run(nodes: int) -> list[Line]:
        with cluster(nodes + 1) as on:
            return _train(options, on, nodes, rounds)

    return [row for nodes, lines in options.each(NODES, 2, run) for row in _rows(nodes, lines)]


def _train(options: Options, on: Cluster, nodes: int, rounds: int) -> list[Line]:
    prepare(on)
    behind = on.node_names[-1]
    on.limit_link(behind, STORE_RATE)
    program = directory(on, "store.py") / "store.py"
    store = on.start_command([PYTHON, str(program), str(STORE_PORT)], user=USER, node=behind)
    try:
        assert store.stdout is not None
        if not store.stdout.readline():
            raise MeasureError(f"the store did not start: {store.communicate()[1]}")
        plan = ["first", "speed:gemini:5"]  # until everything has been touched once
        for number in range(rounds):
            for turn, rate in enumerate(RATES):
                plan += [f"await:{number}-{rate}", f"speed:gemini:{options.pick(SAVES, 1)}"]
                plan += ["speed:remote:1"] if turn == number % len(RATES) else []
        words = [
            "--bytes",
            str(options.pick(TOTAL_BYTES, 2 << 20) // nodes),
            "--plan",
            ",".join(plan),
            "--scheme",
            "blocking",
        ]
        words += ["--store", f"{on.find_address(behind)}:{STORE_PORT}"]
        job = TrainingJob(on, nodes, 2, words, exclude=behind)
        job.finish(TIMEOUT_S, _shaper(options, on, job, nodes))
    finally:
        store.kill()
        store.communicate()
    return job.lines()


def _shaper(options: Options, on: Cluster, job: TrainingJob, nodes: int) -> Callable[[], None]:
    """Gives the links the rate that the job waits for."""
    given: set[str] = set()

    def meanwhile() -> None:
        waiting: dict[str, int] = defaultdict(int)
        for line in job.lines("awaiting"):
            waiting[line["name"]] += 1
        for name, ranks in waiting.items():
            if ranks == nodes and name not in given:
                for node in on.node_names[:-1]:
                    on.limit_link(node, name.partition("-")[2])
                Path(f"{job.directory}/rank.go.{name}").touch()
                given.add(name)
                options.progress.say(f"fig11, {nodes} nodes", f"round and rate {name}")

    return meanwhile


def _by_rate(lines: list[Line]) -> dict[tuple[str, str], list[float]]:
    """(mode, rate) -> of each save the slowest rank's seconds; those before the first rate are left out."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    of_rank: dict[int, list[tuple[str, str, float]]] = defaultdict(list)
    rate: dict[int, str] = {}
    for line in lines:
        if line["what"] == "awaiting":
            rate[line["rank"]] = line["name"].partition("-")[2]
        elif line["what"] == "speed" and line["rank"] in rate:
            of_rank[line["rank"]].append((line["mode"], rate[line["rank"]], line["done_s"]))
    for same in zip(*of_rank.values(), strict=True):
        mode, at, _ = same[0]
        found[mode, at].append(max(seconds for _, _, seconds in same))
    return found


def _rows(nodes: int, lines: list[Line]) -> list[Row]:
    found = _by_rate(lines)
    sizes = [line["bytes"] for line in lines if line["what"] == "ready"]
    store = [seconds for (mode, _), values in found.items() if mode == "remote" for seconds in values]
    serialized = [line["returned_s"] for line in lines if line["what"] == "speed" and line["mode"] == "remote"]
    where = f"{nodes} nodes, {sum(sizes) / 1e6:.1f} MB in all"
    rows = [
        median_row(
            f"fig11.store.{nodes}",
            f"{where}: checkpoint to a store behind {STORE_RATE}, at link rates in turns",
            "s",
            store,
            peers={"of it, torch.save to memory, for which the training waits": statistics.median(serialized)},
        )
    ]
    for rate, mbit in RATES.items():
        ours, slowest = found["gemini", rate], statistics.median(store)
        rows.append(
            median_row(
                f"fig11.gemini.{nodes}.{rate}",
                f"{where}, links of {rate}: checkpoint to the peer's memory, until sealed",
                "s",
                ours,
                peers={"C over the bare rate": 8e-6 * max(sizes) / mbit},
            )
        )
        rows.append(
            median_row(
                f"fig11.reduction.{nodes}.{rate}",
                f"{where}, links of {rate}: the store's median against it",
                "x",
                [slowest / seconds for seconds in ours],
                peers={"N B over the store's rate": nodes * mbit / STORE_MBIT},
            )
        )
    return rows
