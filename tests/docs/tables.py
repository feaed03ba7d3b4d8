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
    """The page of the papers' figures, each behind its command: what is published of it, and what comes out here."""
    for name, make in FIGURES.items():
        rows = "".join(
            f"| {row.what} | {row.published} | {row.ours} | {row.note} |\n" for row in make().rows if row.published
        )
        head = f"`gemini-hpc simulate --figure {name}`"
        assert head in text, f"docs/dev/reproduction.md has no {head}"
        begin = text.index("|---|---|---|---|\n", text.index(head)) + len("|---|---|---|---|\n")
        end = re.compile(r"^(?!\|)", re.M).search(text, begin)
        assert end is not None
        text = text[:begin] + rows + text[end.start() :]
    return text


def with_goodput(text: str) -> str:
    """The same page, with the table behind `simulate --figure goodput`, and the one of what others have published."""
    rows = "".join(
        f"| {row.gpus:,} | {row.way} | {row.lost_s:.0f} | {row.allowed_s:.0f} | {100 * row.goodput:.2f} % "
        f"| {row.standby} | {100 * row.paid:.2f} % | {100 * row.gentle:.2f} % |\n"
        for row in goodput.compute_rows()
    )
    others = "".join(f"| {one.gpus:,} | {one.share} | {one.what} | {one.source} |\n" for one in goodput.PUBLISHED)
    at = text.index("`gemini-hpc simulate --figure goodput`")
    for line, content in (("|---|---|---|---|---|---|---|---|\n", rows), ("|---|---|---|---|\n", others)):
        at = text.index(line, at) + len(line)
        end = re.compile(r"^(?!\|)", re.M).search(text, at)
        assert end is not None
        text = text[:at] + content + text[end.start() :]
    return text


if __name__ == "__main__":
    JSON.write_text(with_fields(JSON.read_text()))
    ADMIN.write_text(with_settings(ADMIN.read_text()))
    REPRODUCTION.write_text(with_goodput(with_figures(REPRODUCTION.read_text())))
