"""An agent's supervisor, without the agent: forks workers for a test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gemini_hpc.agent.tier.workers import SupervisorChannel, Workers


@contextmanager
def supervisor(work: Callable[[int], int]) -> Iterator[tuple[SupervisorChannel, Workers]]:
    """Serves in a thread of this process, which it would otherwise have to itself."""
    mine = Workers(work)
    channel = SupervisorChannel(mine.theirs)

    def serve() -> None:
        while mine.serve():
            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield channel, mine
    finally:
        mine.theirs.close()
        thread.join(10)
        pids = list(mine._pidfds)
        mine.close()
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
