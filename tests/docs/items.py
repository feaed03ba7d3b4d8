"""Items of the lists that are made from code."""

from __future__ import annotations

import re
from textwrap import fill

WIDTH = 118


def item(text: str) -> str:
    """An item of a list in lines below 120 columns, with each piece of code in one line."""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    lines = fill(
        whole, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ") + "\n"
