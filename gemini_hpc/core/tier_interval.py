"""The interval between saves to the persistent tier that minimizes the cost of saving and losing. Pure.

Memory serves most failures; the tier is for those that take all holders of a shard. Node failures are independent,
at the same rate for each node. Racks, switches and power that take many nodes at once are in no rate.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb, inf, sqrt

from gemini_hpc.core.redundancy import Redundancy

DAY_S = 86400.0  # 24 hours
AUTO = "auto"
WINDOW_S = 120.0  # until a lost node's copies are replaced: requeue and imports with the default settings
COST = 0.01  # share of a save's time that the training loses at most: agents save, ranks go on
MOST_S = DAY_S  # longest automatic interval, because of losses that are in no rate


@lru_cache(maxsize=64)
def compute_unserved_per_day(redundancy: Redundancy, per_day: float, window_s: float) -> float:
    """Return how many times per day memory loses a shard.

    After any first node, just enough others of the N fail within `window_s` to exceed what a group tolerates. The
    result multiplies the rate of such failures by the probability that memory does not survive them (GEMINI, Theorem
    1, and likewise for parity). The formula assumes rare failures.

    Args:
        redundancy: Redundancy of the job.
        per_day: Losses of one node per day.
        window_s: Window in seconds in which the further nodes fail.

    Raises:
        ValueError: m < 1 or m > N.
    """
    more = redundancy.tolerates
    fatal = 1 - redundancy.compute_recovery_probability(more + 1)
    others = comb(redundancy.N - 1, more)
    return redundancy.N * per_day * others * min(1.0, per_day * window_s / DAY_S) ** more * fatal


def compute_interval_s(save_s: float, share: float, unserved_a_day: float) -> float:
    """Return the interval that costs least (REFT, equation 5: sqrt(2 O / lambda)), in seconds.

    A save costs the training O, at most `share` of the time that the save takes. The interval is never shorter than
    one save. The result is inf if memory serves every failure.
    """
    if unserved_a_day <= 0:
        return inf
    return max(save_s, sqrt(2 * share * save_s * DAY_S / unserved_a_day))


def choose_interval_s(save_s: float, unserved_a_day: float) -> float:
    """Return `compute_interval_s` with this module's bounds, for saves that took `save_s` seconds."""
    return max(save_s, min(MOST_S, compute_interval_s(save_s, COST, unserved_a_day)))
