"""Lines of Slurm's own files: slurm.conf, topology.conf."""

from __future__ import annotations


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


def split_pair(word: str) -> tuple[str, str]:
    """Split KEY=VALUE. The key is lower-cased, because Slurm ignores the case of keys."""
    key, _, value = word.partition("=")
    return key.lower(), value
