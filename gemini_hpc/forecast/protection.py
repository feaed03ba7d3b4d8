"""The protection that a training of a given size can have: memory, network time, survival, the tier's interval.

Node failures are independent, at the same rate for each node, as in GEMINI (SOSP '23, section 4). `DomainLoss` is for
nodes that fail together for one reason (a rack, a switch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gemini_hpc.clock import DAY_S
from gemini_hpc.core import domains, save_interval, tier_interval
from gemini_hpc.core.placement import AS_RANKED, PlacementOrder
from gemini_hpc.core.redundancy import Redundancy, format_kind, format_redundancy
from gemini_hpc.forecast.schemes import TrainingFigures, build_ours, build_ours_spare

FOLD_BYTES_S = 4.2e9  # parity on one core of the project's own machine: `make bench ONLY=rs`
SLOTS = 2  # per copy: the newest sealed version and the version under way


@dataclass(frozen=True)
class RequestedProtection:
    """The requested protection.

    Attributes:
        training: Training to protect.
        memory_bytes: Memory of a node that copies may take.
        idle: Share of an iteration in which the network is idle.
        ceiling: Highest overhead, as a share of the training's time.
        per_day: Failures of one node a day.
        hardware: Share of these failures that take the node's memory.
        imports_s: Seconds from the restart of a program until it reaches resume().
    """

    training: TrainingFigures
    memory_bytes: float
    idle: float = 0.5
    ceiling: float = save_interval.CEILING
    per_day: float = 0.015
    hardware: float = 0.5
    imports_s: float = 60.0


@dataclass(frozen=True)
class Protection:
    """The protection with one number of copies, or with parity.

    With parity, `parity` blocks of it stand in each group of `replicas` nodes.

    Attributes:
        replicas: Copies, the own one included; with parity the nodes of a group.
        redundancy: `replicate` (copies), `xor` or `rs`.
        parity: Nodes of a group that may be lost at once; 0 with copies.
        needed_bytes: Memory of a node for all slots.
        fits: The memory suffices.
        transfer_s: Time of a version on the network.
        fold_s: Time of one core for a version's parity.
        every: Iterations from one version to the next.
        over: Iterations in which a version is sent.
        overhead: Share of the training's time.
        within: The overhead is within its ceiling.
        repeated: Most completed iterations that a failure repeats.
        survival: Probability that memory serves, by the number of nodes lost at once (in JSON a string).
        lost_s: Average work that a failure costs.
        down_s: Time until training goes on, by requeue and with a spare.
        effective: Share of effective training, by requeue and with a spare.
        unserved_per_day: Failures a day that no copy in memory serves.
        tier_save_s: Time to save a version to the tier.
        tier_every_s: Time between two such saves that costs least; null if memory serves every failure.
    """

    replicas: int
    redundancy: str
    parity: int
    needed_bytes: float
    fits: bool
    transfer_s: float
    fold_s: float
    every: int
    over: int
    overhead: float
    within: bool
    repeated: int
    survival: dict[int, float]
    lost_s: float
    down_s: tuple[float, float]
    effective: tuple[float, float]
    unserved_per_day: float
    tier_save_s: float
    tier_every_s: float

    @property
    def name(self) -> str:
        """Return the redundancy for people."""
        return format_redundancy(self.replicas, self.parity)


def predict_protection(wish: RequestedProtection, replicas: int, *, parity: int = 0) -> Protection:
    """Return the protection of a training.

    Args:
        wish: Requested protection.
        replicas: Number of copies, or of nodes in a group with parity.
        parity: Blocks of parity in a row of a group of `replicas` nodes; 0 for whole copies.

    Raises:
        ValueError: A number is impossible, such as more copies than nodes.
    """
    t = wish.training
    if parity and not parity < replicas <= t.nodes:
        raise ValueError(f"groups of {replicas} nodes on {t.nodes} nodes: from {parity + 1} to all of them")
    if not 1 <= replicas <= t.nodes:
        raise ValueError(f"{replicas} replicas on {t.nodes} nodes: from 1 to one on each node")
    redundancy = Redundancy(t.nodes, replicas, parity)
    transfer_s, fetch_s = t.node_bytes * redundancy.sent / t.network, t.node_bytes * redundancy.fetched / t.network
    chosen = save_interval.choose_frequency(
        lambda s: transfer_s - s * wish.idle * t.iteration_s, t.iteration_s, ceiling=wish.ceiling
    )
    lost_s = t.iteration_s * (chosen.j / 2 + chosen.s)
    down = build_ours(t, wish.imports_s).down_s + fetch_s, build_ours_spare(t).down_s + fetch_s
    a_day = t.nodes * wish.per_day
    unserved = tier_interval.compute_unserved_per_day(redundancy, wish.per_day * wish.hardware, down[0])
    tier_s = tier_interval.compute_interval_s(t.tier_s, wish.ceiling, unserved)
    from_tier_s = unserved * (tier_s / 2 + 2 * t.tier_s) if unserved else 0.0
    needed = SLOTS * redundancy.memory * t.node_bytes
    by_requeue, by_spare = (
        max(0.0, 1 - chosen.overhead - (a_day * (down_s + lost_s) + from_tier_s) / DAY_S) for down_s in down
    )
    return Protection(
        replicas=replicas,
        redundancy=format_kind(parity),
        parity=parity,
        needed_bytes=needed,
        fits=needed <= wish.memory_bytes,
        transfer_s=transfer_s,
        fold_s=t.node_bytes * redundancy.sent / FOLD_BYTES_S if parity else 0.0,
        every=chosen.j,
        over=chosen.s,
        overhead=chosen.overhead,
        within=chosen.within,
        repeated=chosen.repeated,
        survival={k: redundancy.compute_recovery_probability(k) for k in range(1, min(5, t.nodes) + 1)},
        lost_s=lost_s,
        down_s=down,
        effective=(by_requeue, by_spare),
        unserved_per_day=unserved,
        tier_save_s=t.tier_s,
        tier_every_s=tier_s,
    )


@dataclass(frozen=True)
class DomainLoss:
    """The share of domain losses that memory survives.

    Attributes:
        domains: Number of domains, each equally likely to be lost.
        survived: Share of the domains whose loss memory survives, if copies are kept apart.
        as_listed: Same share if no domains are known.
    """

    domains: int
    survived: float
    as_listed: float


def compute_domain_loss(node_domains: Sequence[str], m: int, *, parity: int = 0) -> DomainLoss:
    """Return the share of domain losses that memory survives.

    Args:
        node_domains: Domain of each node, in the order of Slurm's list.
        m: Number of copies, or of nodes in a group with parity.
        parity: Blocks of parity in a row of a group of m nodes; 0 for whole copies.

    Raises:
        ValueError: m is impossible, or no domain is known.
    """
    known = len(set(node_domains) - {""})
    if not known:
        raise ValueError("no node has a known failure domain")
    order = domains.arrange_nodes(node_domains, m)
    if parity:
        apart, listed = (
            _find_fatal_domains(node_domains, m, parity, order),
            _find_fatal_domains(node_domains, m, parity, AS_RANKED),
        )
    else:
        apart, listed = (
            domains.find_fatal_domains(node_domains, m, order),
            domains.find_fatal_domains(node_domains, m),
        )
    return DomainLoss(known, 1 - len(apart) / known, 1 - len(listed) / known)


def _find_fatal_domains(node_domains: Sequence[str], m: int, parity: int, order: PlacementOrder) -> set[str]:
    """Return the domains that have more nodes in one group than the group may lose."""
    groups = Redundancy(len(node_domains), m, parity, order).list_groups()
    counted = (Counter(node_domains[node] for node in group if node_domains[node]) for group in groups)
    return {domain for count in counted for domain, nodes in count.items() if nodes > parity}
