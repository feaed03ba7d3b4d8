"""What becomes of a job when a whole failure domain (a rack, a switch) is lost at once. GEMINI's probabilities (SOSP
'23, section 4) are of nodes that fail by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gemini_hpc.core import domains
from gemini_hpc.core.placement import AS_RANKED, Order
from gemini_hpc.core.redundancy import Redundancy


@dataclass(frozen=True)
class DomainLoss:
    """domains: how many there are, each as likely to be lost as another; survived: share of them that memory
    survives the loss of, where copies are kept apart; as_listed: the same where nobody knows of domains."""

    domains: int
    survived: float
    as_listed: float


def domain_loss(of: Sequence[str], m: int, *, parity: int = 0) -> DomainLoss:
    """of: each node's domain, in the order of Slurm's list; parity: blocks of it in a row of a group of m
    nodes; 0: whole copies. Raises ValueError for an m
    that cannot be, and where no domain is known."""
    known = len(set(of) - {""})
    if not known:
        raise ValueError("no node has a known failure domain")
    order = domains.arrange(of, m)
    if parity:
        apart, listed = _too_many(of, m, parity, order), _too_many(of, m, parity, AS_RANKED)
    else:
        apart, listed = domains.fatal(of, m, order), domains.fatal(of, m)
    return DomainLoss(known, 1 - len(apart) / known, 1 - len(listed) / known)


def _too_many(of: Sequence[str], m: int, parity: int, order: Order) -> set[str]:
    """Domains with more nodes of one group than it may lose."""
    groups = Redundancy(len(of), m, parity, order).groups()
    counted = (Counter(of[node] for node in group if of[node]) for group in groups)
    return {domain for count in counted for domain, nodes in count.items() if nodes > parity}
