"""How a job's state survives the loss of nodes: whole copies on m nodes of a group, or parity over groups of m.

What the agents of all nodes, and their ranks, derive alike from the submission's options and the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb
from typing import NamedTuple

from gemini_hpc.core import placement


class Redundancy(NamedTuple):
    """m: holders of a shard, or nodes of a group with parity (`xor`); N: node ranks of the job; order: in which they
    form groups."""

    N: int
    m: int
    xor: bool = False
    order: placement.Order = placement.AS_RANKED

    @property
    def pairs(self) -> int:
        """Slot pairs for each shard, wherever: its copies, or itself and the parity beside it."""
        return 2 if self.xor else self.m

    @property
    def tolerates(self) -> int:
        """Nodes of a group that may be lost at once."""
        return 1 if self.xor else self.m - 1

    @property
    def memory(self) -> float:
        """Of a node, in states of a node, each in one slot (REFT, section 4.1: 1/(n - 1) for parity)."""
        return 1 + 1 / (self.m - 1) if self.xor else self.m

    @property
    def sent(self) -> int:
        """By a node for each version, in states of a node; of the last group, where that is larger, the same."""
        return 1 if self.xor else self.m - 1

    @property
    def fetched(self) -> int:
        """By a lost node's replacement, for its own shards, in states of a node."""
        return self.m - 1 if self.xor else 1

    def recovery_probability(self, k: int) -> float:
        """Probability that k nodes lost at once, all choices alike, leave memory recoverable. Exact. Raises
        ValueError as `placement` does."""
        if not self.xor:
            return placement.recovery_probability(self.N, self.m, k)
        q, rest = divmod(self.N, self.m)
        if not q or not 0 <= k <= self.N:
            raise ValueError(f"{k} lost nodes of {self.N}, in groups of {self.m}")
        # one node each of k groups: without the last one, which has the nodes that are left over, or with it
        ways = comb(q - 1, k) * self.m**k
        if k:
            ways += comb(q - 1, k - 1) * self.m ** (k - 1) * (self.m + rest)
        return float(ways / comb(self.N, k))

    def group(self, node_rank: int) -> tuple[int, ...]:
        """The nodes of its parity group, from itself on around."""
        return placement.ring(node_rank, self.N, self.m, self.order)

    def groups(self) -> list[list[int]]:
        """All of them, by node rank."""
        return [[self.order.rank(position) for position in group] for group in placement.groups(self.N, self.m)]

    def holders(self, home: int) -> tuple[int, ...]:
        """The nodes with whole copies of a node's shards, the node first. Raises ValueError as `placement` does."""
        return (home,) if self.xor else placement.holders(home, self.N, self.m, self.order)

    def receivers(self, home: int) -> tuple[int, ...]:
        """The other nodes to which the bytes of a node's shards go."""
        if self.xor:
            return self.group(home)[1:]
        return placement.holders(home, self.N, self.m, self.order)[1:]

    def peers(self, node_rank: int) -> set[int]:
        """All nodes that send bytes to a node, or get bytes of it; and itself."""
        if self.xor:
            return set(self.group(node_rank))
        return {
            *placement.holders(node_rank, self.N, self.m, self.order),
            *placement.holds_for(node_rank, self.N, self.m, self.order),
        }

    def survives(self, failed: Iterable[int]) -> bool:
        """Whether the loss of these nodes at once leaves every shard somewhere, or what it can be made of."""
        if not self.xor:
            return placement.survivable(self.N, self.m, failed, self.order)
        lost = set(failed)
        return not any(len(lost.intersection(group)) > 1 for group in self.groups())
