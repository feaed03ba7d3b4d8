"""The protocol's version, and how two ends agree on one (requirement not-a-failure). How it is raised:
docs/protocol.md.

Each end tells the lowest and the highest version that it speaks: nodes, controller and users' environments are not
upgraded at one moment. The first release speaks one version only.
"""

from __future__ import annotations

CURRENT = 4
OLDEST = 4  # from the next version on: the one before


def common(least: int, most: int) -> int:
    """The highest version that this end shares with one that speaks `least` to `most`; 0: none."""
    highest = min(most, CURRENT)
    return highest if highest >= max(least, OLDEST) else 0


def mismatch(least: int, most: int) -> str:
    """What to tell an end with which there is no common version."""
    theirs, ours = _span(least, most), _span(OLDEST, CURRENT)
    return f"protocol {theirs}, wanted {ours}: install the same gemini-hpc on all hosts"


def _span(least: int, most: int) -> str:
    return f"{least}" if most <= least else f"{least} to {most}"
