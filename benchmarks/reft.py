"""REFT's Figures 9 to 11 without GPUs: speed of saving and what the training pays, against ranks and against disk.

One node, 1, 2 and 4 ranks on it, each with a state of its own, so that the bytes grow with the ranks (weak scaling).
Ours is m = 1, the own slot in shared memory with a digest of it: what REFT calls REFT-Sn, without its parity. The
others write to the node's disk, synced, and to tmpfs, a disk that costs a copy only. Copies from device to host are
copies in memory here.

Two measures. Saves one after the other with nothing beside them: bytes of all ranks over the time until the save is
complete where it goes (REFT's saving speed), and the time until the optimizer may change the state. And saves after
every iteration of a fixed length, whose compute is a sleep, beside blocks without: by how much an iteration gets
longer (REFT's overhead; that of torch.distributed.checkpoint is in the family `save`). The ways take turns; of each
save the slowest rank counts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.bench import Line, Options, TrainingJob, cluster
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

RANKS = (1, 2, 4)
SHARE = 8  # of the usual state of a rank
ITERATION_S = 0.5
BLOCK = 4
ROUNDS, SAVES, TURNS = 3, 3, 2
TIMEOUT_S = 600.0
WAYS = {
    "gemini": "own slot in shared memory, digest verified",
    "torch_save": "torch.save and fsync",
    "checkfreq": "like CheckFreq: snapshot to memory, then torch.save and fsync in the background",
    "chunked": "like TorchSnapshot: staged to memory, then written by threads to several files",
    "dcp": "torch.distributed.checkpoint.async_save",
}
MEDIA = {way: "" if way == "gemini" else "@disk" for way in WAYS}
BESIDES = 2  # ranks with which those that write files are also measured on tmpfs
IN_TRAINING = [way for way in WAYS if way != "dcp"]


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rounds = options.count(ROUNDS)
    turns = min(rounds, TURNS)
    with cluster(1, cpus=max(RANKS)) as on:
        trained = options.each(RANKS, BESIDES, lambda ranks: _train(options, on, ranks, rounds, turns))
        return [row for ranks, lines in trained for row in _rows(ranks, lines)]


def _train(options: Options, on: Cluster, ranks: int, rounds: int, turns: int) -> list[Line]:
    saves, block, iteration_s = options.pick((SAVES, BLOCK, ITERATION_S), (1, 2, 0.1))
    speeds = [f"speed:{mode}:{saves}" for mode in _modes(ranks)]
    blocks = [word for way in IN_TRAINING for word in ("none:3", f"{way}{MEDIA[way]}:{block}")]
    plan = ["first", *_turned(speeds, rounds), *_turned(blocks, turns, 2), "none:3"]
    words = ["--bytes", str(options.state_bytes // SHARE), "--iteration", str(iteration_s), "--plan", ",".join(plan)]
    job = TrainingJob(on, 1, 1, [*words, "--disk", str(on.locate_home("alice"))], tasks=ranks)

    def meanwhile() -> None:
        last = [line for line in job.lines() if line["what"] in ("speed", "iteration")][-1:]
        options.progress.say(f"reft, {ranks} ranks", last[0]["mode"] if last else "starting")

    job.finish(TIMEOUT_S, meanwhile)
    return job.lines()


def _modes(ranks: int) -> dict[str, str]:
    """What is measured without a training, and the name of it in the rows."""
    modes = {f"{way}{MEDIA[way]}": f"{way}.{'disk' if MEDIA[way] else 'shm'}" for way in WAYS}
    if ranks == BESIDES:
        modes |= {way: f"{way}.shm" for way in WAYS if MEDIA[way]}
    return modes


def _turned(words: Sequence[str], rounds: int, step: int = 1) -> list[str]:
    """The words in each round, from another one on each time."""
    found: list[str] = []
    for number in range(rounds):
        at = step * (number % (len(words) // step))
        found += [*words[at:], *words[:at]]
    return found


def _slowest(lines: list[Line], what: str, mode: str, key: str) -> list[float]:
    """Of each save (or iteration, or block) the figure of the slowest rank."""
    of_rank: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if line["what"] == what and line["mode"] == mode:
            of_rank[line["rank"]].append(line[key])
    return [max(same) for same in zip(*of_rank.values(), strict=True)]


def _overheads(lines: list[Line], mode: str) -> list[float]:
    """Seconds by which an iteration with a save is longer than those of the blocks before and after; one figure for
    each block."""
    length: dict[int, list[float]] = defaultdict(list)
    modes: dict[int, str] = {}
    for line in lines:
        if line["what"] == "iteration" and line["rank"] == 0 and line["index"]:
            length[line["block"]].append(line["seconds"])
            modes[line["block"]] = line["mode"]
    mean = {block: statistics.mean(values) for block, values in length.items()}
    found = []
    for block in (b for b, m in sorted(modes.items()) if m == mode):
        bare = [mean[b] for b in (block - 1, block + 1) if modes.get(b) == "none"]
        found.append(mean[block] - statistics.mean(bare))
    return found


def _rows(ranks: int, lines: list[Line]) -> list[Row]:
    size = sum(line["bytes"] for line in lines if line["what"] == "ready")
    where = f"{ranks} rank{'s' * (ranks > 1)}, {size / 1e6:.0f} MB in all"
    rows = []
    for mode, name in _modes(ranks).items():
        way, _, medium = name.partition(".")
        what = WAYS[way] if way == "gemini" else f"{WAYS[way]}; {medium}"
        for key, text, unit, values in (
            (
                "speed",
                "saved bytes a second until complete",
                "GB/s",
                [size / 1e9 / s for s in _slowest(lines, "speed", mode, "done_s")],
            ),
            (
                "free",
                "until the optimizer may change the state",
                "ms",
                [1e3 * s for s in _slowest(lines, "speed", mode, "free_s")],
            ),
        ):
            rows.append(median_row(f"reft.{key}.{name}.{ranks}", f"{where}: {text}; {what}", unit, values))
    for way in IN_TRAINING:
        rows.append(
            median_row(
                f"reft.overhead.{way}.{ranks}",
                f"{where}: an iteration of {ITERATION_S:g} s with a save in it is longer by; {WAYS[way]}",
                "ms",
                [1e3 * seconds for seconds in _overheads(lines, way + MEDIA[way])],
            )
        )
    return rows
