"""Which agents of a job say that a node of it is silent, and when each has said so last. No I/O, no clock.

Agents repeat what counts every 2 s. What was said long ago says nothing of the node as it is now: it may have hung,
and be back since. So only what is fresh counts, and an agent that hears the node again takes its word back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

FRESH_S = 10.0


class Witnesses:
    """Of one job, for all of its incarnations. Times are monotonic."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], dict[str, float]] = {}  # (restart, node) -> witness -> when

    def hear(self, restart: int, node: str, who: Iterable[str], now: float) -> None:
        """These say so of a node of this incarnation."""
        self._forget(now)
        said = self._said.setdefault((restart, node), {})
        said.update(dict.fromkeys(who, now))

    def take_back(self, restart: int, who: str, but: Collection[str]) -> None:
        """This one holds no node of the incarnation for dead but these."""
        for (of, node), said in self._said.items():
            if of == restart and node not in but:
                said.pop(who, None)

    def fresh(self, restart: int, node: str, now: float, *, later: bool = False) -> frozenset[str]:
        """Who has said so lately. later: also those of later incarnations."""
        found = [
            who
            for (of, host), said in self._said.items()
            if host == node and (of == restart or (later and of > restart))
            for who, at in said.items()
            if now - at <= FRESH_S
        ]
        return frozenset(found)

    def _forget(self, now: float) -> None:
        kept = {key: {w: t for w, t in said.items() if now - t <= FRESH_S} for key, said in self._said.items()}
        self._said = {key: said for key, said in kept.items() if said}
