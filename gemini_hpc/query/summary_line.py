"""The line about a job that the controller writes into Slurm's AdminComment at the job's end: a pure function.

The line has numbers, and words of this module only: no text of a user or an agent gets into Slurm's records. Numbers
of agents are their owner's claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gemini_hpc.query import past
from gemini_hpc.wire.inspect_schema import EventRecord

PREFIX = "gemini-hpc: "
_MOST = 10**9  # a larger number is shown as this one


class _Resumed(msgspec.Struct):
    """The part of a `resumed` event's detail that counts here."""

    rank: int
    repeated: int = 0


def build_summary_line(events: Sequence[EventRecord], replicas: int, parity: int, nodes: int) -> str:
    """Return the line: the job's protection, its failures, its recoveries, and the steps that it repeated.

    Args:
        events: The job's events, in order of time.
        replicas: Copies of each state, or with parity the nodes of a group; 0: unknown.
        parity: Parity blocks of a group; 0: whole copies.
        nodes: Nodes of the last incarnation; 0: unknown.
    """
    saved = max((e.version for e in events if e.name in past.SEALED), default=0)
    back = [found for found in past.list_recoveries(events) if found["completed"]]
    lost = len({(e.restart, e.host) for e in events if e.name == "confirmed"})
    relaunched = sum(e.name == "relaunch" for e in events)
    repeated = sum(
        max(0, found.repeated) for e in events if (found := _decode_resumed(e)) is not None and found.rank == 0
    )
    parts = []
    if replicas:
        how = (
            f"parity in groups of {_format_number(replicas)}" if parity else _format_count(replicas, "copy", "copies")
        )
        parts.append(f"{how} on {_format_count(nodes, 'node')}" if nodes else how)
    parts.append(f"last saved step {_format_number(saved)}" if saved else "no step was saved")
    if lost:
        parts.append(f"{_format_count(lost, 'node')} lost")
    if back:
        total_s = sum(r["total_s"] for r in back)
        parts.append(f"{_format_count(len(back), 'recovery', 'recoveries')} in {_format_number(total_s)} s")
    if relaunched:
        parts.append(f"ranks restarted {_format_count(relaunched, 'time')}")
    if lost or back or relaunched or repeated:
        parts.append(f"{_format_count(repeated, 'step')} repeated")
    return PREFIX + "; ".join(parts)


def _decode_resumed(event: EventRecord) -> _Resumed | None:
    if event.name == "resumed":
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(event.detail, type=_Resumed)
    return None


def _format_number(value: float) -> str:
    return f"{min(max(0, value), _MOST):.0f}"


def _format_count(value: int, noun: str, nouns: str = "") -> str:
    return f"{_format_number(value)} {noun if value == 1 else nouns or f'{noun}s'}"
