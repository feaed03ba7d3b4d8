"""Descriptions of a rank's end: for the agents, and once for the user for the rank that failed first."""

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

SETTLE_S = 0.3  # by then all ranks that fail of one cause, on any node, have been reported


def describe(
    process: RankProcess, rank: int, host: str, reached: Reached | None, memory: OutOfMemory, *, spares: bool
) -> End:
    """Return the evidence of a rank's end, by itself or by its launcher after an exception of its own.

    Args:
        process: Process of the rank.
        rank: Number of the rank.
        host: Name of this node.
        reached: The agent's knowledge; None: no agent answers.
        memory: Observer of out-of-memory kills.
        spares: Another node may replace a failed one. Only an end that surely is the program's then gets a key.
    """
    raised = process.raised
    cause = raised if raised is not None else process.cause or Cause.CONSEQUENCE
    status = process.status if process.status and not process.killed else 1
    words, status_text = (process.note.words if raised is not None else ""), describe_status(status)
    killed = status == 128 + signal.SIGKILL
    lacking = cause is not Cause.CONSEQUENCE and (killed or cause is Cause.RAISED) and memory.has_happened()
    detail = "; ".join(filter(None, (words, memory.describe_kill() if lacking else "")))
    lacking = lacking or (raised is Cause.RAISED and process.note.is_memory)
    kind = ""
    if lacking:
        kind = "memory"
    elif cause is Cause.RAISED:
        kind = words or status_text
    elif cause is not Cause.CONSEQUENCE and not killed and not spares:
        kind = f"{words or status_text} of rank {rank}"
    at = reached.step if reached is not None else "?"
    key = f"{kind} at step {at}" if kind and status != TRY_AGAIN_EXIT else ""  # then another version is loaded
    text = f"rank {rank} ended with {status_text}{f' ({detail})' if detail else ''}"
    return End(text[:300], cause, rank, min(status, 255), host[:300], key[:300], lacking, clock.time())


def describe_status(status: int) -> str:
    """Return an exit status for people: the name of the signal, if any, else the number.

    Args:
        status: Exit status as a shell reports it.
    """
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
    """A launcher's pending lines about the ends of its ranks."""

    def __init__(self, named: Callable[[int], tuple[End, End]], say: Callable[[str], None]) -> None:
        """Create an empty report.

        Args:
            named: Returns the first end of an attempt, as the agents know it now, and that of the attempt before.
            say: Prints a line.
        """
        self._named, self._say = named, say
        self._left: list[_Left] = []

    def add(self, attempt: int, end: End, process: RankProcess, line: str) -> None:
        """Queue a line and a traceback, printed only if this rank turns out to have failed first."""
        raised = process.raised is not None
        words, traceback = (process.note.words, process.note.text) if raised else ("", "")
        self._left.append(_Left(clock.monotonic() + SETTLE_S, attempt, end, line, words, traceback))

    def compute_wait_s(self) -> float | None:
        """Return the seconds until a line is due, or None if there is none."""
        return max(0.0, self._left[0].due - clock.monotonic()) if self._left else None

    def flush(self, *, wait: bool = False) -> None:
        """Print the due lines.

        Args:
            wait: Wait for all lines to become due and print them.
        """
        while self._left and (wait or not self.compute_wait_s()):
            clock.sleep(self.compute_wait_s() or 0.0)
            left = self._left.pop(0)
            named, before = self._named(left.attempt)
            first = not named.text or named.rank == left.end.rank
            victim = left.end.cause is Cause.CONSEQUENCE and not first
            known = before.text if first else f"{before.text} {named.text}"  # another rank has shown the traceback
            if left.traceback and not victim and left.words not in known:
                lines.put(sys.stderr, left.traceback)
            if first and left.line:
                self._say(left.line)
