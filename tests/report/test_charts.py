"""Charts: what is in the data is in the picture."""

from __future__ import annotations

import io

from gemini_hpc.report.drawing import _COLOURS, Curves, draw_curves, draw_stacked_bars

PARTS = {"training": (0.9, 0.5), "down": (0.1, 0.5)}


def colours(png: bytes) -> set[tuple[int, int, int]]:
    import matplotlib.image
    import numpy as np

    pixels = np.asarray(matplotlib.image.imread(io.BytesIO(png), format="png"))[:, :, :3]
    return {(int(r), int(g), int(b)) for r, g, b in (255 * pixels).round().reshape(-1, 3)}


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def test_each_part_has_its_colour() -> None:
    drawn = colours(draw_stacked_bars("title", ("a", "b"), PARTS))
    assert {rgb(_COLOURS[0]), rgb(_COLOURS[1])} <= drawn and rgb(_COLOURS[2]) not in drawn


def test_curves() -> None:
    for logarithmic in (False, True):
        panel = Curves("title", "below", (1.0, 10.0), {"one": (1.0, 0.9), "two": (0.8, 0.2)}, logarithmic)
        drawn = colours(draw_curves([panel, panel]))
        assert {rgb(_COLOURS[0]), rgb(_COLOURS[1])} <= drawn, logarithmic


def test_svg_has_what_it_shows_as_a_picture() -> None:
    drawn = draw_stacked_bars("$x^2$", ("a", "b"), PARTS, "svg")
    assert drawn.startswith(b"<?xml") and b"</svg>" in drawn and _COLOURS[1].encode() in drawn
