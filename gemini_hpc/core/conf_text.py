"""Lines of Slurm's own files: slurm.conf, topology.conf."""

from __future__ import annotations

import re

# Slurm's own pattern: a key, an operator of some lists, and a value that may be quoted
_PAIR = re.compile(r'(?<!\S)([A-Za-z0-9_.]+)\s*[-*+/]?=\s*(?:"([^"]*)"|(\S+))(?!\S)')


def split_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines without comments, each with its number; continued lines are joined."""
    found: list[tuple[int, str]] = []
    begun = ""
    number = 0
    for number, written in enumerate(text.splitlines(), 1):
        line = begun + written.split("#", 1)[0].strip()
        begun = f"{line[:-1]} " if line.endswith("\\") else ""
        if line and not begun:
            found.append((number, line))
    if begun.strip():
        found.append((number, begun.strip()))
    return found


def read_pairs(line: str) -> list[tuple[str, str]]:
    """Return the pairs KEY=VALUE of a line. The keys are lower-cased, because Slurm ignores the case of keys.

    As in Slurm, spaces may stand around the sign, and a value in quotes may hold spaces.
    """
    return [(key.lower(), quoted or plain) for key, quoted, plain in _PAIR.findall(line)]
