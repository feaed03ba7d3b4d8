"""Figures of the papers, recomputed from their printed inputs; docs/dev/reproduction.md describes the differences.

Published values are those that the text or a table states. Values that can only be read off a drawing are left out.

Two papers' equations are here. REFT's model (appendix, equations 1 to 3 and Figure 8) says for how long a training is
safe without a checkpoint on storage. Just-in-time checkpointing (EuroSys '24, section 5, equations 1 to 8) says what
failures cost: each of `gpus` GPUs fails `per_s` times a second. Its shares come in two kinds. Wasted shares are of
useful time (w). Shares of all time (w_f, equation 6) are made of these by `to_share_of_all`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, exp, sqrt

from gemini_hpc.clock import DAY_S
from gemini_hpc.core import placement
from gemini_hpc.forecast.schemes import (
    STRAWMAN_EVERY_S,
    TrainingFigures,
    build_gemini,
    build_highfreq,
    build_strawman,
)

_STEPS = 200  # bisection steps, more than a float has bits
PER_S = 2e-3 / DAY_S  # per GPU: two failures in 1,000 GPUs a day (section 5)


def compute_checkpoint_reliability(days: float, gpus: int, hardware: float, software: float, shape: float) -> float:
    """Return the probability that none of `gpus` has failed after `days`.

    `hardware` and `software` are failure rates of one GPU. `shape` is the shape of the Weibull distribution; 1 means
    failures that do not depend on age.
    """
    return exp(-gpus * (hardware + software) * days**shape)


def compute_parity_reliability(days: float, gpus: int, hardware: float, shape: float, group: int) -> float:
    """Return the same probability for state in memory with parity over sharding groups of `group` members.

    Each group may have lost one member. Software failures do not affect the memory.
    """
    alive = exp(-hardware * days**shape)
    return float((alive**group + group * (1 - alive) * alive ** (group - 1)) ** (gpus / group))


def find_safe_days(probability: Callable[[float], float], threshold: float) -> float:
    """Return how long a falling probability stays at or above the threshold, in days.

    Raises:
        ValueError: The probability is below the threshold at the beginning.
    """
    low, high = 0.0, 1.0
    if not 0 < threshold < 1 or probability(0.0) < threshold:
        raise ValueError(f"a threshold of {threshold:g}: it is between 0 and 1, and met at the beginning")
    while probability(high) >= threshold:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) >= threshold else (low, middle)
    return low


@dataclass(frozen=True)
class Model:
    """A model of the paper (Table 4), with times in seconds.

    Attributes:
        name: Name of the model.
        save_s: Time of one checkpoint.
        restore_s: Time to load a checkpoint and come back.
        minibatch_s: Time of one iteration.
        steady_s: Cost of the library in each iteration.
    """

    name: str
    save_s: float
    restore_s: float
    minibatch_s: float
    steady_s: float


def to_share_of_all(wasted: float) -> float:
    """Return a wasted share as a share of all time (equation 6)."""
    return wasted / (1 + wasted)


def compute_best_per_s(model: Model, gpus: int, per_s: float = PER_S) -> float:
    """Return the frequency of periodic checkpoints that costs least, per second (equation 3)."""
    return sqrt(gpus * per_s / (2 * model.save_s))


def compute_periodic_waste(model: Model, gpus: int, per_s: float = PER_S) -> float:
    """Return the wasted share with that frequency (equation 5)."""
    return 2 * sqrt(gpus * per_s * model.save_s / 2) + gpus * per_s * model.restore_s


def compute_user_level_waste(
    model: Model, gpus: int, per_s: float = PER_S, *, steady_share: float | None = None
) -> float:
    """Return the wasted share with just-in-time checkpoints that the program makes after a failure (equation 7).

    `steady_share` replaces the model's own steady share.
    """
    steady = model.steady_s / model.minibatch_s if steady_share is None else steady_share
    rate = gpus * per_s
    return per_s * model.save_s + steady + rate * model.restore_s + rate * model.minibatch_s / 2


@dataclass(frozen=True)
class FigureRow:
    """A value of a figure.

    Attributes:
        what: Name of the value.
        published: Value as printed.
        ours: Value as computed here.
        note: Reason of a difference.
    """

    what: str
    published: str
    ours: str
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A recomputed figure: its title, its inputs and its values."""

    title: str
    inputs: str
    rows: tuple[FigureRow, ...]


