"""The pages need one reading: short lines and short sentences, but in tables and blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(p for p in ROOT.glob("*.md") if p.name != "CHANGELOG.md"), *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST_LINE, MOST_WORDS = 120, 30


def prose(text: str) -> Iterator[str]:
    """Yield the lines of a page that belong to no table, no heading and no block of code."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            yield ""
        elif not fenced:
            yield "" if line.lstrip().startswith(("|", "#")) else line


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page; a link counts by its text, code as one word."""
    items = "\n".join(re.sub(r"^\s*([-*]|\d+\.) ", "\n", line) for line in prose(text))
    for paragraph in re.split(r"\n\s*\n", items):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        yield from re.split(r"(?<=[.:;!?])\s+", re.sub(r"`[^`]*`", "code", plain))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_and_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    long = [line for line in prose(text) if len(line) > LONGEST_LINE]
    long += [sentence for sentence in sentences(text) if len(sentence.split()) > MOST_WORDS]
    assert not long


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_no_table_of_a_users_or_administrators_page_is_wide(page: Path) -> None:
    assert not [line for line in page.read_text().splitlines() if line.startswith("|") and len(line) > LONGEST_LINE]


def test_a_long_sentence_is_found() -> None:
    words = "word " * MOST_WORDS
    assert max(len(s.split()) for s in sentences(f"Short.\n\n- {words}word. Another one.\n")) == MOST_WORDS + 1
    assert not list(filter(None, sentences(f"| {words}{words} |\n```\n{words}{words}\n```\n")))
