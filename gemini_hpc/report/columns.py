"""Lines for a terminal: no wider than it, and 80 columns where there is none."""

from __future__ import annotations

import shutil
import textwrap

NARROWEST, USUAL = 60, 80


def width() -> int:
    """Columns of the terminal that is written to."""
    return max(NARROWEST, shutil.get_terminal_size((USUAL, 24)).columns)


def fold(text: str, columns: int, indent: str = "", first: str | None = None) -> list[str]:
    """`text` in lines of at most `columns`; `first` begins the first one, `indent` the others. A word that is longer
    than a line, such as a path, stays whole: it is there to be copied."""
    begin = indent if first is None else first
    return textwrap.wrap(
        text,
        columns,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [begin.rstrip()]