def _format_percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def build_gemini_9() -> Figure:
    """Return GEMINI, Figure 9."""
    p, ring = placement.compute_recovery_probability, placement.compute_ring_probability
    bound = placement.compute_ring_bound(16, 2, 3)
    group = p(16, 2, 3)
    rows = [
        FigureRow("N=16, m=2, k=2", "93.3 %", _format_percent(p(16, 2, 2))),
        FigureRow("N=16, m=2, k=3", "80.0 %", _format_percent(group)),
        FigureRow("N=16, m=2, k=3, ring, by the paper's bound", "", _format_percent(bound)),
        FigureRow("N=16, m=2, k=3, ring, exact", "", _format_percent(ring(16, 2, 3))),
        FigureRow("the ring is lower, by that bound", "25.0 %", _format_percent(1 - bound / group)),
        FigureRow(
            "the ring is lower, exact",
            "25.0 %",
            _format_percent(1 - ring(16, 2, 3) / group),
            "the paper's value is a union bound",
        ),
    ]
    sizes = (8, 16, 24, 32, 48, 64, 96, 128)
    rows += [
        FigureRow(f"N={n}, m={m}, k={k}", "", _format_percent(p(n, m, k)))
        for m in (2, 3)
        for k in (2, 3, 4)
        for n in sizes
    ]
    return Figure(
        "GEMINI, Figure 9: probability to recover from memory", "N nodes, m copies, k lost at once", (*rows,)
    )


def build_gemini_10() -> Figure:
    """Return GEMINI, Figure 10."""
    t = TrainingFigures()
    local = 1.5 * t.iteration_s
    often, seldom = build_highfreq(t), build_strawman(t)
    rows = (
        FigureRow("GEMINI, from a node's own memory", "", f"{local:.0f} s"),
        FigureRow("GEMINI, from peers: more", "below 3 s", f"{build_gemini(t).read_s:.1f} s"),
        FigureRow("HighFreq", "", f"{often.wasted_s:.0f} s"),
        FigureRow("Strawman", "", f"{seldom.wasted_s / 60:.0f} min"),
        FigureRow("HighFreq against GEMINI", "over 13", f"{often.wasted_s / local:.1f}"),
        FigureRow("less than HighFreq, by", "92 %", _format_percent(1 - local / often.wasted_s)),
    )
    return Figure("GEMINI, Figure 10: time wasted by a failure", _TESTBED, rows)


def build_gemini_12() -> Figure:
    """Return GEMINI, Figure 12."""
    t = TrainingFigures()
    rows = (
        FigureRow(
            "more often than HighFreq",
            "8x",
            f"{ceil(t.tier_s / t.iteration_s)}x",
            "section 7.3 has every nine iterations: with 81 s of serialization",
        ),
        FigureRow("more often than Strawman", "over 170x", f"{STRAWMAN_EVERY_S / t.iteration_s:.0f}x"),
    )
    return Figure("GEMINI, Figure 12: frequency of checkpoints", _TESTBED, rows)


def _compute_shares(failures_per_day: float) -> list[float]:
    """Return the share of the time that trains with GEMINI, HighFreq and Strawman."""
    t = TrainingFigures()
    schemes = build_gemini(t), build_highfreq(t), build_strawman(t)
    return [scheme.compute_effective_share(failures_per_day) for scheme in schemes]


def _format_share(value: float) -> str:
    return f"{value:.3f}" if value > 0 else "none"


def build_gemini_15a() -> Figure:
    """Return GEMINI, Figure 15a."""
    published = {(8, "GEMINI"): "close to none failing"}
    rows = tuple(
        FigureRow(f"{n} failures a day, {name}", published.get((n, name), ""), _format_share(share))
        for n in (0, 2, 4, 6, 8)
        for name, share in zip(("GEMINI", "HighFreq", "Strawman"), _compute_shares(n), strict=True)
    )
    return Figure("GEMINI, Figure 15a: share of the time that trains, 16 nodes", _TESTBED, rows)


def build_gemini_15b() -> Figure:
    """Return GEMINI, Figure 15b."""
    rows = []
    for n in (16, 200, 400, 600, 800, 1000):
        what, large = f"{n} nodes", n == 1000
        ours, often, seldom = _compute_shares(0.015 * n)
        rows += [
            FigureRow(f"{what}, GEMINI", "91 %" if large else "", _format_percent(ours)),
            FigureRow(f"{what}, HighFreq", "", _format_percent(often)),
            FigureRow(
                f"{what}, Strawman",
                "can hardly proceed" if large else "",
                _format_percent(seldom) if seldom > 0 else "none",
            ),
        ]
        if large:
            rows.append(FigureRow(f"{what}, GEMINI is higher, by", "54 %", _format_percent(ours / often - 1)))
    return Figure(
        "GEMINI, Figure 15b: share of the time that trains, by nodes",
        f"1.5 % of nodes fail a day; {_TESTBED}",
        (*rows,),
    )


