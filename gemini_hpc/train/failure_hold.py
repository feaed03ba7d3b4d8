"""Holding a rank whose peer's node has died, until Slurm ends the rank.

When a node dies, communication errors end the training on the survivors before Slurm notices the dead node. The
script would exit, the job would be FAILED and never requeued. A rank that is about to end with a communication error
therefore first asks its agent. While a node of the job is dead or suspected, the rank stays, for a bounded time,
until Slurm kills it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import ask_verdict
from gemini_hpc.core.communication_error import is_communication_error
from gemini_hpc.wire.local import Verdict

ALL_ALIVE_S = 3.0  # longer than the agents take to suspect a silent node
_ASK_EVERY_S = 0.2  # several questions before a verdict, each to the agent of this node


def wait_for_verdict(
    ask: Callable[[], Verdict | None],
    hold_s: float,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = clock.monotonic,
    sleep: Callable[[float], None] = clock.sleep,
) -> str:
    """Block while a node is dead, or may still be found dead, and return the reason for the end.

    The reason is `alive` if all nodes were reported alive for ALL_ALIVE_S. The reason is `expired` if `hold_s`
    seconds have passed since a node was reported dead, or in all if no node was.

    Args:
        ask: Returns the agent's verdict, or None if the agent does not answer.
        hold_s: Bound in seconds.
        say: Prints a line to the user.
        clock: Clock in seconds, for tests.
        sleep: Sleep in seconds, for tests.
    """
    started = clock()
    until = started + hold_s
    alive_since: float | None = None
    reported = False
    while (now := clock()) < until:
        verdict = ask()
        if verdict is not None and (verdict.dead or verdict.suspect):
            alive_since = None
            if verdict.dead and not reported:
                reported = True
                until = now + hold_s
                say(f"node {', '.join(verdict.dead)} is dead: waiting up to {hold_s:g} s for Slurm's requeue")
        elif verdict is not None:
            alive_since = now if alive_since is None else alive_since
            if now - alive_since >= ALL_ALIVE_S:
                return "alive"
        else:
            alive_since = None
        sleep(_ASK_EVERY_S)
    return "expired"


class Hold:
    """A training's hold, called before anything that ends the process over a communication error."""

    def __init__(
        self, path: str, hold_s: float, say: Callable[[str], None], on_raise: Callable[[BaseException], None]
    ) -> None:
        """Install the hook for uncaught exceptions.

        Args:
            path: Path of the agent's socket.
            hold_s: Longest hold in seconds.
            say: Prints a line to the user.
            on_raise: Called with each exception that ends the script and is not a communication error.
        """
        self._path, self._hold_s, self._say, self._on_raise = path, hold_s, say, on_raise
        self._before = sys.excepthook
        self._over = False
        self._pid = os.getpid()
        sys.excepthook = self._on_uncaught

    def end(self) -> None:
        """End all holding: the training is over."""
        self._over = True
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._before

    def on_error(self, error: BaseException) -> None:
        """Handle an error that ends the training: hold a communication error, report any other.

        A communication error blocks while a node may be dead. An error that was handled before is ignored.
        """
        if self._over or os.getpid() != self._pid or getattr(error, "__gemini_seen__", False):
            return
        error.__gemini_seen__ = True  # type: ignore[attr-defined]
        if not is_communication_error(error):
            if isinstance(error, Exception):
                self._on_raise(error)
            return
        self._say(
            f"communication failed ({type(error).__name__}); asking the agents whether a node is dead (up to "
            f"{self._hold_s:g} s)"
        )
        wait_for_verdict(self._ask_verdict, self._hold_s, self._say)

    def on_exit(self) -> None:
        """Block at interpreter exit while a node is dead.

        The script has not declared the training's end, so it may have swallowed an error.
        """
        verdict = self._ask_verdict()
        if verdict is not None and verdict.dead:
            self._say(f"node {', '.join(verdict.dead)} is dead; waiting for Slurm")
            wait_for_verdict(self._ask_verdict, self._hold_s, lambda text: None)

    def _ask_verdict(self) -> Verdict | None:
        return ask_verdict(self._path)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.on_error(error)
        finally:
            self._before(kind, error, trace)
