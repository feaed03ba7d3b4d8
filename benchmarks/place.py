"""How long the placement of a very large job takes, and what it is worth: pure computation, no cluster."""

from __future__ import annotations

import time

from benchmarks.bench import Options
from benchmarks.rows import Row, median_row
from gemini_hpc.core import placement

NODES, REPLICAS, LOST = 100_000, 3, 5


def measure(options: Options) -> list[Row]:
    """All rows of the family. Three replicas do not divide the nodes, so that the last group is a ring."""
    nodes = options.pick(NODES, 1000)
    options.progress.say("place", f"{nodes} nodes")
    runs = [_once(nodes) for _ in range(options.count(5))]
    what = f"holders of each of {nodes:,} nodes, m = {REPLICAS}, and the probability to recover for up to {LOST} lost"
    return [median_row("place.nodes_100k_s", what, "s", runs, limit=1.0)]


def _once(nodes: int) -> float:
    placement.compute_recovery_probability.cache_clear()
    began = time.perf_counter()
    for node in range(nodes):
        placement.list_holders(node, nodes, REPLICAS)
    for lost in range(1, LOST + 1):
        placement.compute_recovery_probability(nodes, REPLICAS, lost)
    return time.perf_counter() - began
