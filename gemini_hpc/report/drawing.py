"""The pictures of a report, and charts of shares; matplotlib is imported when the first picture is drawn.

All input comes from the job's owner. Text is therefore never parsed as a formula. Numbers are within the
bounds of `wire.traffic`.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemini_hpc.durations import format_time
from gemini_hpc.report.report_data import LOSSES, RESUMES, Shown, list_idle_spans, list_saved_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, DPI = 11.0, 110
_TRAINING, _IDLE, _CHUNK, _COPY, _WAIT = "#4c72b0", "#dfe7d8", "#dd8452", "#8172b3", "#c44e52"
_RESUMED = "#55a868"
_COLOURS = ("#4c72b0", "#dd8452", "#8172b3", "#c44e52", "#55a868", "#937860")
_LANE = 0.72
_THIN = 2e-3  # share of the iteration to which shorter spans are stretched, to be visible


class MissingError(Exception):
    """The error that matplotlib is missing; its text is one line for the user."""


def _ensure_cache() -> None:
    """Provide a temporary font cache if the user's cache directory is not writable.

    matplotlib would warn otherwise, and so would fontconfig, which it uses for fonts. The directory is
    removed at the end of the process.
    """
    kept = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    with suppress(OSError):
        os.makedirs(kept, exist_ok=True)
    if not os.access(kept, os.W_OK | os.X_OK):
        with suppress(OSError):
            os.environ["XDG_CACHE_HOME"] = made = tempfile.mkdtemp(prefix="gemini-report-")
            atexit.register(shutil.rmtree, made, ignore_errors=True)


def require_matplotlib() -> None:
    """Check that drawing is possible. Raises `MissingError` if it is not."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    _ensure_cache()
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as exc:
        raise MissingError(
            f"drawing needs matplotlib, which {sys.executable} cannot import ({exc}): install it there "
            "(pip install 'matplotlib>=3.7'), or use --json"
        ) from None


@contextmanager
def draw_figure(height_in: float, form: str = "png") -> Iterator[tuple[Figure, io.BytesIO]]:
    """Yield a figure and its buffer; the figure is written into the buffer at the end, as "png" or "svg"."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out = io.BytesIO()
    plain: dict[Any, Any] = {"text.parse_math": False, "text.usetex": False, "font.size": 9.0}
    with warnings.catch_warnings(), matplotlib.rc_context(plain):
        warnings.simplefilter("ignore")  # a letter that the font lacks needs no warning
        made = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
        FigureCanvasAgg(made)
        yield made, out
        made.savefig(out, format=form)


def draw_steps(shown: Shown, t: float) -> bytes:
    """Draw the saved steps over time up to `t`, with lost nodes and resumes marked.

    Raises:
        ValueError: No saved step is known.
    """
    steps = list_saved_steps(shown)
    if not steps:
        raise ValueError("no saved step is known")
    began = min(steps[0][0], *(event.t for event in shown.marks)) if shown.marks else steps[0][0]
    unit, name = _choose_unit(t - began)
    with draw_figure(3.2) as (made, out):
        axes = made.add_subplot()
        at = [(time_ - began) / unit for time_, _ in steps]
        _draw_step_curve(
            axes, [*at, max((t - began) / unit, at[-1])], [*(n for _, n in steps), steps[-1][1]], _TRAINING
        )
        for names, colour, word in ((LOSSES, _WAIT, "lost"), (RESUMES, _RESUMED, "resumed")):
            for number, event in enumerate(event for event in shown.marks if event.name in names):
                label = word if number == 0 else None
                axes.axvline((event.t - began) / unit, color=colour, linewidth=2.5, label=label)
        if shown.marks:
            axes.legend(fontsize=8, loc="lower right")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("newest saved step")
        axes.set_xlabel(f"{name} since {format_time(min(began, 4e9))}")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_title(f"training {shown.training[:64]}: saved steps over time", fontsize=9)
    return out.getvalue()


def draw_timeline(shown: Shown) -> bytes:
    """Draw one iteration: the training's sends, the network's idle spans, and the checkpoint's traffic."""
    timeline = shown.timeline
    if timeline is None:
        raise ValueError("no iteration was recorded")
    replicas = sorted({chunk.replica for chunk in timeline.chunks})[:8]
    lanes: list[tuple[str, str, list[tuple[float, float]]]] = [
        ("training's collectives", _TRAINING, [(op.start_s, op.end_s) for op in timeline.ops]),
        ("idle", _IDLE, list_idle_spans(timeline)),
    ]
    if timeline.spans:
        lanes.append(("idle spans of the plan", _IDLE, [(s.start_s, s.end_s) for s in timeline.spans]))
    for replica in replicas:
        name = "chunks sent" if len(replicas) == 1 else f"chunks to holder {replica + 1}"
        lanes.append((name, _CHUNK, [(c.start_s, c.end_s) for c in timeline.chunks if c.replica == replica]))
    lanes.append(("copies to the own slot", _COPY, [(c.start_s, c.end_s) for c in timeline.copies]))
    lanes.append(("waits at the optimizer", _WAIT, [(w.start_s, w.end_s) for w in timeline.waits]))
    with draw_figure(1.4 + 0.42 * len(lanes)) as (made, out):
        axes = made.add_subplot()
        length_s = max(timeline.iteration_s, 1e-6)
        for row, (_, colour, stretches) in enumerate(lanes):
            _draw_bars(axes, row, stretches, colour, length_s)
        axes.axvline(timeline.gate_s, color="#333333", linewidth=1.0, linestyle="--")
        axes.text(timeline.gate_s, -0.75, "optimizer ", ha="right", va="bottom", fontsize=8)
        axes.set_yticks(range(len(lanes)), [name for name, _, _ in lanes])
        axes.set_ylim(len(lanes) - 0.4, -1.1)
        axes.set_xlim(0.0, length_s)
        axes.set_xlabel("seconds from step()")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        chunk_bytes = sum(chunk.bytes for chunk in timeline.chunks)
        axes.set_title(
            f"training {shown.training[:64]}, rank {shown.rank}: iteration after version {timeline.version}, "
            f"{timeline.iteration_s:.4g} s, {len(timeline.ops)} collectives, {len(timeline.chunks)} chunks of "
            f"{chunk_bytes / 1e6:.1f} MB",
            fontsize=9,
        )
    return out.getvalue()


