"""Record how ranks end that no launcher watches: `gemini-hpc run` starts their step again.

A rank that has said hello, and whose connection ends without its success, may have been ended for want of memory: the
kernel counts that, and the limit is known here. Of an exception the rank tells by itself, while it ends.
"""

from __future__ import annotations

from gemini_hpc import clock
from gemini_hpc.agent.launches import Launches
from gemini_hpc.core.attempts import End
from gemini_hpc.core.culprits import Cause
from gemini_hpc.node.out_of_memory import OutOfMemory
from gemini_hpc.wire.local_server import Client

_KILLED = 137


class PlainEnds:
    """The ranks of one agent without launchers."""

    def __init__(self, node: str, launches: Launches) -> None:
        self._node, self._launches = node, launches
        self._ranks: dict[Client, tuple[str, int, OutOfMemory]] = {}

    def begin(self, client: Client, step: str, rank: int) -> None:
        """Take note of a rank that begins to train here."""
        self._ranks[client] = step, rank, OutOfMemory(client.pid)

    def raised(self, client: Client, words: str, version: int) -> None:
        """Take a rank's word of an exception that ends it, by kind and place, after the step that made a version."""
        if client not in self._ranks:
            return
        step, rank, _ = self._ranks[client]
        key, text = f"{words} at step {version}", f"rank {rank} ended with {words}"
        self._tell(step, End(text, Cause.RAISED, rank, 1, self._node, key, t=clock.time()))

    def gone(self, client: Client, *, success: bool) -> None:
        """Look what has become of a rank whose connection has ended."""
        if client not in self._ranks:
            return
        step, rank, memory = self._ranks.pop(client)
        if not success and memory.happened():
            text = f"rank {rank} was ended: {memory.told()}"
            end = End(text, Cause.CRASHED, rank, _KILLED, self._node, memory=True, t=clock.time())
            self._tell(step, end)

    def _tell(self, step: str, end: End) -> None:
        if not self._launches.watches(step):
            self._launches.ended(step, end)
