"""The redundancy of a job's state against node loss.

The redundancy consists of whole copies on m nodes of a group, or of parity over groups of m. The agents of all nodes
and their ranks derive the scheme alike from the submission's options and the number of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import comb
from typing import NamedTuple

from gemini_hpc.core import placement
from gemini_hpc.core.numbers import PARITY_MAX

USUAL_GROUP, GROUP_MAX = 4, 32
_NUMBER = re.compile("[1-9][0-9]?")
_CODE = re.compile(r"([1-9][0-9]?)\+([1-9])")


class Redundancy(NamedTuple):
    """The redundancy scheme of a job.

    Attributes:
        N: Number of node ranks of the job.
        m: Number of holders of a shard, or of nodes in a group with parity.
        parity: Blocks of parity in a row of a group, which is the number of nodes that the group may lose; 0 for
            whole copies.
        order: Order in which nodes form groups.
    """

    N: int
    m: int
    parity: int = 0
    order: placement.PlacementOrder = placement.AS_RANKED

    @property
    def pairs(self) -> int:
        """Return the number of slot pairs for each shard, over all nodes.

        The pairs hold the copies of the shard, or the shard and the parity beside it.
        """
        return 2 if self.parity else self.m

    @property
    def tolerates(self) -> int:
        """Return the number of nodes of a group that may be lost at once."""
        return self.parity or self.m - 1

    @property
    def memory(self) -> float:
        """Return the memory of a node, in node states, each in one slot.

        REFT, section 4.1, has 1/(n - 1) for parity.
        """
        return 1 + self.parity / (self.m - self.parity) if self.parity else self.m

    @property
    def sent(self) -> int:
        """Return the bytes that a node sends for each version, in node states.

        The value also applies to the last group, where that is larger.
        """
        return self.parity or self.m - 1

    @property
    def fetched(self) -> int:
        """Return the bytes that a lost node's replacement fetches for its own shards, in node states."""
        return self.m - self.parity if self.parity else 1

    def compute_recovery_probability(self, k: int) -> float:
        """Return the probability that k nodes lost at once, all choices alike, leave memory recoverable. Exact.

        Raises:
            ValueError: As in `placement`.
        """
        if not self.parity:
            return placement.compute_recovery_probability(self.N, self.m, k)
        q, rest = divmod(self.N, self.m)
        if not q or not 0 <= k <= self.N:
            raise ValueError(f"{k} lost nodes of {self.N}, in groups of {self.m}")
        ways = [comb(self.m + rest, lost) for lost in range(min(self.parity, k) + 1)]  # ways for the last group
        group_ways = [comb(self.m, lost) for lost in range(min(self.parity, k) + 1)]
        others = q - 1
        while others:  # multiply by the power q - 1 of `group_ways`
            if others & 1:
                ways = _multiply_polynomials(ways, group_ways, k)
            group_ways, others = _multiply_polynomials(group_ways, group_ways, k), others >> 1
        return float((ways[k] if k < len(ways) else 0) / comb(self.N, k))

    def list_group(self, node_rank: int) -> tuple[int, ...]:
        """Return the nodes of this node's parity group, starting from the node itself and going around."""
        return placement.list_ring(node_rank, self.N, self.m, self.order)

    def list_groups(self) -> list[list[int]]:
        """Return all groups, as node ranks."""
        return [
            [self.order.find_rank(position) for position in group] for group in placement.list_groups(self.N, self.m)
        ]

    def list_holders(self, home: int) -> tuple[int, ...]:
        """Return the nodes with whole copies of a node's shards, the node itself first.

        Raises:
            ValueError: As in `placement`.
        """
        return (home,) if self.parity else placement.list_holders(home, self.N, self.m, self.order)

    def list_receivers(self, home: int) -> tuple[int, ...]:
        """Return the other nodes that receive the bytes of a node's shards."""
        if self.parity:
            return self.list_group(home)[1:]
        return placement.list_holders(home, self.N, self.m, self.order)[1:]

    def list_peers(self, node_rank: int) -> set[int]:
        """Return all nodes that send bytes to a node or receive bytes of it, and the node itself."""
        if self.parity:
            return set(self.list_group(node_rank))
        return {
            *placement.list_holders(node_rank, self.N, self.m, self.order),
            *placement.list_homes(node_rank, self.N, self.m, self.order),
        }

    def can_survive(self, failed: Iterable[int]) -> bool:
        """Return whether every shard, or the material to rebuild it, survives the loss of these nodes at once."""
        if not self.parity:
            return placement.can_survive(self.N, self.m, failed, self.order)
        lost = set(failed)
        return not any(len(lost.intersection(group)) > self.parity for group in self.list_groups())


def _multiply_polynomials(a: list[int], b: list[int], most: int) -> list[int]:
    """Return the product of two polynomials, up to the power `most`."""
    found = [0] * min(len(a) + len(b) - 1, most + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: max(0, len(found) - i)]):
            found[i + j] += x * y
    return found


def parse_redundancy(text: str) -> tuple[int, int]:
    """Return the nodes of a group and the blocks of parity that a value of `--gemini-redundancy` requests.

    The result is (0, 0) for whole copies.

    Raises:
        ValueError: The value is not a redundancy.
    """
    if text in ("", "replicate"):
        return 0, 0
    how, colon, size = text.partition(":")
    if how == "xor" and (not colon or _NUMBER.fullmatch(size)):
        group, blocks = int(size or USUAL_GROUP), 1
    elif how == "rs" and (found := _CODE.fullmatch(size)):
        blocks = int(found[2])
        group = int(found[1]) + blocks
    else:
        group = blocks = 0
    if not 2 <= group <= GROUP_MAX or blocks > PARITY_MAX:
        raise ValueError(
            f"redundancy {text[:40]!r}: wanted replicate, xor:N with N from 2 to {GROUP_MAX}, or rs:K+M with M from "
            f"1 to {PARITY_MAX} and K + M to {GROUP_MAX}"
        )
    return group, blocks


def format_kind(parity: int) -> str:
    """Return the word with which the option's value begins."""
    return "xor" if parity == 1 else "rs" if parity else "replicate"


def format_redundancy(m: int, parity: int) -> str:
    """Return the redundancy as the option writes it."""
    return f"xor:{m}" if parity == 1 else f"rs:{m - parity}+{parity}" if parity else f"{m} replicas"
