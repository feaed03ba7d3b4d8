"""Summaries of a rank's checkpoints for its agent, which `gemini-hpc inspect` shows."""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentClient
from gemini_hpc.wire import local
from gemini_hpc.wire.traffic import TrafficState

TELL_EVERY_S = 5.0  # `inspect` is for people: nobody reads it more often, and each summary costs a message


class SummarySender:
    """The sender of one rank's summaries. It never waits for the agent."""

    def __init__(self, client: AgentClient, training_name: str, rank: int) -> None:
        """Create a sender.

        Args:
            client: Connection to the agent.
            training_name: Name of the training.
            rank: The rank.
        """
        self._client, self._training_name, self._rank = client, training_name, rank
        self._sent_at = -1e9

    def send_summary(self, read_state: Callable[[], TrafficState], *, now: bool = False) -> None:
        """Send a summary to the agent, every `TELL_EVERY_S` seconds or, if `now`, at once."""
        at = clock.monotonic()
        if now or at - self._sent_at > TELL_EVERY_S:
            self._sent_at = at
            self._client.post(local.Traffic(self._training_name, self._rank, read_state()))
