"""Tables and lists of the documents that are made from code: `python -m tests.docs.tables` writes them anew."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from gemini_hpc.forecast import goodput
from gemini_hpc.forecast.figures import FIGURES
from gemini_hpc.settings import Settings

from .items import item
from .json_fields import with_fields

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADMIN, JSON, REPRODUCTION = DOCS / "admin.md", DOCS / "json.md", DOCS / "dev" / "reproduction.md"
JIT = "jit-table8"  # its rows are pairs of three measures
FIRST = f"- `{fields(Settings)[0].name}` = "


def settings_list() -> str:
    """The settings of gemini.toml, each with its default."""
    return "".join(item(f"`{f.name}` = `{_toml(f.default)}`: {f.metadata['text']}") for f in fields(Settings))


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def with_settings(text: str) -> str:
    """The administrators' guide with its settings as they have to be."""
    begin = text.index(FIRST)
    end = text.index("\n\n", begin) + 1
    return text[:begin] + settings_list() + text[end:]


def with_figures(text: str) -> str:
    """The page of the papers' figures: what is published of each, and what comes out here."""
    figures = {name: make() for name, make in FIGURES.items() if name != JIT}
    rows = ""
    for name, figure in figures.items():
        title = f"`{name}`: {figure.title.partition(': ')[2]}"
        for row in figure.rows:
            if row.published:
                rows += f"| {title} | {row.what} | {row.published} | {row.ours} |\n"
                title = ""
    text = _with_rows(text, "`gemini-hpc simulate --figure NAME`", rows)
    cells: dict[str, list[str]] = {}
    for row in FIGURES[JIT]().rows:
        pair = f"{row.published} / {row.ours}".replace(" %", "")  # the head has the unit
        cells.setdefault(row.what.partition(":")[0], []).append(pair)
    rows = "".join(f"| {at} | {' | '.join(pairs)} |\n" for at, pairs in cells.items())
    return _with_rows(text, f"`gemini-hpc simulate --figure {JIT}`", rows)


def with_goodput(text: str) -> str:
    """The same page, with the table behind `simulate --figure goodput`."""
    rows = ""
    for row in goodput.compute_rows():
        shares = " | ".join(f"{100 * share:.2f}" for share in (row.goodput, row.paid, row.gentle))
        rows += f"| {row.gpus:,} | {row.way} | {row.lost_s:.0f} / {row.allowed_s:.0f} | {row.standby} | {shares} |\n"
    return _with_rows(text, "`gemini-hpc simulate --figure goodput`", rows)


def _with_rows(text: str, head: str, rows: str) -> str:
    """The page with these rows in the first table behind `head`."""
    assert head in text, f"docs/dev/reproduction.md has no {head}"
    begin = re.compile(r"^\|(?:---\|)+\n", re.M).search(text, text.index(head))
    assert begin is not None
    end = re.compile(r"^(?!\|)", re.M).search(text, begin.end())
    assert end is not None
    return text[: begin.end()] + rows + text[end.start() :]


if __name__ == "__main__":
    JSON.write_text(with_fields(JSON.read_text()))
    ADMIN.write_text(with_settings(ADMIN.read_text()))
    REPRODUCTION.write_text(with_goodput(with_figures(REPRODUCTION.read_text())))