def build_reft_8() -> Figure:
    """Return REFT, Figure 8."""
    rows = []
    for shape, published in ((1.0, ("", "")), (1.3, ("about 0.5 d", "16.22 d")), (1.5, ("", "")), (2.0, ("", ""))):
        one = partial(compute_checkpoint_reliability, gpus=3072, hardware=1e-4, software=1e-5, shape=shape)
        two = partial(compute_parity_reliability, gpus=3072, hardware=1e-4, shape=shape, group=6)
        rows += [
            FigureRow(f"shape {shape:g}, checkpoints", published[0], f"{find_safe_days(one, 0.9):.2f} d"),
            FigureRow(
                f"shape {shape:g}, REFT",
                published[1],
                f"{find_safe_days(two, 0.9):.2f} d",
                "the printed inputs give this; the text does not say how its own was found" if published[1] else "",
            ),
        ]
    inputs = "3072 GPUs in groups of 6; a GPU's rates 1e-4 (hardware) and 1e-5 (software), days; safe: with P >= 0.9"
    return Figure("REFT, Figure 8: days that are safe without a checkpoint", inputs, (*rows,))


_MODELS = (
    Model("BERT-L", 5.0, 9.9, 0.418, 0.00003),
    Model("BERT-B", 1.4, 8.8, 0.416, 0.0),
    Model("GPT2-S", 3.8, 7.2, 0.629, 0.00001),
    Model("GPT2-8B", 18.8, 28.6, 2.953, 0.0),
)
_GPUS = (4, 1024, 8192)
_BEST = {
    "BERT-L": ".34 5.54 15.6",
    "BERT-B": ".65 10.47 29.62",
    "GPT2-S": ".39 6.35 17.98",
    "GPT2-8B": ".17 2.85 8.08",
}
_PERIODIC = {
    "BERT-L": ".096 1.53 4.5",
    "BERT-B": ".05 .83 2.41",
    "GPT2-S": ".08 1.34 3.78",
    "GPT2-8B": ".18 2.96 8.24",
}
_USER = {"BERT-L": ".75 .77 .94", "BERT-B": ".23 .26 .41", "GPT2-S": ".24 .26 .38", "GPT2-8B": ".0003 .07 .56"}
# Cost of the library, in per cent as Table 3 prints it.
_STEADY_PERCENT = {"BERT-L": 0.0076, "GPT2-S": 0.0024}


def _read_printed(row: str, column: int) -> str:
    text = row.split()[column]
    return f"0{text}" if text.startswith(".") else text


def build_jit_table_8() -> Figure:
    """Return just-in-time checkpointing, Table 8."""
    rows = []
    for model in _MODELS:
        for column, gpus in enumerate(_GPUS):
            at = f"{model.name}, {gpus} GPUs"
            best, periodic, user = (_read_printed(table[model.name], column) for table in (_BEST, _PERIODIC, _USER))
            wasted = compute_periodic_waste(model, gpus)
            exact = to_share_of_all(compute_user_level_waste(model, gpus))
            note = (
                "" if model.name == "GPT2-8B" else "Table 3 has 0 for its overhead, from which this does not follow"
            )
            if percent := _STEADY_PERCENT.get(model.name):
                slipped = to_share_of_all(compute_user_level_waste(model, gpus, steady_share=percent))
                note = f"{_format_percent(slipped, 2)} if the {percent:g} % of Table 3 are taken for a share"
            rows += [
                FigureRow(f"{at}: checkpoints an hour", best, f"{compute_best_per_s(model, gpus) * 3600:.2f}"),
                FigureRow(
                    f"{at}: wasted, periodic",
                    f"{periodic} %",
                    _format_percent(to_share_of_all(wasted), 3),
                    f"{_format_percent(wasted, 2)} of useful time" if (model.name, gpus) == ("BERT-L", 8192) else "",
                ),
                FigureRow(f"{at}: wasted, just in time", f"{user} %", _format_percent(exact, 4), note),
            ]
    return Figure(
        "Just-in-time checkpointing, Table 8",
        "2 in 1,000 GPUs fail a day; times of a checkpoint, restore and minibatch of Table 4",
        (*rows,),
    )


_TESTBED = "GPT-2 100B (1.2 TB) on 16 p4d nodes, iteration 62 s, storage 20 Gbit/s, network 400 Gbit/s a node"

FIGURES: dict[str, Callable[[], Figure]] = {
    "gemini-9": build_gemini_9,
    "gemini-10": build_gemini_10,
    "gemini-12": build_gemini_12,
    "gemini-15a": build_gemini_15a,
    "gemini-15b": build_gemini_15b,
    "reft-8": build_reft_8,
    "jit-table8": build_jit_table_8,
}
