"""The protection schemes of trainings, as far as failures need it, and the average cost of failures.

Symbols and figures are those of GEMINI (SOSP '23, section 2 and section 7), REFT and just-in-time checkpointing
(EuroSys '24). All times are wall-clock seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gemini_hpc.clock import DAY_S
from gemini_hpc.core import placement

STRAWMAN_EVERY_S = 3 * 3600.0  # BLOOM's interval, which GEMINI uses for its first baseline
# GEMINI, section 7.3: GPT-2 100B on 16 p4d machines.
DETECT_S, RESTART_S = 15.0, 240.0
SERIALIZE_S_PER_BYTE = 81.0 / 75.2e9  # torch.save() of all shards of a machine to its disk
ITERATION_S = 62.0  # of the same training


@dataclass(frozen=True)
class Scheme:
    """A protection scheme.

    If `replicas` and `parity` are both 0, the checkpoint to go back to is not lost with nodes.

    Attributes:
        name: Name of the scheme.
        every_s: Time from one checkpoint to the next.
        stall_s: Time for which each checkpoint delays the training.
        usable_s: Time from the beginning of a checkpoint until the training can go back to it.
        read_s: Time to load a checkpoint.
        detect_s: Time from a failure until it is known.
        save_s: Time after the detection until the state in memory is safe.
        restart_s: Time after that until the program has begun again.
        replicas: Copies in memory, of which a shard needs one.
        parity: Nodes of a group with parity, of which one may be lost.
    """

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
        """Return the average work that a failure costs, plus the reading, in seconds (GEMINI, equation 1)."""
        return self.usable_s + self.every_s / 2 + self.read_s

    @property
    def in_memory(self) -> bool:
        """Return whether the checkpoint to go back to is lost if too many nodes are lost."""
        return bool(self.replicas or self.parity)

    def can_survive(self, nodes: int, lost: Collection[int]) -> bool:
        """Return whether memory serves if these of the node ranks 0 to `nodes` - 1 are lost at once.

        If parity groups do not divide the nodes, the last group takes the rest.
        """
        if self.parity:
            group = min(self.parity, nodes)
            last = nodes // group - 1
            return len({min(node // group, last) for node in lost}) == len(lost)
        return not self.replicas or placement.can_survive(nodes, min(self.replicas, nodes), lost)

    @property
    def down_s(self) -> float:
        """Return the time from a failure to the reading, in seconds."""
        return self.detect_s + self.save_s + self.restart_s

    def compute_effective_share(self, failures_per_day: float) -> float:
        """Return the share of the time that is effective training (GEMINI, section 7.3).

        The formula assumes that failures never overlap.
        """
        return 1 - self.stall_s / self.every_s - failures_per_day * (self.down_s + self.wasted_s) / DAY_S


@dataclass(frozen=True)
class TrainingFigures:
    """A training to protect.

    Attributes:
        nodes: Number of nodes.
        state_bytes: State of all ranks.
        iteration_s: Length of an iteration.
        network: Network of one node, in bytes/s.
        tier: Persistent storage for all nodes together, in bytes/s.
        replicas: Copies in memory.
    """

    nodes: int = 16
    state_bytes: float = 1203e9  # GPT-2 100B: 12 bytes a parameter
    iteration_s: float = ITERATION_S
    network: float = 400e9 / 8
    tier: float = 20e9 / 8
    replicas: int = 2

    @property
    def node_bytes(self) -> float:
        """Return the state of one node in bytes."""
        return self.state_bytes / self.nodes

    @property
    def tier_s(self) -> float:
        """Return the time to write all state to the storage, or to read it back, in seconds."""
        return self.state_bytes / self.tier

    @property
    def serialize_s(self) -> float:
        """Return the time of torch.save() for a node's state, in seconds."""
        return self.node_bytes * SERIALIZE_S_PER_BYTE


def build_strawman(t: TrainingFigures) -> Scheme:
    """Return the scheme that writes to storage every three hours (GEMINI, section 7.1)."""
    return Scheme("strawman", STRAWMAN_EVERY_S, min(t.serialize_s, STRAWMAN_EVERY_S / 2), t.tier_s, t.tier_s)


def build_highfreq(t: TrainingFigures) -> Scheme:
    """Return the scheme that writes to storage as often as the storage allows (GEMINI, section 7.1).

    Serialization and writing take one checkpoint at a time. The paper rounds 9.07 iterations to nine.
    """
    every_s = t.iteration_s * max(1, round((t.tier_s + t.serialize_s) / t.iteration_s))
    return Scheme("highfreq", every_s, t.serialize_s, t.tier_s, t.tier_s)


def build_gemini(t: TrainingFigures) -> Scheme:
    """Return the scheme that writes to the memory of peers in every iteration.

    After a failure all copies are serialized (section 7.3: 162 s).
    """
    read_s = t.node_bytes / t.network
    save_s = t.replicas * t.serialize_s
    return Scheme("gemini", t.iteration_s, 0.0, t.iteration_s, read_s, save_s=save_s, replicas=t.replicas)


PARITY_GROUP = 6  # REFT, appendix: six data-parallel paths


def build_reft(t: TrainingFigures) -> Scheme:
    """Return the scheme that writes to the own node's memory in every iteration, with parity (REFT, section 4).

    The parity is over groups of six nodes. REFT's processes keep the memory, so nothing is serialized. The part that
    does not fit into an iteration stalls the iteration (equation 8). A lost node's state is rebuilt from the states
    of its group. The text prints no time to detect and restart, so GEMINI's times are used.
    """
    group = min(PARITY_GROUP, t.nodes)
    exchange_s = t.node_bytes / t.network
    stall_s = max(0.0, exchange_s - t.iteration_s)
    every_s = t.iteration_s + stall_s
    return Scheme("reft", every_s, stall_s, every_s, exchange_s * (group - 1), parity=group)


def build_jit(t: TrainingFigures) -> Scheme:
    """Return the just-in-time scheme at user level.

    Healthy replicas save after the failure. Half an iteration is lost.
    """
    return Scheme("jit", t.iteration_s, read_s=t.tier_s, save_s=t.serialize_s + t.tier_s)


# Ours: docs/dev/performance.md (development cluster, three ranks), with Slurm's own time at its default settings.
# Imports are the user's: GEMINI's 240 s of restart are mostly imports.
OURS_DETECT_S, OURS_REQUEUE_S, OURS_SPARE_S = 7.5, 22.0, 1.7


def build_ours(t: TrainingFigures, imports_s: float = 60.0) -> Scheme:
    """Return this project's scheme, by requeue: agents keep the memory, so nothing is serialized."""
    gemini = build_gemini(t)
    return replace(gemini, name="ours", detect_s=OURS_DETECT_S, save_s=0.0, restart_s=OURS_REQUEUE_S + imports_s)


def build_ours_spare(t: TrainingFigures) -> Scheme:
    """Return this project's scheme with spares in the allocation, whose interpreters are warm."""
    return replace(build_ours(t), name="ours-spare", restart_s=OURS_SPARE_S)


SCHEMES = {
    "strawman": build_strawman,
    "highfreq": build_highfreq,
    "gemini": build_gemini,
    "reft": build_reft,
    "jit": build_jit,
    "ours": build_ours,
    "ours-spare": build_ours_spare,
}
