"""How trainings protect themselves, as far as failures ask for it; and what failures cost them on the average.

Symbols and figures are those of GEMINI (SOSP '23, section 2 and section 7), REFT and just-in-time checkpointing
(EuroSys '24). All times are seconds of the clock on the wall.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gemini_hpc.core import placement

DAY_S = 86400.0
STRAWMAN_EVERY_S = 3 * 3600.0  # BLOOM's interval, which GEMINI takes for its first baseline
# GEMINI, section 7.3: GPT-2 100B on 16 p4d machines.
DETECT_S, RESTART_S = 15.0, 240.0
SERIALIZE_S_PER_BYTE = 81.0 / 75.2e9  # of torch.save() to a machine's disk, all of its shards
ITERATION_S = 62.0


@dataclass(frozen=True)
class Scheme:
    """One way. every_s: from one checkpoint to the next; stall_s: for which each holds the training up; usable_s:
    from its beginning until it can be gone back to; read_s: to load it. detect_s, save_s, restart_s: after a failure,
    until it is known, until what lives in memory is safe, and until the program has begun again. replicas: copies in
    memory, of which a shard needs one; parity: nodes of a group with parity, each of which may lose one. Where both
    are 0, what is gone back to is not lost with nodes."""

    name: str
    every_s: float
    stall_s: float = 0.0
    usable_s: float = 0.0
    read_s: float = 0.0
    detect_s: float = DETECT_S
    save_s: float = 0.0
    restart_s: float = RESTART_S
    replicas: int = 0
    parity: int = 0

    def __post_init__(self) -> None:
        if self.every_s <= 0 or min(self.stall_s, self.usable_s, self.read_s) < 0 or self.stall_s >= self.every_s:
            raise ValueError(f"{self.name}: a checkpoint every {self.every_s:g} s that takes {self.stall_s:g} s")

    @property
    def wasted_s(self) -> float:
        """Work that a failure costs on the average, and the reading (GEMINI, equation 1)."""
        return self.usable_s + self.every_s / 2 + self.read_s

    @property
    def in_memory(self) -> bool:
        """Whether what is gone back to is lost where too many nodes are."""
        return bool(self.replicas or self.parity)

    def survives(self, nodes: int, lost: Collection[int]) -> bool:
        """Whether memory serves where these of the node ranks 0 to `nodes` - 1 are lost at once. Where parity groups
        do not divide the nodes, the last one takes the rest."""
        if self.parity:
            group = min(self.parity, nodes)
            last = nodes // group - 1
            return len({min(node // group, last) for node in lost}) == len(lost)
        return not self.replicas or placement.survivable(nodes, min(self.replicas, nodes), lost)

    @property
    def down_s(self) -> float:
        """From a failure to the reading."""
        return self.detect_s + self.save_s + self.restart_s

    def effective(self, failures_per_day: float) -> float:
        """Share of the time that is training which counts, if failures never meet (GEMINI, section 7.3)."""
        return 1 - self.stall_s / self.every_s - failures_per_day * (self.down_s + self.wasted_s) / DAY_S


@dataclass(frozen=True)
class Training:
    """What the schemes have to protect. state_bytes: of all ranks; network: bytes/s of one node's; tier: bytes/s of
    the persistent storage, for all nodes together."""

    nodes: int = 16
    state_bytes: float = 1203e9  # GPT-2 100B: 12 bytes a parameter
    iteration_s: float = ITERATION_S
    network: float = 400e9 / 8
    tier: float = 20e9 / 8
    replicas: int = 2

    @property
    def node_bytes(self) -> float:
        """State of one node."""
        return self.state_bytes / self.nodes

    @property
    def tier_s(self) -> float:
        """To bring all state to the storage, or back."""
        return self.state_bytes / self.tier

    @property
    def serialize_s(self) -> float:
        """torch.save() of a node's state."""
        return self.node_bytes * SERIALIZE_S_PER_BYTE


def strawman(t: Training) -> Scheme:
    """To storage, every three hours (GEMINI, section 7.1)."""
    return Scheme("strawman", STRAWMAN_EVERY_S, min(t.serialize_s, STRAWMAN_EVERY_S / 2), t.tier_s, t.tier_s)


def highfreq(t: Training) -> Scheme:
    """To storage, as often as that can take it (the same): one checkpoint is serialized and written at a time. The
    paper rounds 9.07 iterations to nine."""
    every_s = t.iteration_s * max(1, round((t.tier_s + t.serialize_s) / t.iteration_s))
    return Scheme("highfreq", every_s, t.serialize_s, t.tier_s, t.tier_s)


def gemini(t: Training) -> Scheme:
    """To the memory of peers in every iteration; after a failure all copies are serialized (section 7.3: 162 s)."""
    read_s = t.node_bytes / t.network
    save_s = t.replicas * t.serialize_s
    return Scheme("gemini", t.iteration_s, 0.0, t.iteration_s, read_s, save_s=save_s, replicas=t.replicas)


PARITY_GROUP = 6  # REFT, appendix: six data-parallel paths


def reft(t: Training) -> Scheme:
    """To the memory of the own node in every iteration, with parity over groups of six nodes (REFT, section 4). Its
    processes keep the memory, so nothing is serialized. What does not fit into an iteration stalls it (equation 8); a
    lost node's state is put together from those of its group. Its text prints no time to detect and restart: GEMINI's
    are taken."""
    group = min(PARITY_GROUP, t.nodes)
    exchange_s = t.node_bytes / t.network
    stall_s = max(0.0, exchange_s - t.iteration_s)
    every_s = t.iteration_s + stall_s
    return Scheme("reft", every_s, stall_s, every_s, exchange_s * (group - 1), parity=group)


def jit(t: Training) -> Scheme:
    """Just in time, at user level: healthy replicas save after the failure. Half an iteration is lost."""
    return Scheme("jit", t.iteration_s, read_s=t.tier_s, save_s=t.serialize_s + t.tier_s)


# Ours: docs/performance.md (development cluster, three ranks), and what Slurm takes with its default settings.
# Imports are the user's: GEMINI's 240 s of restart are mostly those.
OURS_DETECT_S, OURS_REQUEUE_S, OURS_SPARE_S = 7.5, 22.0, 1.7


def ours(t: Training, imports_s: float = 60.0) -> Scheme:
    """This project, by requeue: agents keep the memory, so nothing is serialized."""
    of = gemini(t)
    return replace(of, name="ours", detect_s=OURS_DETECT_S, save_s=0.0, restart_s=OURS_REQUEUE_S + imports_s)


def ours_spare(t: Training) -> Scheme:
    """This project, with spares in the allocation, whose interpreters are warm."""
    return replace(ours(t), name="ours-spare", restart_s=OURS_SPARE_S)


SCHEMES = {
    "strawman": strawman,
    "highfreq": highfreq,
    "gemini": gemini,
    "reft": reft,
    "jit": jit,
    "ours": ours,
    "ours-spare": ours_spare,
}
