"""How a job's state survives the loss of nodes: whole copies on m nodes of a group, or parity over groups of m.

What the agents of all nodes, and their ranks, derive alike from the submission's options and the number of nodes.
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
    """m: holders of a shard, or nodes of a group with parity; N: node ranks of the job; parity: blocks of it in a row
    of a group, as many as nodes that it may lose, or 0 for whole copies; order: in which nodes form groups."""

    N: int
    m: int
    parity: int = 0
    order: placement.Order = placement.AS_RANKED

    @property
    def pairs(self) -> int:
        """Slot pairs for each shard, wherever: its copies, or itself and the parity beside it."""
        return 2 if self.parity else self.m

    @property
    def tolerates(self) -> int:
        """Nodes of a group that may be lost at once."""
        return self.parity or self.m - 1

    @property
    def memory(self) -> float:
        """Of a node, in states of a node, each in one slot (REFT, section 4.1: 1/(n - 1) for parity)."""
        return 1 + self.parity / (self.m - self.parity) if self.parity else self.m

    @property
    def sent(self) -> int:
        """By a node for each version, in states of a node; of the last group, where that is larger, the same."""
        return self.parity or self.m - 1

    @property
    def fetched(self) -> int:
        """By a lost node's replacement, for its own shards, in states of a node."""
        return self.m - self.parity if self.parity else 1

    def recovery_probability(self, k: int) -> float:
        """Probability that k nodes lost at once, all choices alike, leave memory recoverable. Exact. Raises
        ValueError as `placement` does."""
        if not self.parity:
            return placement.recovery_probability(self.N, self.m, k)
        q, rest = divmod(self.N, self.m)
        if not q or not 0 <= k <= self.N:
            raise ValueError(f"{k} lost nodes of {self.N}, in groups of {self.m}")
        ways = [comb(self.m + rest, lost) for lost in range(min(self.parity, k) + 1)]  # of the last group
        each = [comb(self.m, lost) for lost in range(min(self.parity, k) + 1)]
        others = q - 1
        while others:  # to the power of q - 1
            if others & 1:
                ways = _times(ways, each, k)
            each, others = _times(each, each, k), others >> 1
        return float((ways[k] if k < len(ways) else 0) / comb(self.N, k))

    def group(self, node_rank: int) -> tuple[int, ...]:
        """The nodes of its parity group, from itself on around."""
        return placement.ring(node_rank, self.N, self.m, self.order)

    def groups(self) -> list[list[int]]:
        """All of them, by node rank."""
        return [[self.order.rank(position) for position in group] for group in placement.groups(self.N, self.m)]

    def holders(self, home: int) -> tuple[int, ...]:
        """The nodes with whole copies of a node's shards, the node first. Raises ValueError as `placement` does."""
        return (home,) if self.parity else placement.holders(home, self.N, self.m, self.order)

    def receivers(self, home: int) -> tuple[int, ...]:
        """The other nodes to which the bytes of a node's shards go."""
        if self.parity:
            return self.group(home)[1:]
        return placement.holders(home, self.N, self.m, self.order)[1:]

    def peers(self, node_rank: int) -> set[int]:
        """All nodes that send bytes to a node, or get bytes of it; and itself."""
        if self.parity:
            return set(self.group(node_rank))
        return {
            *placement.holders(node_rank, self.N, self.m, self.order),
            *placement.holds_for(node_rank, self.N, self.m, self.order),
        }

    def survives(self, failed: Iterable[int]) -> bool:
        """Whether the loss of these nodes at once leaves every shard somewhere, or what it can be made of."""
        if not self.parity:
            return placement.survivable(self.N, self.m, failed, self.order)
        lost = set(failed)
        return not any(len(lost.intersection(group)) > self.parity for group in self.groups())


def _times(a: list[int], b: list[int], most: int) -> list[int]:
    """The product of two polynomials, up to a power of `most`."""
    found = [0] * min(len(a) + len(b) - 1, most + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: max(0, len(found) - i)]):
            found[i + j] += x * y
    return found


def parse(text: str) -> tuple[int, int]:
    """The nodes of a group and the blocks of parity that a value of `--gemini-redundancy` asks for; (0, 0) for whole
    copies. Raises ValueError."""
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


def kind(parity: int) -> str:
    """What the option begins with."""
    return "xor" if parity == 1 else "rs" if parity else "replicate"


def name(m: int, parity: int) -> str:
    """As the option has it."""
    return f"xor:{m}" if parity == 1 else f"rs:{m - parity}+{parity}" if parity else f"{m} replicas"
