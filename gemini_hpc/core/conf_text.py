"""Lines of Slurm's own files: slurm.conf, topology.conf."""

from __future__ import annotations


def lines(text: str) -> list[tuple[int, str]]:
    """Return the lines without comments, those that go on in the next put together; each with its number."""
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


def pair(word: str) -> tuple[str, str]:
    """Split KEY=VALUE; Slurm's keys have no case."""
    key, _, value = word.partition("=")
    return key.lower(), value
