"""How what agents say may be shown, and kept."""

from __future__ import annotations

from typing import Any

from gemini_hpc.wire.inspect_schema import EventRecord

MAX_NAME = 32
MAX_DETAIL = 320


def tame(said: Any) -> Any:
    """What agents say comes from the job's owner, and may be read on an operator's terminal: no control characters,
    no lines of their own."""
    if isinstance(said, str):
        return said if said.isprintable() else "".join(c if c.isprintable() else "?" for c in said)
    if isinstance(said, dict):
        return {tame(key): tame(value) for key, value in said.items()}
    return [tame(item) for item in said] if isinstance(said, list) else said


def bounded_event(event: EventRecord, host: str) -> EventRecord:
    """An agent's event with its own host name and bounded, printable text; its time is not looked at."""
    name = "".join(c for c in event.name[:MAX_NAME] if c.isalnum() or c in "_-") or "unnamed"
    return EventRecord(
        t=event.t,
        name=name,
        host=host,
        restart=max(0, event.restart),
        version=max(0, event.version),
        detail=_plain(event.detail, MAX_DETAIL),
    )


def _plain(text: str, limit: int) -> str:
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:limit])[:limit]
