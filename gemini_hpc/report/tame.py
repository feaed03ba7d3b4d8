"""How what agents say may be shown."""

from __future__ import annotations

from typing import Any


def tame(said: Any) -> Any:
    """What agents say comes from the job's owner, and may be read on an operator's terminal: no control characters,
    no lines of their own."""
    if isinstance(said, str):
        return said if said.isprintable() else "".join(c if c.isprintable() else "?" for c in said)
    if isinstance(said, dict):
        return {tame(key): tame(value) for key, value in said.items()}
    return [tame(item) for item in said] if isinstance(said, list) else said
