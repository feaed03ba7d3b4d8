"""The cost of failures with periodic and just-in-time checkpoints (EuroSys '24, section 5, equations 1 to 8).

Each of `gpus` GPUs fails `per_s` times a second. Shares come in two kinds. Wasted shares are of useful time (w).
Shares of all time (w_f, equation 6) are made of these by `to_share_of_all`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

PER_S = 2e-3 / 86400.0  # per GPU: two failures in 1,000 GPUs a day (section 5)


@dataclass(frozen=True)
class Model:
    """A model of the paper (Table 4), with times in seconds.

    Attributes:
        name: Name of the model.
        save_s: Time of one checkpoint.
        restore_s: Time to load a checkpoint and come back.
        minibatch_s: Time of one iteration.
        steady_s: Cost of the library in each iteration.
    """

    name: str
    save_s: float
    restore_s: float
    minibatch_s: float
    steady_s: float


def to_share_of_all(wasted: float) -> float:
    """Return a wasted share as a share of all time (equation 6)."""
    return wasted / (1 + wasted)


def compute_best_per_s(model: Model, gpus: int, per_s: float = PER_S) -> float:
    """Return the frequency of periodic checkpoints that costs least, per second (equation 3)."""
    return sqrt(gpus * per_s / (2 * model.save_s))


def compute_periodic_waste(model: Model, gpus: int, per_s: float = PER_S) -> float:
    """Return the wasted share with that frequency (equation 5)."""
    return 2 * sqrt(gpus * per_s * model.save_s / 2) + gpus * per_s * model.restore_s


def compute_user_level_waste(
    model: Model, gpus: int, per_s: float = PER_S, *, steady_share: float | None = None
) -> float:
    """Return the wasted share with just-in-time checkpoints that the program makes after a failure (equation 7).

    `steady_share` replaces the model's own steady share.
    """
    steady = model.steady_s / model.minibatch_s if steady_share is None else steady_share
    rate = gpus * per_s
    return per_s * model.save_s + steady + rate * model.restore_s + rate * model.minibatch_s / 2
