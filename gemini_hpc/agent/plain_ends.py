"""Records of how ranks end that have no launcher: `gemini-hpc run` starts their step again.

A rank that has said hello, and whose connection ends without its success, may have been killed for lack of memory.
The kernel counts such kills, and the limit is known here. An exception is reported by the rank itself while it ends.
"""

from __future__ import annotations

from gemini_hpc import clock
from gemini_hpc.agent.launches import Launches
from gemini_hpc.core.attempts import End
from gemini_hpc.core.culprits import Cause
from gemini_hpc.node.out_of_memory import OutOfMemory
from gemini_hpc.wire.local_server import LocalClient

_KILLED = 137


class PlainEnds:
    """The ranks of one agent that have no launcher."""

    def __init__(self, node: str, launches: Launches) -> None:
        self._node, self._launches = node, launches
        self._ranks: dict[LocalClient, tuple[str, int, OutOfMemory]] = {}

    def record_rank(self, client: LocalClient, step: str, rank: int) -> None:
        """Record a rank that begins to train here."""
        self._ranks[client] = step, rank, OutOfMemory(client.pid)

    def record_exception(self, client: LocalClient, words: str, version: int) -> None:
        """Record the exception that a rank reports as its end.

        Args:
            client: The rank's connection.
            words: Kind and place of the exception.
            version: The version made by the last step.
        """
        if client not in self._ranks:
            return
        step, rank, _ = self._ranks[client]
        key, text = f"{words} at step {version}", f"rank {rank} ended with {words}"
        self._report_end(step, End(text, Cause.RAISED, rank, 1, self._node, key, t=clock.time()))

    def on_disconnect(self, client: LocalClient, *, success: bool) -> None:
        """Find out what became of a rank whose connection has ended."""
        if client not in self._ranks:
            return
        step, rank, memory = self._ranks.pop(client)
        if not success and memory.has_happened():
            text = f"rank {rank} was ended: {memory.describe_kill()}"
            end = End(text, Cause.CRASHED, rank, _KILLED, self._node, memory=True, t=clock.time())
            self._report_end(step, end)

    def _report_end(self, step: str, end: End) -> None:
        if not self._launches.has_launchers(step):
            self._launches.record_end(step, end)
