"""Restart limits of `gemini-hpc run` and `gemini_hpc.launch`: pure rules over each attempt's progress.

A step is restarted at most `most` times in a row. Progress resets this count: a newer version is sealed than at the
start of the attempt. A step known to make no progress is restarted once. Two equal ends at the same step are a
mistake in the program, and the step is not started a third time. Progress does not reset the count of restarts for
lack of memory, because a leak makes progress each time.
"""

from __future__ import annotations

from dataclasses import dataclass

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reached:
    """The agent's knowledge at one moment.

    Attributes:
        sealed: Newest sealed [epoch, version]; (0, 0): none.
        begun: Newest version that a rank of this launch has begun to save here; 0: none.
    """

    sealed: Stamp = (0, 0)
    begun: int = 0

    @property
    def step(self) -> int:
        """Return the newest version that the ranks know of.

        An attempt that fails in its first step has begun no save. The result is then the version that it resumed
        from.
        """
        return max(self.begun, self.sealed[1])


class RestartLimit:
    """The attempts of one incarnation, counted against a limit."""

    def __init__(self, most: int) -> None:
        """Create the count.

        Args:
            most: Restarts of a step without known progress.
        """
        self._most = most
        self._start: Reached | None = None
        self._without_progress = self._memory = 0
        self.restarts = 0

    def record_start(self, reached: Reached | None) -> None:
        """Record the start of a step.

        Args:
            reached: State at the start; None: no agent answers.
        """
        self._start = reached

    def judge_failure(self, reached: Reached | None, *, again: bool = False, memory: bool = False) -> str:
        """Return why the failed step is not restarted, or "" if it is.

        Args:
            reached: State at the failure; None: no agent answers.
            again: The step has failed in the same way before, at this step.
            memory: The step failed for lack of memory.
        """
        progress: bool | None = None
        if self._start is not None and reached is not None:
            progress = reached.sealed > self._start.sealed
        if progress:
            self.restarts = self._without_progress = 0
        elif progress is False:
            self._without_progress += 1
        if memory:
            self.restarts = max(self.restarts, self._memory)
            self._memory += 1
        if self.restarts >= self._most:
            return f"--max-restarts={self._most} is reached"
        if again:
            return f"it {describe_repeat(reached)}"
        if self._without_progress > 1:
            return "no newer version was sealed since the last restart"
        self.restarts += 1
        return ""


def describe_repeat(reached: Reached | None) -> str:
    """Return the description of a step that fails again at the same place."""
    if reached is None:
        return "fails in the same way each time"
    place = f"at step {reached.step + 1}" if reached.step else "before its first step is saved"
    return f"fails {place} each time"
