"""The protocol's version and its negotiation between two ends (requirement not-a-failure).

docs/dev/protocol.md describes how the version is raised. Each end reports the lowest and the highest version that it
speaks, because nodes, controller and users' environments are not upgraded at one moment. The first release speaks one
version only.
"""

from __future__ import annotations

CURRENT = 4
OLDEST = 4  # from the next version on, this is the version before CURRENT


def find_common(least: int, most: int) -> int:
    """Return the highest version shared with an end that speaks `least` to `most`; 0: none."""
    highest = min(most, CURRENT)
    return highest if highest >= max(least, OLDEST) else 0


def describe_mismatch(least: int, most: int) -> str:
    """Return the message for an end without a common version."""
    theirs, ours = _format_span(least, most), _format_span(OLDEST, CURRENT)
    return f"protocol {theirs}, wanted {ours}: install the same gemini-hpc on all hosts"


def _format_span(least: int, most: int) -> str:
    return f"{least}" if most <= least else f"{least} to {most}"
