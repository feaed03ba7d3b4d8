"""Trainings that ranks have closed (`Checkpointer.close`). The next training of the same name begins anew.

An agent writes the closing to disk before it answers the closing rank. Inventories carry the record to the root, and
the plan carries it to every agent. The record therefore holds in later rounds and incarnations, as long as one agent
lives.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.pledges import Pledges
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.core import sequence
from gemini_hpc.core.sequence import Closed, Closing


class Closings:
    """The closed trainings that one agent knows of, on disk (`pledges`) as long as the agent lives."""

    def __init__(self, membership: Membership, pledges: Pledges, log: Log) -> None:
        self._membership, self._pledges, self._log = membership, pledges, log

    @property
    def all(self) -> tuple[Closed, ...]:
        """Return the trainings that all ranks have closed, as far as this agent knows."""
        return self._pledges.now.closed

    @property
    def own(self) -> tuple[Closing, ...]:
        """Return the closings of this node's ranks."""
        return self._pledges.now.closing

    def get(self, name: str) -> Closed | None:
        """Return the record of a closed training, or None if the training is not closed."""
        return next((closed for closed in self.all if closed.training == name), None)

    def close(self, training: Training, series: str, version: int) -> None:
        """Record that ranks of this node have closed their checkpointers, the last one at this version."""
        membership, others = self._membership, [part for part in self.own if part.training != training.name]
        part = Closing(
            training.name,
            training.world,
            tuple(sorted(training.finished)),
            version,
            membership.restart,
            series,
            membership.epoch,
        )
        self._put(self.all, (*others, part))

    def learn(self, found: Iterable[Closed], parts: Iterable[Closing] = ()) -> tuple[Closed, ...]:
        """Record more closed trainings and closings on disk. Return all closed trainings known now."""
        self._put(sequence.merge_closed((*self.all, *found), parts), self.own)
        return self.all

    def _put(self, closed: tuple[Closed, ...], closing: tuple[Closing, ...]) -> None:
        pledges = self._pledges
        now = msgspec.structs.replace(pledges.now, closed=closed, closing=closing[-sequence.MAX_KEPT :])
        if now != pledges.now and not pledges.put(now):
            self._log(
                "unwritten",
                detail="cannot write the list of closed trainings to disk: this node forgets it if its agent dies",
            )
