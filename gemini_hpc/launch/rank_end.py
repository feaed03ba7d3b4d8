"""Describe how a rank has ended: to the agents, and once to the user, for the rank that failed first."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gemini_hpc import clock, lines
from gemini_hpc.client.joining import TRY_AGAIN_EXIT
from gemini_hpc.client.restart_limit import Reached
from gemini_hpc.core.attempts import End
from gemini_hpc.core.culprits import Cause
from gemini_hpc.launch.rank_process import RankProcess
from gemini_hpc.node.out_of_memory import OutOfMemory

SETTLE_S = 0.3  # ranks that fail of one cause, on whatever node, have been heard of by then


def describe(
    process: RankProcess, rank: int, host: str, reached: Reached | None, memory: OutOfMemory, *, spares: bool
) -> End:
    """Return what the end of a rank shows: by itself, or by its launcher after an exception of its own.

    spares: another node may take the place of one that fails: then only what is surely the program's has a key."""
    raised = process.raised
    cause = raised if raised is not None else process.cause or Cause.CONSEQUENCE
    status = process.status if process.status and not process.killed else 1
    words, told = (process.note.words if raised is not None else ""), in_words(status)
    killed = status == 128 + signal.SIGKILL
    lacking = cause is not Cause.CONSEQUENCE and (killed or cause is Cause.RAISED) and memory.happened()
    detail = "; ".join(filter(None, (words, memory.told() if lacking else "")))
    lacking = lacking or (raised is Cause.RAISED and process.note.is_memory)
    kind = ""
    if lacking:
        kind = "memory"
    elif cause is Cause.RAISED:
        kind = words or told
    elif cause is not Cause.CONSEQUENCE and not killed and not spares:
        kind = f"{words or told} of rank {rank}"
    at = reached.step if reached is not None else "?"
    key = f"{kind} at step {at}" if kind and status != TRY_AGAIN_EXIT else ""  # the next attempt loads something else
    text = f"rank {rank} ended with {told}{f' ({detail})' if detail else ''}"
    return End(text[:300], cause, rank, min(status, 255), host[:300], key[:300], lacking, clock.time())


def in_words(status: int) -> str:
    """Return an exit status for people, as a shell has it: the name of the signal, if it was one."""
    if status > 128:
        with suppress(ValueError):
            return signal.Signals(status - 128).name
    return f"status {status}"


@dataclass(frozen=True, slots=True)
class _Left:
    due: float  # monotonic
    attempt: int
    end: End
    line: str
    words: str
    traceback: str


class Report:
    """The lines of one launcher about its ranks' ends.

    named: returns how an attempt ended first, as the agents know it now, and how the one before it did; say: prints a
    line.
    """

    def __init__(self, named: Callable[[int], tuple[End, End]], say: Callable[[str], None]) -> None:
        self._named, self._say = named, say
        self._left: list[_Left] = []

    def add(self, attempt: int, end: End, process: RankProcess, line: str) -> None:
        """Have a line said, and a traceback shown, if this rank turns out to be the one that failed first."""
        raised = process.raised is not None
        words, traceback = (process.note.words, process.note.text) if raised else ("", "")
        self._left.append(_Left(clock.monotonic() + SETTLE_S, attempt, end, line, words, traceback))

    def due_s(self) -> float | None:
        """Return after how many seconds there is something to say; None: there is nothing."""
        return max(0.0, self._left[0].due - clock.monotonic()) if self._left else None

    def flush(self, *, wait: bool = False) -> None:
        """Say what is due; wait: all of it, once that is known."""
        while self._left and (wait or not self.due_s()):
            clock.sleep(self.due_s() or 0.0)
            left = self._left.pop(0)
            named, before = self._named(left.attempt)
            first = not named.text or named.rank == left.end.rank
            victim = left.end.cause is Cause.CONSEQUENCE and not first
            known = before.text if first else f"{before.text} {named.text}"  # another one has shown it
            if left.traceback and not victim and left.words not in known:
                lines.put(sys.stderr, left.traceback)
            if first and left.line:
                self._say(left.line)
