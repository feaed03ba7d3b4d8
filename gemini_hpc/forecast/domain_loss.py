"""The fate of a job if a whole failure domain (a rack, a switch) is lost at once.

GEMINI's probabilities (SOSP '23, section 4) assume independent node failures instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gemini_hpc.core import domains
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder
from gemini_hpc.core.redundancy import Redundancy


@dataclass(frozen=True)
class DomainLoss:
    """The share of domain losses that memory survives.

    Attributes:
        domains: Number of domains, each equally likely to be lost.
        survived: Share of the domains whose loss memory survives, if copies are kept apart.
        as_listed: The same share if no domains are known.
    """

    domains: int
    survived: float
    as_listed: float


def compute_domain_loss(of: Sequence[str], m: int, *, parity: int = 0) -> DomainLoss:
    """Return the share of domain losses that memory survives.

    Args:
        of: Domain of each node, in the order of Slurm's list.
        m: Number of copies, or of nodes in a group with parity.
        parity: Blocks of parity in a row of a group of m nodes; 0 for whole copies.

    Raises:
        ValueError: m is impossible, or no domain is known.
    """
    known = len(set(of) - {""})
    if not known:
        raise ValueError("no node has a known failure domain")
    order = domains.arrange_nodes(of, m)
    if parity:
        apart, listed = _find_fatal_domains(of, m, parity, order), _find_fatal_domains(of, m, parity, AS_RANKED)
    else:
        apart, listed = domains.find_fatal_domains(of, m, order), domains.find_fatal_domains(of, m)
    return DomainLoss(known, 1 - len(apart) / known, 1 - len(listed) / known)


def _find_fatal_domains(of: Sequence[str], m: int, parity: int, order: PlacementOrder) -> set[str]:
    """Return the domains that have more nodes in one group than the group may lose."""
    groups = Redundancy(len(of), m, parity, order).list_groups()
    counted = (Counter(of[node] for node in group if of[node]) for group in groups)
    return {domain for count in counted for domain, nodes in count.items() if nodes > parity}
