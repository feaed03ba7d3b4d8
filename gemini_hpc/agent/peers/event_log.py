"""The job's events as one agent sees them: kept for `inspect`, printed, and sent to the controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gemini_hpc import clock
from gemini_hpc.wire import inspect_schema
from gemini_hpc.wire.rate_limit import RateLimit

MAX_EVENTS = 1000
_DETAIL_CHARS, _COMPLAINT_CHARS = 500, 300


class Log(Protocol):
    """The function with which the parts of an agent log an event."""

    def __call__(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        """Log one line of the job's events."""


class EventLog:
    """An agent's log of the job's events."""

    def __init__(
        self, node: str, read_restart: Callable[[], int], write_line: Callable[[float, str, int, str], None]
    ) -> None:
        """Create an empty log.

        Args:
            node: Name of this agent's node.
            read_restart: Returns the number of the incarnation, -1 before the first.
            write_line: Prints one line.
        """
        self._node, self._read_restart, self._write_line = node, read_restart, write_line
        self._complaints = RateLimit(per_s=1.0, burst=1.0)
        self._followers: list[Callable[[inspect_schema.EventRecord], None]] = []
        self.events: list[inspect_schema.EventRecord] = []

    def add_follower(self, follower: Callable[[inspect_schema.EventRecord], None]) -> None:
        """Call the follower with each event from now on."""
        self._followers.append(follower)

    def log(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        """Log one line of the job's events."""
        event = inspect_schema.EventRecord(
            t=clock.time() if t is None else t,
            name=name,
            host=self._node,
            restart=max(self._read_restart(), 0),
            version=version,
            detail=detail[:_DETAIL_CHARS],
        )
        self.events.append(event)
        del self.events[:-MAX_EVENTS]
        for follower in self._followers:
            follower(event)
        self._write_line(event.t, name, version, event.detail)

    def log_rate_limited(self, text: str) -> None:
        """Log a fault that a stranger can cause: a line in the agent's own log, and no event.

        At most one line a second is printed.
        """
        if self._complaints.take_tokens():
            missed = self._complaints.take_missed()
            more = f" (and {missed} others before)" if missed else ""
            self._write_line(clock.time(), "complaint", 0, text[:_COMPLAINT_CHARS] + more)
