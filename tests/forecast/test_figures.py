"""The papers' figures: what is printed in them comes out, or the row says why not."""

from __future__ import annotations

import pytest
from refusals import refusal

from gemini_hpc.forecast.figures import FIGURES, FigureRow
from gemini_hpc.forecast.schemes import (
    Scheme,
    TrainingFigures,
    build_gemini,
    build_highfreq,
    build_ours,
    build_ours_spare,
    build_reft,
    build_strawman,
)


def rows(name: str) -> dict[str, FigureRow]:
    return {row.what: row for row in FIGURES[name]().rows}


def value(text: str) -> float:
    """The number in it."""
    return float(text.removeprefix("over ").removeprefix("below ").rstrip("xds% "))


@pytest.mark.parametrize("name", FIGURES)
def test_what_is_published_comes_out_or_is_explained(name: str) -> None:
    published = [row for row in FIGURES[name]().rows if row.published]
    assert published
    for row in published:
        if row.note or row.published.startswith("about ") or not any(c.isdigit() for c in row.published):
            continue
        said, found = value(row.published), value(row.ours)
        if row.published.startswith("over "):
            assert said < found < 1.2 * said, row
        elif row.published.startswith("below "):
            assert found < said, row
        else:
            digits = len(row.published.split()[0].rstrip("x").partition(".")[2])
            assert found == pytest.approx(said, abs=1.5 * 10**-digits), row


def test_figure_8_of_reft() -> None:
    """Its drawing has about half a day for checkpoints; 16.22 days are printed."""
    found = rows("reft-8")
    assert value(found["shape 1.3, REFT"].ours) == pytest.approx(16.22, rel=0.005)
    assert 0.3 < value(found["shape 1.3, checkpoints"].ours) < 0.6


def test_gemini_wastes_93_seconds() -> None:
    t = TrainingFigures()
    assert build_gemini(t).wasted_s - build_gemini(t).read_s == 1.5 * 62
    assert build_highfreq(t).every_s == 9 * 62
    assert build_highfreq(t).wasted_s == pytest.approx(1242, abs=2)
    assert build_strawman(t).wasted_s == pytest.approx(6363, abs=2)


def test_reft_stalls_only_where_parity_does_not_fit_into_an_iteration() -> None:
    """Equation 8."""
    assert (
        build_reft(TrainingFigures()).stall_s == 0.0
        and build_reft(TrainingFigures()).wasted_s < build_gemini(TrainingFigures()).wasted_s + 10
    )
    slow = build_reft(TrainingFigures(network=1e9))
    assert slow.stall_s == pytest.approx(1203 / 16 - 62) and slow.parity == 6
    assert build_reft(TrainingFigures(nodes=2)).parity == 2


def test_ours_is_gemini_without_what_its_agents_save() -> None:
    t = TrainingFigures()
    assert build_ours(t).every_s == build_gemini(t).every_s and build_ours(t).wasted_s == build_gemini(t).wasted_s
    assert build_ours_spare(t).down_s < build_ours(t).down_s < build_gemini(t).down_s


def test_impossible_schemes_are_refused() -> None:
    for every_s, stall_s in ((0.0, 0.0), (5.0, 5.0), (5.0, -1.0)):
        assert "a checkpoint every" in refusal(ValueError, Scheme, "impossible", every_s, stall_s), (every_s, stall_s)