def _draw_bars(axes: Axes, row: int, stretches: Iterable[tuple[float, float]], colour: str, length_s: float) -> None:
    spans = [(start, max(end - start, _THIN * length_s)) for start, end in stretches]
    axes.broken_barh(spans, (row - _LANE / 2, _LANE), facecolors=colour, edgecolor="white", linewidth=0.2)


def draw_overhead(shown: Shown) -> bytes:
    """Draw the checkpoints' overhead over time, and how often versions were saved."""
    if not shown.series:
        raise ValueError("no overhead was measured")
    began = shown.series[0].t
    unit, name = _choose_unit(shown.series[-1].t - began)
    require_matplotlib()
    from matplotlib.ticker import MaxNLocator

    times = [(point.t - began) / unit for point in shown.series]
    with draw_figure(3.2) as (made, out):
        axes = made.add_subplot()
        _draw_step_curve(axes, times, [100 * point.overhead for point in shown.series], _CHUNK)
        axes.set_ylabel("overhead, % of the time", color=_CHUNK)
        axes.axhline(0.0, color="#999999", linewidth=0.6)
        axes.set_xlabel(f"{name} since {format_time(min(began, 4e9))}")
        axes.grid(color="#dddddd", linewidth=0.6)
        other = axes.twinx()
        _draw_step_curve(other, times, [point.j for point in shown.series], _TRAINING)
        other.set_ylim(0, max(2, 1.2 * max(point.j for point in shown.series)))
        other.yaxis.set_major_locator(MaxNLocator(integer=True))
        other.set_ylabel("every j-th version is saved", color=_TRAINING)
        axes.set_title(f"training {shown.training[:64]}, rank {shown.rank}: overhead and j", fontsize=9)
    return out.getvalue()


def _draw_step_curve(axes: Axes, times: Sequence[float], values: Sequence[float], colour: str) -> None:
    axes.plot(times, values, drawstyle="steps-post", color=colour, linewidth=1.2, marker=".", markersize=3)


def _choose_unit(length_s: float) -> tuple[float, str]:
    for seconds, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if length_s > 3 * seconds:
            return seconds, name
    return 1.0, "seconds"


@dataclass(frozen=True)
class Curves:
    """A panel of curves: a line for each name, over the same values `x_values`.

    `logarithmic` applies to the horizontal axis.
    """

    title: str
    below: str
    x_values: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    logarithmic: bool = False


def draw_stacked_bars(
    title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], form: str = "png"
) -> bytes:
    """Draw a bar for each name, from the top; its parts are shares, in their order. `form` is "png" or "svg"."""
    with draw_figure(1.6 + 0.4 * len(names), form) as (made, out):
        axes = made.add_subplot()
        left = [0.0] * len(names)
        for (part, shares), colour in zip(parts.items(), _COLOURS, strict=False):
            widths = [100 * share for share in shares]
            axes.barh(range(len(names)), widths, left=left, height=0.72, color=colour, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), list(names))
        axes.invert_yaxis()
        axes.set_xlim(0.0, 100.0)
        axes.set_xlabel("% of the time")
        axes.set_title(title, fontsize=9)
        made.legend(loc="outside lower center", fontsize=8, ncols=max(1, len(parts)))
    return out.getvalue()


def draw_curves(panels: Sequence[Curves], form: str = "png") -> bytes:
    """Draw the panels side by side, with shares in per cent."""
    with draw_figure(3.6, form) as (made, out):
        for place, panel in enumerate(panels, 1):
            axes = made.add_subplot(1, len(panels), place)
            for (name, shares), colour in zip(panel.lines.items(), _COLOURS, strict=False):
                axes.plot(
                    panel.x_values,
                    [100 * share for share in shares],
                    color=colour,
                    marker=".",
                    linewidth=1.2,
                    label=name,
                )
            if panel.logarithmic:
                axes.set_xscale("log")
            axes.set_xticks(panel.x_values, [f"{at:.3g}" for at in panel.x_values])
            axes.minorticks_off()
            axes.set_xlabel(panel.below)
            axes.set_ylabel("%")
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_title(panel.title, fontsize=9)
            axes.legend(fontsize=8)
    return out.getvalue()
