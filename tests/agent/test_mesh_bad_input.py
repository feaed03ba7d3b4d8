"""What one peer says cannot end the links to it: the agent dials again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.config import Settings
from gemini_hpc.wire import inspect_schema, protocol
from gemini_hpc.wire.message import Message

from .contexts import QuietListener


class OneMessage:
    """A link over which one message comes, and then nothing."""

    closed, last_heard = False, 0.0

    def __init__(self) -> None:
        self._left = 1

    async def receive(self) -> protocol.AnyMessage:
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(60)
        return inspect_schema.JobAsk(1)

    def send(self, message: Message) -> None: ...

    def abort(self) -> None:
        self.closed = True


@pytest.mark.parametrize("where", ["on_message", "on_link"])
def test_a_message_that_cannot_be_taken(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    dialled: list[OneMessage] = []

    def fail(*_: Any) -> None:
        raise KeyError("n1")

    async def dial(self: Mesh, name: str, timeout_s: float) -> OneMessage:
        dialled.append(OneMessage())
        return dialled[-1]

    async def run() -> None:
        listener: Any = QuietListener()
        listener.on_message = fail
        if where == "on_link":
            listener.on_link = fail
        mesh = Mesh(AgentIdentity(Settings(), 1, 0, "n2", ""), 0, ("n1", "n2"), listener, complaints.append)
        mesh.want(["n1"])
        async with asyncio.timeout(10):
            while len(dialled) < 3:
                await asyncio.sleep(0.01)
        mesh.close()

    monkeypatch.setattr(Mesh, "_dial", dial)
    asyncio.run(run())
    assert all(link.closed for link in dialled[:2])
    assert "could not handle " in complaints[0] and "KeyError('n1')" in complaints[0]
