"""Recording at an agent that a loaded version was rejected."""

from __future__ import annotations

from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.wire import local

MEET_S = 60.0  # within this time all ranks must call it
TIMEOUT_S = 30.0  # the agent of this node only records it
MOST_TEXT = 300


def record_rejection(client: AgentClient | None, message: local.Reject) -> tuple[bool, str]:
    """Return whether this rank's agent has recorded the rejection, and the reason if it refuses.

    The reason is "" if no agent is reachable now.
    """
    if client is None:
        return False, ""
    try:
        client.request(message, timeout_s=TIMEOUT_S)
    except AgentRefused as error:
        return False, str(error)
    except AgentLost:
        return False, ""
    return True, ""
