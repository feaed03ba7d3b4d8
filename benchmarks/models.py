"""The paper's Figure 13 without GPUs: other models on a slower network, with a checkpoint in each iteration.

As Figure 16 (`interleave.py`), but on links of half the rate (the paper's p3dn instances have a quarter of the
bandwidth of its p4d ones), and with three models: two sizes, and another shape of about the second one's size. The
paper has three sizes and three architectures, which differ in mask and head only: that cannot be seen from the
network. The emulated compute grows with the parameters, as it does on a GPU with one batch size, so that idle time
and C/B keep their ratio of 1.5. Copies go from agent to agent, the default. Ratios are against iterations without
checkpoints in the same round.
"""

from __future__ import annotations

import statistics

from benchmarks import interleave
from benchmarks.bench import Options, cluster
from benchmarks.rows import Row, median_row

RATE = "500mbit"
ROUNDS = 12
IDLE_TO_SENDING = 1.5
B_BYTES_PER_S = 58.6e6
SCHEMES = (interleave.BASELINE, "gemini")


def _setting(name: str, dim: int, blocks: int) -> interleave.Setting:
    """forward_s so that 3 * blocks * forward_s = 1.5 C/B."""
    vocabulary, tokens = 512, 8  # of the program
    parameters = blocks * (12 * dim * dim + 13 * dim) + (2 * vocabulary + tokens) * dim + 2 * dim
    sending_s = 12 * parameters / 2 / B_BYTES_PER_S
    forward_s = round(IDLE_TO_SENDING * sending_s / (3 * blocks), 5)
    return interleave.Setting(2, forward_s, SCHEMES, f"_{name}", dim=dim, blocks=blocks, measured=5)


MODELS = {
    "small": _setting("small", 148, 8),
    "large": _setting("large", 208, 8),
    "deep": _setting("deep", 148, 16),
}


def measure(options: Options) -> list[Row]:
    """All rows of the family."""
    rounds = options.count(ROUNDS)
    with cluster(2) as on:
        interleave.prepare(on, RATE)
        trained = options.each(
            MODELS, "small", lambda name: interleave.train(options, on, _of(options, name), rounds)
        )
        return [row for name, found in trained for row in _rows(name, found)]


def _of(options: Options, name: str) -> interleave.Setting:
    return options.pick(MODELS[name], interleave.tiny(MODELS[name]))


def _rows(name: str, found: interleave.Found) -> list[Row]:
    setting = found.setting
    bare, ratios = found.bare, found.ratios("gemini")
    where = f"{setting.blocks} blocks of width {setting.dim}, C = {found.checkpoint_bytes / 1e6:.1f} MB"
    rows = [
        median_row(
            f"fig13.none_{name}",
            f"{where}: length of an iteration without checkpoints",
            "s",
            bare,
            peers={"C/B": found.sending_s, "emulated compute": setting.idle_s},
        ),
        Row(
            f"fig13.gemini_{name}",
            f"{where}: iteration with a checkpoint against one without, upper bound of the median",
            "x",
            interleave.upper(ratios),
            tuple(ratios),
            peers={"median": statistics.median(ratios)},
        ),
    ]
    ids = (f"fig13.j_{name}", f"fig13.before_{name}", f"fig13.after_{name}")
    return [*rows, *interleave.plan_rows(ids, where, found.traffic["gemini"])]
