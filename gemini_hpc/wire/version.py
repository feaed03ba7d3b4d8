"""The protocol's version, and how two ends agree on one (requirement not-a-failure). How it is raised:
docs/protocol.md.

Each end tells the lowest and the highest version that it speaks, the lowest in the field that version 1 compared for
equality; so a version 1 is understood, and understands us, without a second attempt.
"""

from __future__ import annotations

CURRENT = 2
OLDEST = 1  # CURRENT - 1: nodes, controller and users' environments are not upgraded at one moment


def common(least: int, most: int) -> int:
    """The highest version that this end shares with one that speaks `least` to `most`; 0: none. most 0: it did not
    say, which is how version 1 speaks."""
    highest = min(most or least, CURRENT)
    return highest if highest >= max(least, OLDEST) else 0


def mismatch(least: int, most: int) -> str:
    """What to tell an end with which there is no common version."""
    theirs = f"{least}" if most in (0, least) else f"{least} to {most}"
    return f"protocol {theirs}, wanted {OLDEST} to {CURRENT}: install the same gemini-hpc on all hosts"
