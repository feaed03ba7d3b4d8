"""Text in columns: folding to the width of the terminal (80 columns without a terminal), and tables."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

NARROWEST, USUAL = 60, 80


def measure_width() -> int:
    """Return the number of columns of the terminal that stdout writes to."""
    return max(NARROWEST, shutil.get_terminal_size((USUAL, 24)).columns)


def fold(text: str, columns: int, indent: str = "", first: str | None = None) -> list[str]:
    """Fold `text` into lines of at most `columns`; `first` begins the first line, `indent` the others.

    A word longer than a line, such as a path, stays whole so that it can be copied.
    """
    begin = indent if first is None else first
    return textwrap.wrap(
        text,
        columns,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [begin.rstrip()]


def align(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return the rows of a table as lines; each column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
