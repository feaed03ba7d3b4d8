"""A rank's session for parts under test, without an agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

Seal = tuple[tuple[int, int], float]


class _Gate:
    """The gate of a rank, with what it reads from the agent's page."""

    def __init__(self, seal: Callable[[], Seal], cpu: tuple[float, float]) -> None:
        self._seal, self.cpu = seal, cpu

    @property
    def seal(self) -> Seal:
        return self._seal()


def rank_session(
    say: Callable[[str], None],
    rank: int = 0,
    *,
    outgoing: Sequence[int] = (),
    seal: Callable[[], Seal] = lambda: ((0, 0), 0.0),
    cpu: tuple[float, float] = (0.0, 0.0),
) -> Any:
    """say: takes what the user is told; outgoing: ranks that keep copies; seal, cpu: see `SealGate`."""
    return SimpleNamespace(rank=rank, outgoing=list(outgoing), say=say, gate=_Gate(seal, cpu))
