"""What protection costs each iteration: 1 GB of state a rank, a save every iteration, two ranks on two nodes.

Two jobs on the same two nodes. The first is protected by real agents (m = 2); once there is a plan for its traffic it
saves every version in one block and none in the next (scheme `none`). The length of its iteration is chosen so that
the copies fit (see `programs/trainer.py`) and is a row of its own. The second saves in other ways, at the same length
of an iteration, each beside blocks without.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from benchmarks.bench import Line, Options, TrainingJob, cluster
from benchmarks.rows import Row, median_row
from benchmarks.traffic import late_row

RANKS = 2
BLOCK = 6
PEERS = {
    "baseline": "plain baseline: pre-faulted memory, 2 slots, background gloo",
    "dcp": "torch.distributed.checkpoint.async_save, shared staging",
    "torch_save": "torch.save to /dev/shm",
}
BASELINE = PEERS["baseline"]


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    runs, block = options.count(5), options.pick(BLOCK, 3)
    ours = (
        ["first", "calibrate", "settle"] + [f"none:{block},gemini:{block}"] * runs + [f"none:{block}", f"sync:{runs}"]
    )
    rounds = min(runs, 3)
    theirs = [f"none:{block},{mode}:{block}" for mode in PEERS] * rounds + [f"none:{block}"]
    size = ["--bytes", str(options.state_bytes)]
    with cluster(RANKS) as on:
        mine = _run(options, "save", TrainingJob(on, RANKS, 2, [*size, "--plan", ",".join(ours)]), 2 * runs + 1)
        iteration_s = max(line["iteration_s"] for line in mine.lines("calibrated"))
        fixed = [*size, "--no-protect", "--iteration", str(iteration_s), "--plan", ",".join(theirs)]
        others = _run(options, "save, by others", TrainingJob(on, RANKS, 0, fixed), 6 * rounds + 1)
        lines, other_lines = mine.lines(), others.lines()
        late = late_row(options, on)
    return [*_rows(lines, other_lines, iteration_s), late]


def _run(options: Options, topic: str, job: TrainingJob, blocks: int) -> TrainingJob:
    def meanwhile() -> None:
        last = job.lines("iteration")[-1:]
        options.progress.say(
            topic, f"{last[0]['mode']}, block {last[0]['block']} of {blocks}" if last else "starting"
        )

    job.finish(1800, meanwhile)
    return job


def _worst_of_ranks(lines: Iterable[Line], mode: str, value: str) -> dict[int, list[float]]:
    """By block: of each save the slower rank's figure, for that is what the training waits for."""
    ranks: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["what"] == "save" and line["mode"] == mode and line[value] is not None:
            ranks[line["block"]][line["rank"]].append(line[value])
    return {block: [max(of) for of in zip(*each.values(), strict=False)] for block, each in ranks.items()}


def _medians(blocks: dict[int, list[float]], factor: float = 1.0) -> list[float]:
    return [factor * statistics.median(values) for _, values in sorted(blocks.items()) if values]


def _stalls(lines: list[Line], mode: str) -> list[float]:
    """Milliseconds that the training waits for a save, a median for each block."""
    waits = [{**line, "wait_s": line["step_s"] + line["hook_s"]} for line in lines if line["what"] == "save"]
    return _medians(_worst_of_ranks(waits, mode, "wait_s"), 1e3)


def _durables(lines: list[Line], mode: str) -> list[float]:
    """Seconds from the call that saves until the version is safe, a median for each block."""
    return _medians(_worst_of_ranks(lines, mode, "durable_s"))


def _slowdowns(lines: list[Line], mode: str) -> list[float]:
    """Length of an iteration against that of the unprotected blocks before and after, one ratio for each block."""
    by_block: dict[int, list[float]] = defaultdict(list)
    modes: dict[int, str] = {}
    for line in lines:
        if line["what"] == "iteration" and line["rank"] == 0 and line["index"]:
            by_block[line["block"]].append(line["seconds"])
            modes[line["block"]] = line["mode"]
    length = {block: statistics.median(values) for block, values in by_block.items()}
    found = []
    for block in sorted(b for b, m in modes.items() if m == mode):
        bare = [length[b] for b in (block - 1, block + 1) if modes.get(b) == "none"]
        found.append(length[block] / statistics.mean(bare))
    return found


