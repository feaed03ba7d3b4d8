"""Views: the nodes of an allocation that an incarnation goes on with when nodes die and it has spares.

An agent that learns of a lost node adopts the view without the node, if spares make up for it. The set of known
losses only grows. Two agents that know different losses both adopt the view without either node (a join). The
message may therefore be passed on in any order, twice, or late. A view trains once all its agents have taken the
plan of its recovery round. An agent is in one view at a time and never goes back. Two views of which neither
contains the other are never both taken by all of their agents. The reason is that each has more than half of the
allocation, and so they share an agent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class View:
    """A view of the allocation.

    Attributes:
        allocated: Nodes in the order of Slurm's list. The batch script runs on the first.
        spares: Number of nodes that did not train at the beginning.
        lost: Nodes that the job goes on without.
    """

    allocated: tuple[str, ...]
    spares: int = 0
    lost: frozenset[str] = frozenset()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the nodes in this view, in the order of Slurm's list."""
        return tuple(host for host in self.allocated if host not in self.lost) if self.lost else self.allocated

    @property
    def wanted(self) -> int:
        """Return the number of nodes that must train."""
        return max(1, len(self.allocated) - self.spares)

    def exclude(self, dead: Iterable[str], nodes: int = 0) -> View | None:
        """Return the view without these nodes as well, or None.

        None means that nothing new is lost, or that Slurm must requeue the job because it cannot go on like this. A
        job cannot go on with half of the allocation or less, or without the batch script. Nor can it go on with
        fewer nodes than train (`nodes`, if that is more than `wanted`).
        """
        lost = self.lost | set(dead).intersection(self.allocated)
        left = len(self.allocated) - len(lost)
        if lost == self.lost or left < max(self.wanted, nodes) or 2 * left <= len(self.allocated):
            return None
        return None if self.allocated[0] in lost else replace(self, lost=lost)
