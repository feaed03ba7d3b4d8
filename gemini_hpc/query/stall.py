"""Detection of a stalled training: a pure rule over the reports of its agents and Slurm.

A training is *stalled* if no rank anywhere has begun a new version for longer than each of these times:

- the site's `stalled_s`
- `FACTOR` times its usual iteration
- `SAVES` times the usual time from one save to the next (of j-th versions)
- `PAUSES` times the longest pause that this launch has made before (evaluations come back)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini_hpc.wire.inspect_schema import PaceState

FACTOR, SAVES, PAUSES = 20.0, 3.0, 2.0


@dataclass(frozen=True, slots=True)
class Stall:
    """A stalled training: no step for `for_s` seconds, where a step usually takes `usual_s` seconds."""

    for_s: float
    usual_s: float


def detect_stall(paces: Sequence[PaceState], every: int, running_s: float | None, least_s: float) -> Stall | None:
    """Return how a training stalls, None if it does not.

    Args:
        paces: One from each node with ranks of the training that have saved twice.
        every: The number j; every j-th version is saved.
        running_s: Seconds that the job has run without being suspended, None if unknown.
        least_s: The site's `stalled_s` in seconds.
    """
    if not paces:
        return None
    silent_s = min(pace.silent_s for pace in paces)
    if running_s is not None:
        silent_s = min(silent_s, running_s)
    gap_s = max(pace.usual_s for pace in paces)
    iteration_s = gap_s / max(1, every)
    longest_s = max(pace.longest_s for pace in paces)
    if silent_s <= max(least_s, FACTOR * iteration_s, SAVES * gap_s, PAUSES * longest_s):
        return None
    return Stall(silent_s, iteration_s)
