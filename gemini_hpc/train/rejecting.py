"""Rejecting what was loaded: an agent writes it down."""

from __future__ import annotations

from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.wire import local

MEET_S = 60.0  # within which all ranks call it
TIMEOUT_S = 30.0
MOST_TEXT = 300


def record(client: AgentClient | None, message: local.Reject) -> tuple[bool, str]:
    """Whether this rank's agent has written it down, and if it will not, why; "" where there is no agent now."""
    if client is None:
        return False, ""
    try:
        client.request(message, timeout_s=TIMEOUT_S)
    except AgentRefused as error:
        return False, str(error)
    except AgentLost:
        return False, ""
    return True, ""
