"""How often `gemini-hpc run` and `gemini_hpc.launch` start again: pure rules over what each attempt has reached.

A step that has made progress (a newer version is sealed than when it began) may fail again, at most `most` times
in a row. One without progress is started again once: a typing error, or a crash that comes back at the same step,
is not cured by more of the same.
"""

from __future__ import annotations

from dataclasses import dataclass

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reached:
    """What the agent knows at one moment. sealed: newest sealed [epoch, version], (0, 0) without one; begun: newest
    version that a rank of this launch has begun to save here, 0 without one."""

    sealed: Stamp = (0, 0)
    begun: int = 0


class RestartLimit:
    """The attempts of one incarnation. most: how often a step is started again without progress being known."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._start: Reached | None = None
        self._before: tuple[int, int] | None = None  # status and step of the attempt before
        self._barren = 0
        self.restarts = 0

    def begin(self, reached: Reached | None) -> None:
        """A step is started; what is sealed now, None where no agent answers."""
        self._start = reached

    def failed(self, status: int, reached: Reached | None) -> tuple[str, str]:
        """The step has failed: why it is not started again ("" if it is), and what the user should know of it."""
        progress: bool | None = None
        if self._start is not None and reached is not None:
            progress = reached.sealed > self._start.sealed
        if progress:
            self.restarts = self._barren = 0
        elif progress is False:
            self._barren += 1
        note = self._each_time(status, reached)
        if self.restarts >= self._most:
            return f"{self.restarts} restarts are used up", note
        if self._barren > 1:
            return "no newer version was sealed since the last restart", note
        self.restarts += 1
        return "", note

    def _each_time(self, status: int, reached: Reached | None) -> str:
        # An attempt that fails in its first step has begun nothing: then it is at what it resumed from.
        step = None if reached is None else max(reached.begun, reached.sealed[1])
        now = None if step is None else (status, step)
        again, self._before = now is not None and now == self._before, now
        if not again or step is None:
            return ""
        return f"fails at step {step + 1} each time" if step else "fails before its first step is saved each time"
