"""The agents of a job that report a node as silent, with the time of each last report. No I/O, no clock.

Agents repeat current reports every 2 s. An old report proves nothing about the node now: it may have hung and be
back since. So only fresh reports count, and an agent that receives from the node again withdraws its report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

FRESH_S = 10.0  # agents repeat a report every 2 s


class Witnesses:
    """The reports about the nodes of one job, for all of its incarnations. Times are monotonic."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], dict[str, float]] = {}  # (restart, node) -> witness -> time of the report

    def record_witnesses(self, restart: int, node: str, witnesses: Iterable[str], now: float) -> None:
        """Record that these witnesses report a node of this incarnation as silent."""
        self._forget(now)
        reports = self._said.setdefault((restart, node), {})
        reports.update(dict.fromkeys(witnesses, now))

    def withdraw_reports(self, restart: int, witness: str, named: Collection[str]) -> None:
        """Withdraw a witness's reports about all nodes of the incarnation except those in `named`."""
        for (incarnation, node), reports in self._said.items():
            if incarnation == restart and node not in named:
                reports.pop(witness, None)

    def list_fresh(self, restart: int, node: str, now: float, *, counts_later: bool = False) -> frozenset[str]:
        """Return the agents that have reported the node lately. With `counts_later`, include later incarnations."""
        found = [
            witness
            for (incarnation, host), reports in self._said.items()
            if host == node and (incarnation == restart or (counts_later and incarnation > restart))
            for witness, at in reports.items()
            if now - at <= FRESH_S
        ]
        return frozenset(found)

    def _forget(self, now: float) -> None:
        kept = {key: {w: t for w, t in reports.items() if now - t <= FRESH_S} for key, reports in self._said.items()}
        self._said = {key: reports for key, reports in kept.items() if reports}
