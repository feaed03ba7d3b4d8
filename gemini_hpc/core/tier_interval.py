"""How long from one save to the persistent tier to the next, so that saving and losing cost least. Pure.

Memory serves most failures; the tier is for those that take all holders of a shard. Failures of nodes come by
themselves, each node's at the same rate: racks, switches and power that take many nodes at once are in no rate.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb, inf, sqrt

from gemini_hpc.core.redundancy import Redundancy

DAY_S = 86400.0
AUTO = "auto"
WINDOW_S = 120.0  # in which a lost node's copies are made good again: requeue and imports with the default settings
COST = 0.01  # of the time that a save takes: what the training loses meanwhile, at most. Agents save, ranks go on
MOST_S = DAY_S  # of an automatic interval: for what is in no rate


@lru_cache(maxsize=64)
def unserved_per_day(of: Redundancy, per_day: float, window_s: float) -> float:
    """How often memory loses a shard, in a day: after any first node, as many others of the N within `window_s` as
    are one too many for a group, times the probability that so many at once are not survived (GEMINI, Theorem 1, and
    likewise for parity). per_day: losses of one node. For failures that are rare. Raises ValueError for m < 1 or
    m > N."""
    more = of.tolerates
    fatal = 1 - of.recovery_probability(more + 1)
    others = comb(of.N - 1, more)
    return of.N * per_day * others * min(1.0, per_day * window_s / DAY_S) ** more * fatal


def every_s(save_s: float, share: float, unserved_a_day: float) -> float:
    """The interval that costs least (REFT, equation 5: sqrt(2 O / lambda)), in seconds. What a save costs the
    training, O, is bounded by `share` of the time that it takes. Never shorter than one save; inf where memory serves
    every failure."""
    if unserved_a_day <= 0:
        return inf
    return max(save_s, sqrt(2 * share * save_s * DAY_S / unserved_a_day))


def automatic_s(save_s: float, unserved_a_day: float) -> float:
    """The same with this module's bounds, for saves that took `save_s`."""
    return max(save_s, min(MOST_S, every_s(save_s, COST, unserved_a_day)))
