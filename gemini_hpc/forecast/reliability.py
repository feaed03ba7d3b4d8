"""The time for which a training is safe without a checkpoint on storage.

The model is that of REFT (appendix, equations 1 to 3 and Figure 8).
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

_STEPS = 200  # bisection steps, more than a float has bits


def compute_checkpoint_reliability(days: float, gpus: int, hardware: float, software: float, shape: float) -> float:
    """Return the probability that none of `gpus` has failed after `days`.

    `hardware` and `software` are failure rates of one GPU. `shape` is the shape of the Weibull distribution; 1 means
    failures that do not depend on age.
    """
    return exp(-gpus * (hardware + software) * days**shape)


def compute_parity_reliability(days: float, gpus: int, hardware: float, shape: float, group: int) -> float:
    """Return the same probability for state in memory with parity over sharding groups of `group` members.

    Each group may have lost one member. Software failures do not affect the memory.
    """
    alive = exp(-hardware * days**shape)
    return float((alive**group + group * (1 - alive) * alive ** (group - 1)) ** (gpus / group))


def find_safe_days(probability: Callable[[float], float], threshold: float) -> float:
    """Return how long a falling probability stays at or above the threshold, in days.

    Raises:
        ValueError: The probability is below the threshold at the beginning.
    """
    low, high = 0.0, 1.0
    if not 0 < threshold < 1 or probability(0.0) < threshold:
        raise ValueError(f"a threshold of {threshold:g}: it is between 0 and 1, and met at the beginning")
    while probability(high) >= threshold:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) >= threshold else (low, middle)
    return low
