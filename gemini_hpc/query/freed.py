"""The report on copies that were freed while their job was held or waited: a pure rule over the event log."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gemini_hpc.wire.inspect_schema import EventRecord

_SHOWN = 8
_NO_LOSS = ("the training succeeded", "it holds nothing")  # reasons of `released` without interest for the user


def describe_freed_copies(events: Iterable[EventRecord], restart: int) -> str:
    """Return one sentence on the copies of this incarnation that its agents have freed, or "".

    An agent's event holds the version that was sealed (0 without one), and its reason before the first
    semicolon.
    """
    released = (e for e in events if e.name == "released" and e.version and e.restart == restart)
    found = {e.host: e for e in released if not e.detail.startswith(_NO_LOSS)}
    if not found:
        return ""
    hosts, last = sorted(found), max(found.values(), key=lambda e: e.t)
    shown = ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")
    when = time.strftime("%b %d %H:%M", time.localtime(last.t))
    why = last.detail.split(";")[0][:120]
    return f"lost: the copies of version {last.version} on {shown} were freed at {when}: {why}"
