"""Sanitizing of text from agents before it is shown or stored."""

from __future__ import annotations

from typing import Any

from gemini_hpc.lines import replace_unprintable
from gemini_hpc.wire.inspect_schema import EventRecord

MAX_NAME = 32
MAX_DETAIL = 320


def sanitize(content: Any) -> Any:
    """Return text, or a nested structure, without control characters and line breaks.

    The text of agents comes from the job's owner and may be read on an operator's terminal.
    """
    if isinstance(content, str):
        return replace_unprintable(content)
    if isinstance(content, dict):
        return {sanitize(key): sanitize(value) for key, value in content.items()}
    return [sanitize(item) for item in content] if isinstance(content, (list, tuple)) else content


def bound_event(event: EventRecord, host: str) -> EventRecord:
    """Return an agent's event with the given host name and bounded, printable text.

    The event's time is not checked.
    """
    name = "".join(c for c in event.name[:MAX_NAME] if c.isalnum() or c in "_-") or "unnamed"
    return EventRecord(
        t=event.t,
        name=name,
        host=host,
        restart=max(0, event.restart),
        version=max(0, event.version),
        detail=replace_unprintable(event.detail[:MAX_DETAIL]),
    )
