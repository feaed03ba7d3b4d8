"""Tables of the documents that are made from code: `python -m tests.docs.tables` writes them anew."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any

from gemini_hpc.forecast import goodput
from gemini_hpc.forecast.figures import FIGURES
from gemini_hpc.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADMIN, REPRODUCTION = DOCS / "admin.md", DOCS / "dev" / "reproduction.md"
WIDTH = 118
FIRST = f"- `{fields(Settings)[0].name}` = "


def settings_list() -> str:
    """The settings of gemini.toml, each with its default."""
    return "".join(item(f"`{f.name}` = `{_toml(f.default)}`: {f.metadata['text']}") for f in fields(Settings))


def item(text: str) -> str:
    """An item of a list in lines below 120 columns, with each piece of code in one line."""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    lines = fill(
        whole, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ") + "\n"


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
        for row in goodput.rows()
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
    ADMIN.write_text(with_settings(ADMIN.read_text()))
    REPRODUCTION.write_text(with_goodput(with_figures(REPRODUCTION.read_text())))
