"""Goodput at 1,000, 10,000 and 100,000 GPUs, simulated from our own and from published measurements.

The training has 405 billion parameters (12 bytes each), eight GPUs a node and iterations of 6 s. The iterations
follow from Llama 3's 16 million tokens a batch at 400 Tflop/s a GPU on 16,384 GPUs. Larger jobs are assumed to have
larger batches, so iterations stay as long. Each failure takes its node, which is repaired in a day. Enough nodes
stand by that fewer than one failure in a hundred finds none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp
from random import Random

from gemini_hpc.clock import DAY_S
from gemini_hpc.forecast.schemes import Scheme, TrainingFigures, build_ours, build_ours_spare, build_strawman
from gemini_hpc.forecast.simulation import Faults, simulate

SIZES = (1_000, 10_000, 100_000)
GPUS_PER_NODE = 8
# Failures of a node a day. Meta's RSC-1: 1.8 h between failures at 16,384 GPUs (Kokolis et al., HPCA 2025). Llama 3:
# 419 unexpected interruptions in 54 days on 16,384 GPUs (Table 5).
RSC_PER_DAY = GPUS_PER_NODE * 24 / 1.8 / 16384
LLAMA_PER_DAY = GPUS_PER_NODE * 419 / 54 / 16384
ITERATION_S = 6.0  # of Llama 3 405B on 16,384 GPUs, about
STATE_BYTES = 405e9 * 12
PULL_BYTES_PER_S = 1.3e9  # docs/dev/performance.md: 1.4 GB/s on two cores; any real network carries more
# Seconds to create all communicators. MegaScale (NSDI '24) reports below 5 s for 2,048 GPUs and below 30 s for more
# than 10,000. NCCLX (arXiv 2510.20171) reports 265 s for NCCL on 96,000 GPUs, and a start 11 times as fast for NCCLX.
COMMUNICATORS_S = {1_000: 5.0, 10_000: 30.0, 100_000: 265.0}
NCCLX_S = 265.0 / 11  # the paper's factor, applied to NCCL's time
GOAL = 0.995
DAYS, SEED = 180.0, 1


@dataclass(frozen=True)
class GoodputRow:
    """The goodput of one scheme at one size.

    Attributes:
        gpus: Number of GPUs.
        way: Name of the protection.
        lost_s: Average cost of a failure, without waits for nodes.
        allowed_s: Highest cost that still gives 99.5 %.
        goodput: Share of useful time with RSC-1's failures.
        standby: Number of standby nodes.
        paid: Goodput if standby nodes count as cost.
        gentle: Goodput with Llama 3's failures.
    """

    gpus: int
    way: str
    lost_s: float
    allowed_s: float
    goodput: float
    standby: int
    paid: float
    gentle: float


@dataclass(frozen=True)
class Published:
    """A goodput that others have published about themselves, measured or projected by them.

    Attributes:
        gpus: Number of GPUs.
        share: Share of the time, in their words.
        what: Source, and what it measured.
        source: Place in print.
    """

    gpus: int
    share: str
    what: str
    source: str


PUBLISHED = (
    Published(9_600, "97 %", "ByteRobust: effective training time, three months", "arXiv 2509.16293, abstract"),
    Published(16_384, "over 90 %", "Llama 3: effective training time, 54 days", "The Llama 3 Herd of Models, 3.3.4"),
    Published(100_000, "80 %", "FT-HSDP: the other replicas go on; 44 % without it", "arXiv 2602.00277, abstract"),
)


TITLE = "Goodput: share of the time that is training which stays"
INPUTS = (
    f"405 billion parameters (4.86 TB), eight GPUs a node, iterations of 6 s, {DAYS:g} simulated days. Failures: 6.5 "
    "in 1,000 nodes a day (Meta's RSC-1, HPCA 2025); in the last column 3.8 (Llama 3, Table 5). Each takes its node "
    "for a day; so many nodes stand by that one failure in a hundred finds none."
)


def build_training(gpus: int) -> TrainingFigures:
    """Return the job at this size. Its network speed is the measured speed of a pull."""
    nodes = gpus // GPUS_PER_NODE
    return TrainingFigures(nodes, STATE_BYTES, ITERATION_S, PULL_BYTES_PER_S, tier=1e12)


def list_schemes(gpus: int) -> Iterator[Scheme]:
    """Yield the schemes compared at this size, each under its displayed name."""
    t, connect_s = build_training(gpus), COMMUNICATORS_S[gpus]
    for scheme, name in ((build_ours(t), "ours, by requeue"), (build_ours_spare(t), "ours, with a spare")):
        yield replace(scheme, name=name, restart_s=scheme.restart_s + connect_s)
    if gpus == 100_000:
        spare = build_ours_spare(t)
        yield replace(spare, name="the same with NCCLX", restart_s=spare.restart_s + NCCLX_S)
    of_others = replace(build_ours(t), read_s=0.0, detect_s=0.0)
    if gpus == 1_000:
        yield replace(of_others, name="20 s down (TrainMover, 1,024 GPUs)", restart_s=20.0)
    else:
        yield replace(of_others, name="150 s down (FlashRecovery, 4,800)", restart_s=150.0)


def count_standby(nodes: int, per_day: float, repair_s: float = DAY_S, without: float = 0.01) -> int:
    """Return the fewest standby nodes of which none is left for fewer than the share `without` of failures.

    The number of nodes under repair follows a Poisson process.
    """
    mean = nodes * per_day * repair_s / DAY_S
    count, term = 0, exp(-mean)
    below = term
    while 1 - below > without:
        count += 1
        term *= mean / count
        below += term
    return count


def _simulate_goodput(scheme: Scheme, gpus: int, per_day: float) -> tuple[float, int]:
    t = build_training(gpus)
    faults, waiting = Faults(per_day), count_standby(t.nodes, per_day)
    failures = faults.draw_failures(t.nodes, DAYS, Random(SEED))
    out = simulate(scheme, build_strawman(t), failures, nodes=t.nodes, days=DAYS, standby=waiting, faults=faults)
    return out.goodput, waiting


def compute_rows() -> Iterator[GoodputRow]:
    """Yield all rows, one after the other. All of them together take some seconds."""
    for gpus in SIZES:
        nodes = gpus // GPUS_PER_NODE
        between_s = DAY_S / (nodes * RSC_PER_DAY)
        for scheme in list_schemes(gpus):
            share, waiting = _simulate_goodput(scheme, gpus, RSC_PER_DAY)
            yield GoodputRow(
                gpus,
                scheme.name,
                scheme.down_s + scheme.wasted_s,
                between_s * (1 - GOAL) / GOAL,
                share,
                waiting,
                share * nodes / (nodes + waiting),
                _simulate_goodput(scheme, gpus, LLAMA_PER_DAY)[0],
            )
