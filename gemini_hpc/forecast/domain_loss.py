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


def domain_loss(of: Sequence[str], m: int, *, xor: bool = False) -> DomainLoss:
    """of: each node's domain, in the order of Slurm's list; xor: parity over groups of m. Raises ValueError for an m
    that cannot be, and where no domain is known."""
    known = len(set(of) - {""})
    if not known:
        raise ValueError("no node has a known failure domain")
    order = domains.arrange(of, m)
    if xor:
        apart, listed = _twice(of, m, order), _twice(of, m, AS_RANKED)
    else:
        apart, listed = domains.fatal(of, m, order), domains.fatal(of, m)
    return DomainLoss(known, 1 - len(apart) / known, 1 - len(listed) / known)


def _twice(of: Sequence[str], m: int, order: Order) -> set[str]:
    """Domains with two nodes of one parity group."""
    groups = Redundancy(len(of), m, True, order).groups()
    counted = (Counter(of[node] for node in group if of[node]) for group in groups)
    return {domain for count in counted for domain, nodes in count.items() if nodes > 1}
