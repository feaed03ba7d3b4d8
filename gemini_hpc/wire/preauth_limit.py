"""Connections whose callers have not said yet who they are: bounded in number, and fair between addresses."""

from __future__ import annotations

from collections.abc import Callable

Abort = Callable[[], None]


class PreauthLimit:
    """Holds at most `most` waiting connections. When it is full, the address that has the most of them loses its
    oldest one, so that whoever opens connections without end only pushes out its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, dict[int, Abort]] = {}
        self._count = self._last = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, address: str, abort: Abort) -> int:
        """Let one more wait; its ticket, for `leave`. `abort` is called if it has to give way."""
        if self._count >= self._most:
            self._push_out()
        self._last += 1
        self._waiting.setdefault(address, {})[self._last] = abort
        self._count += 1
        return self._last

    def leave(self, address: str, ticket: int) -> None:
        """It has been authenticated, or has gone. (One that was pushed out has left already.)"""
        waiting = self._waiting.get(address, {})
        if waiting.pop(ticket, None) is not None:
            self._count -= 1
        if not waiting:
            self._waiting.pop(address, None)

    def _push_out(self) -> None:
        address = max(self._waiting, key=lambda a: len(self._waiting[a]))
        ticket, abort = next(iter(self._waiting[address].items()))
        self.leave(address, ticket)
        abort()
