"""A limit on connections whose callers are not authenticated yet, in number and per address."""

from __future__ import annotations

from collections.abc import Callable

Abort = Callable[[], None]


class PreauthLimit:
    """A set of at most `most` waiting connections.

    If the set is full, the address with the most connections loses its oldest one. A caller that opens connections
    without end therefore pushes out only its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, dict[int, Abort]] = {}
        self._count = self._last = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, address: str, abort: Abort) -> int:
        """Add a waiting connection and return its ticket for `leave`.

        Args:
            address: Address of the caller.
            abort: Called if this connection is pushed out.
        """
        if self._count >= self._most:
            self._push_out()
        self._last += 1
        self._waiting.setdefault(address, {})[self._last] = abort
        self._count += 1
        return self._last

    def leave(self, address: str, ticket: int) -> None:
        """Remove a connection that was authenticated or has ended, unless it was pushed out already."""
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
