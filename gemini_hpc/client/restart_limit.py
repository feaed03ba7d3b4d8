"""How often `gemini-hpc run` and `gemini_hpc.launch` start again: pure rules over what each attempt has reached.

A step that has made progress (a newer version is sealed than when it began) may fail again, at most `most` times
in a row. One without progress is started again once. What ends twice in the same way, at the same step, is a mistake
in the program, and not started a third time. Progress cures no lack of memory: a leak makes progress each time.
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

    @property
    def step(self) -> int:
        """Return the newest version of which the ranks know. An attempt that fails in its first step has begun
        nothing: then it is at what it resumed from."""
        return max(self.begun, self.sealed[1])


class RestartLimit:
    """The attempts of one incarnation. most: how often a step is started again without progress being known."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._start: Reached | None = None
        self._barren = self._memory = 0
        self.restarts = 0

    def begin(self, reached: Reached | None) -> None:
        """A step is started; what is sealed now, None where no agent answers."""
        self._start = reached

    def failed(self, reached: Reached | None, *, again: bool = False, memory: bool = False) -> str:
        """Return why the step, which has failed, is not started again; "" if it is. again: it has failed so before,
        at this step; memory: for want of memory."""
        progress: bool | None = None
        if self._start is not None and reached is not None:
            progress = reached.sealed > self._start.sealed
        if progress:
            self.restarts = self._barren = 0
        elif progress is False:
            self._barren += 1
        if memory:
            self.restarts = max(self.restarts, self._memory)
            self._memory += 1
        if self.restarts >= self._most:
            return f"{self.restarts} restarts are used up"
        if again:
            return f"it {each_time(reached)}"
        if self._barren > 1:
            return "no newer version was sealed since the last restart"
        self.restarts += 1
        return ""


def each_time(reached: Reached | None) -> str:
    """Return what is said of a step that fails again where it did before."""
    if reached is None:
        return "fails in the same way each time"
    place = f"at step {reached.step + 1}" if reached.step else "before its first step is saved"
    return f"fails {place} each time"
