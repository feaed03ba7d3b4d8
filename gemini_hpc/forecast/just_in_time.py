"""What failures cost with periodic checkpoints and with just-in-time ones (EuroSys '24, section 5, equations 1 to 8).

`gpus` GPUs fail `per_s` times a second each. save_s: of one checkpoint; restore_s: to load it and come back;
minibatch_s: of one iteration; steady_s: what the library costs in each. Shares come in two kinds: wasted ones are of
useful time (w); `of_all` makes them shares of all time (w_f, equation 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

PER_S = 2e-3 / 86400.0  # a GPU: twice a thousandth a day (section 5)


@dataclass(frozen=True)
class Model:
    """One of the paper's (Table 4), in seconds."""

    name: str
    save_s: float
    restore_s: float
    minibatch_s: float
    steady_s: float


def of_all(wasted: float) -> float:
    """Equation 6."""
    return wasted / (1 + wasted)


def best_per_s(model: Model, gpus: int, per_s: float = PER_S) -> float:
    """The frequency of periodic checkpoints that costs least (equation 3)."""
    return sqrt(gpus * per_s / (2 * model.save_s))


def periodic(model: Model, gpus: int, per_s: float = PER_S) -> float:
    """Wasted share with that frequency (equation 5)."""
    return 2 * sqrt(gpus * per_s * model.save_s / 2) + gpus * per_s * model.restore_s


def user_level(model: Model, gpus: int, per_s: float = PER_S, *, steady_share: float | None = None) -> float:
    """Wasted share with just-in-time checkpoints that the program makes after a failure (equation 7). steady_share:
    instead of the model's own."""
    steady = model.steady_s / model.minibatch_s if steady_share is None else steady_share
    rate = gpus * per_s
    return per_s * model.save_s + steady + rate * model.restore_s + rate * model.minibatch_s / 2
