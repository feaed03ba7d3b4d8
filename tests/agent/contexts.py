"""The context of an agent's part that a test makes without an agent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.config import Settings


def made_context(
    membership: Any,
    node: str = "n1",
    *,
    job: int = 7,
    directory: str = "",
    log: Any = lambda *_, **__: None,
    spawn: Any = asyncio.ensure_future,
    **settings: Any,
) -> AgentContext:
    """Return a context with this membership, and with these functions in place of the agent's."""
    events: Any = SimpleNamespace(log=log, log_rate_limited=lambda text: None, events=())
    return AgentContext(AgentIdentity(Settings(**settings), job, 0, node, directory), membership, events, spawn)


class QuietListener:
    """An agent that ignores its peers."""

    def on_link(self, host: str) -> None: ...

    def on_message(self, host: str, message: Any) -> None: ...

    def on_dead(self, host: str, witnesses: tuple[str, ...], known: bool) -> None: ...

    def on_nodes_lost(self, hosts: tuple[str, ...]) -> None: ...
