"""Views: with which nodes of its allocation an incarnation goes on, when nodes die and it has spares.

Who learns that a node is lost goes over to the view without it, if spares make up for it. What is known to be lost
only grows, and two agents that know of different losses both go over to the view without either (a join). So the word
may be passed on in any order, twice, or late. A view trains once all agents in it have taken the plan of its recovery
round; an agent is in one view at a time, and never goes back. Two views of which neither holds the other are never
both taken by all of their agents: each has more than half of the allocation, and so an agent in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class View:
    """allocated: the nodes, in the order of Slurm's list; the batch script runs on the first. spares: how many of
    them were not to train in the beginning; lost: that the job goes on without."""

    allocated: tuple[str, ...]
    spares: int = 0
    lost: frozenset[str] = frozenset()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Nodes in this view, in the order of Slurm's list."""
        return tuple(host for host in self.allocated if host not in self.lost) if self.lost else self.allocated

    @property
    def wanted(self) -> int:
        """Nodes that are to train."""
        return max(1, len(self.allocated) - self.spares)

    def without(self, dead: Iterable[str], nodes: int = 0) -> View | None:
        """The view without these nodes, too; None where nothing new is lost, or where the job cannot go on so: with
        fewer nodes than train (`nodes`, where more than `wanted`), with half of the allocation or less, or without
        the batch script. Then Slurm has to requeue the job."""
        lost = self.lost | set(dead).intersection(self.allocated)
        left = len(self.allocated) - len(lost)
        if lost == self.lost or left < max(self.wanted, nodes) or 2 * left <= len(self.allocated):
            return None
        return None if self.allocated[0] in lost else replace(self, lost=lost)
