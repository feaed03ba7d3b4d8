"""An agent's part in one incarnation of the job: its hosts, links and recovery rounds.

An incarnation begins with the message of the prolog (or of a peer) and stays until the next one begins. The object is
thus still present, detached, when the job has ended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import Effect, Event
from gemini_hpc.core.views import View
from gemini_hpc.wire import local
from gemini_hpc.wire.message import Message

_SILENT_S = 3.0  # at least three beats, so that a busy neighbour is not missing


@dataclass(frozen=True, eq=False)
class Incarnation:
    """An incarnation of the job with its links and rounds.

    Attributes:
        attach: The message that began it.
        view: The nodes with which it goes on.
        perform: Carries out an effect of its rounds.
        changed: Set for a moment at each change of its round.
    """

    attach: local.Attach
    view: View
    mesh: Mesh
    rounds: RecoveryRounds
    perform: Callable[[Incarnation, Effect], None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self, event: Event) -> None:
        """Carry out the effects of an event on the rounds."""
        for effect in self.rounds.step(event):
            self.perform(self, effect)

    async def wait_live(self) -> None:
        """Wait until a round is over."""
        while not self.live:
            await self.changed.wait()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return its nodes in the order of Slurm's list, without the lost nodes that it goes on without."""
        return self.view.hosts

    @property
    def restart(self) -> int:
        """Return its number: how often Slurm has restarted the job."""
        return self.attach.restart

    @property
    def leads(self) -> bool:
        """Return whether this agent is the root of the tree, which coordinates rounds, seals and saves."""
        return self.rounds.parent is None

    @property
    def live(self) -> bool:
        """Return whether a round is over and none has begun since: the training is protected."""
        return self.rounds.stage == "live"

    def send(self, host: str, message: Message) -> bool:
        """Send to one peer. Return whether there is a link to it."""
        return self.mesh.send(host, message)

    def send_down(self, message: Message) -> None:
        """Send to the agents below in the tree."""
        for child in self.rounds.children:
            self.mesh.send(child, message)

    @property
    def silent_s(self) -> float:
        """Return the silence in seconds after which a node is missing."""
        return max(_SILENT_S, 3 * self.mesh.silence_s)

    def is_incomplete(self, now: float) -> bool:
        """Return whether a node has died, or a neighbour in the tree is silent."""
        mesh, rounds, silent_s = self.mesh, self.rounds, self.silent_s
        neighbours = [*rounds.children, *([rounds.parent] if rounds.parent is not None else [])]
        silent = [host for host in neighbours if now - mesh.last_heard.get(host, 0.0) > silent_s]
        return bool(mesh.dead) or bool(set(silent) - mesh.left)

    async def find_absent(self, limit_s: float) -> tuple[str, ...]:
        """Return the hosts that the round waits for and whose agents cannot be reached.

        The coordinator waits for hosts of the whole tree, another agent for its parent.

        Args:
            limit_s: Longest search in seconds.
        """
        return await self.mesh.find_unreached(self.rounds.awaited, limit_s)

    def close(self) -> None:
        """End all links and answers: the next incarnation begins."""
        self.mesh.close()
        self.rounds.close()
