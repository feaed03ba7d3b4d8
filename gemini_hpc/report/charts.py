"""Charts of shares, independent of their subject: stacked bars and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini_hpc.report.drawing import draw_figure

COLOURS = ("#4c72b0", "#dd8452", "#8172b3", "#c44e52", "#55a868", "#937860")


@dataclass(frozen=True)
class Curves:
    """A panel of curves: a line for each name, over the same values `at`.

    `logarithmic` applies to the horizontal axis.
    """

    title: str
    below: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    logarithmic: bool = False


def draw_stacked_bars(
    title: str, names: Sequence[str], parts: Mapping[str, Sequence[float]], form: str = "png"
) -> bytes:
    """Draw a bar for each name, from the top; its parts are shares, in their order. `form` is "png" or "svg"."""
    with draw_figure(1.6 + 0.4 * len(names), form) as (made, out):
        axes = made.add_subplot()
        left = [0.0] * len(names)
        for (part, shares), colour in zip(parts.items(), COLOURS, strict=False):
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
            for (name, shares), colour in zip(panel.lines.items(), COLOURS, strict=False):
                axes.plot(
                    panel.at, [100 * share for share in shares], color=colour, marker=".", linewidth=1.2, label=name
                )
            if panel.logarithmic:
                axes.set_xscale("log")
            axes.set_xticks(panel.at, [f"{at:.3g}" for at in panel.at])
            axes.minorticks_off()
            axes.set_xlabel(panel.below)
            axes.set_ylabel("%")
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_title(panel.title, fontsize=9)
            axes.legend(fontsize=8)
    return out.getvalue()