def _rows(lines: list[Line], others: list[Line], iteration_s: float) -> list[Row]:
    ready = next(line for line in lines if line["what"] == "ready")
    first = [line for line in lines if line["what"] == "first"]
    state = f"{ready['bytes'] / 1e9:.2f} GB in {ready['tensors']} tensors a rank"

    def peers(value: str) -> dict[str, float]:
        """Median of the same figure of the others."""
        figures = {
            "stall": _stalls,
            "slowdown": _slowdowns,
            "durable": _durables,
        }[value]
        found = {name: figures(others, mode) for mode, name in PEERS.items()}
        return {name: statistics.median(values) for name, values in found.items() if values}

    copies: dict[str, list[list[float]]] = {}
    for how in ("capture", "memcpy", "row"):
        by_rank = [
            [
                line["seconds"]
                for line in lines
                if line["what"] == "copied" and (line["how"], line["rank"]) == (how, r)
            ]
            for r in range(RANKS)
        ]
        copies[how] = by_rank
    ratios = [
        statistics.median(c / m for c, m in zip(copies["capture"][r], copies["memcpy"][r], strict=True))
        for r in range(RANKS)
    ]
    pairs = [c / m for r in range(RANKS) for c, m in zip(copies["capture"][r], copies["memcpy"][r], strict=True)]
    rows_ratio = [c / m for r in range(RANKS) for c, m in zip(copies["capture"][r], copies["row"][r], strict=True)]
    rows = [
        median_row(
            "save.stall_ms",
            f"the trainer waits a save: step(), pre-hook, seal; {state}, every iteration of {iteration_s:g} s",
            "ms",
            _stalls(lines, "gemini"),
            limit=10,
            goal=5,
            peers=peers("stall"),
            baseline=BASELINE,
        ),
        median_row(
            "save.slowdown",
            "iteration with a save against one without, paired",
            "x",
            _slowdowns(lines, "gemini"),
            limit=1.05,
            peers=peers("slowdown"),
            baseline=BASELINE,
        ),
        Row(
            "save.sync_ratio",
            "copying the state into a slot against a memcpy of each tensor to the same place; the worse rank",
            "x",
            max(ratios),
            tuple(pairs),
            limit=1.2,
        ),
        median_row(
            "save.row_ratio",
            "the same against one memcpy of as many bytes in a row (past the cache where the C library does so)",
            "x",
            rows_ratio,
        ),
        median_row(
            "save.sealed_s",
            "from step() until the version is sealed on both nodes (others: written; only the baseline has copies)",
            "s",
            _durables(lines, "gemini"),
            peers=peers("durable"),
            baseline=BASELINE,
        ),
        Row(
            "save.iteration_s",
            "length of an iteration: 1.5 times what a save takes to be sealed with nothing else going on",
            "s",
            iteration_s,
        ),
        Row(
            "save.first_stall_ms",
            f"all waits until the first version is sealed, iterations of {first[0]['iteration_s']} s",
            "ms",
            max(1e3 * line["waited_s"] for line in first),
            tuple(1e3 * line["waited_s"] for line in first),
        ),
        Row(
            "save.first_step_ms",
            "the very first step(): who owns what, layout; memory comes in the background",
            "ms",
            max(1e3 * line["first_step_s"] for line in first),
            tuple(1e3 * line["first_step_s"] for line in first),
        ),
    ]
    for key, what in (("step_s", "step()"), ("hook_s", "the optimizer's pre-hook: tensors copied, version sealed")):
        values = _medians(_worst_of_ranks(lines, "gemini", key), 1e3)
        rows.append(median_row(f"save.{key[:-2]}_ms", f"of the stall: {what}", "ms", values))
    worst = [1e3 * max(line["step_s"] + line["hook_s"] for line in _ours(lines, block)) for block in _blocks(lines)]
    rows.append(median_row("save.stall_worst_ms", "the longest stall of a block", "ms", worst))
    rows.append(
        Row(
            "save.copy_ms",
            "the copy into the slot, in the background, while training",
            "ms",
            max(1e3 * line["copy_s"] for line in lines if line["what"] == "background"),
            peers={"memcpy alone": 1e3 * max(statistics.median(values) for values in copies["memcpy"])},
        )
    )
    return rows


def _ours(lines: list[Line], block: int) -> list[Line]:
    return [line for line in lines if line["what"] == "save" and line["block"] == block]


def _blocks(lines: list[Line]) -> list[int]:
    return sorted({line["block"] for line in lines if line["what"] == "save" and line["mode"] == "gemini"})
