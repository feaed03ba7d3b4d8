"""Asking the agents to keep a version on the persistent tier for good."""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.wire import local

TIMEOUT_S = 5.0  # the agent of this node only writes a line


def request_keep(client: AgentClient, wish: local.KeepVersion, say: Callable[[str], None]) -> bool:
    """Return whether this rank's agent will keep the version; if not, print the reason.

    The wait is bounded by twice `TIMEOUT_S`.
    """
    try:
        client.request(wish, timeout_s=TIMEOUT_S)
    except (AgentLost, AgentRefused) as error:
        say(f"rank {wish.rank}: version {wish.version} is not kept as {wish.name}: {error}")
        return False
    return True
