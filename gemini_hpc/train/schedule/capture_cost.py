"""Cost of the capture inside step() in the training's own thread, which counts towards the ceiling."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.core.version_cost import VersionCost
from gemini_hpc.train.device.interface import Event
from gemini_hpc.train.state import encode, sharded
from gemini_hpc.train.state.lifted import Lift
from gemini_hpc.train.state.tree import Stateful

LEAST_S = 0.002  # a shorter capture is negligible: a busy node's processors cause such delays now and then


class CaptureCost(VersionCost):
    """The capture times of one rank, by iteration.

    An iteration begins with the capture of its step(), if there is one.
    """

    def __init__(self, behind: int) -> None:
        """Create an empty record of captures.

        Args:
            behind: Number of iterations that a device may lag behind its host and still be accounted for.
        """
        super().__init__(LEAST_S)
        self._ended: deque[float] = deque([0.0] * behind, maxlen=behind)
        self._begun_s = 0.0

    def record_capture(self, began: float, mark: Event | None) -> None:
        """Record a capture that ends now.

        A device that has not reached `mark` by now had enough work, and the capture has cost it nothing.

        Args:
            began: Time of the capture's beginning (CLOCK_MONOTONIC, seconds).
            mark: Position of the training's device at that time; None where the training computes on the host.
        """
        waited = mark is None or mark.query()
        self._begun_s = clock.monotonic() - began if waited else 0.0
        self.add_capture(self._begun_s)

    @property
    def begun_s(self) -> float:
        """Return the seconds of the capture in this iteration; 0 where negligible or unknown."""
        return self._begun_s if self.seconds else 0.0

    def begin_iteration(self) -> None:
        """End an iteration and begin another."""
        self._ended.append(self._begun_s)
        self._begun_s = 0.0

    def read_past_s(self, ago: int) -> float:
        """Return the seconds of the capture in an iteration that has ended; 0 where negligible or unknown.

        Args:
            ago: Number of iterations that have ended since.
        """
        return self._ended[-1 - ago] if self.seconds and ago < len(self._ended) else 0.0


def find_costliest(stateful: Mapping[str, Stateful], seconds: float) -> str:
    """Return the name of the object that takes more than half of a capture of `seconds`; "" if none does.

    The measurement takes as long as a capture of these objects.
    """
    took_s: dict[str, float] = {}
    for name, item in stateful.items():
        began = clock.monotonic()
        with suppress(Exception):  # the user's own state_dict() may raise
            small = Lift(lambda key, tensor: True).lift_tensors(
                {"stateful": {name: sharded.replace_dtensors(item.state_dict())}}
            )
            encode.encode(small)
        took_s[name] = clock.monotonic() - began
    found = max(took_s, key=took_s.__getitem__, default="")
    return found if found and took_s[found] > seconds / 2 else ""
