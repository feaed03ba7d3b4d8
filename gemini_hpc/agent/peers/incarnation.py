"""One incarnation of the job, as far as this agent takes part in it: its hosts, links and recovery rounds.

It begins with the word of the prolog (or of a peer), and is there until the next one begins; so it is still there,
detached, when the job has ended here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.agent.peers.mesh import Mesh
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.core.views import View
from gemini_hpc.wire import local
from gemini_hpc.wire.message import Message

_SILENT_S = 3.0


@dataclass(frozen=True, eq=False)
class Incarnation:
    """attach: what it began with; view: with which of its nodes it goes on."""

    attach: local.Attach
    view: View
    mesh: Mesh
    rounds: RecoveryRounds

    @property
    def hosts(self) -> tuple[str, ...]:
        """Its nodes, in the order of Slurm's list; without those that it has lost and goes on without."""
        return self.view.hosts

    @property
    def restart(self) -> int:
        """Its number: how often Slurm has started the job anew."""
        return self.attach.restart

    @property
    def leads(self) -> bool:
        """Whether this agent is the root of the tree, which coordinates rounds, seals and saves."""
        return self.rounds.parent is None

    @property
    def live(self) -> bool:
        """Whether a round is over and none has begun: the training is protected."""
        return self.rounds.stage == "live"

    def send(self, host: str, message: Message) -> bool:
        """To one peer; False where there is no link to it."""
        return self.mesh.send(host, message)

    def send_down(self, message: Message) -> None:
        """To the agents below in the tree."""
        for child in self.rounds.children:
            self.mesh.send(child, message)

    @property
    def silent_s(self) -> float:
        """After such a silence a node is missing."""
        return max(_SILENT_S, 3 * self.mesh.silence_s)

    def incomplete(self, now: float) -> bool:
        """Whether a node has died, or a neighbour in the tree is silent."""
        mesh, rounds, silent_s = self.mesh, self.rounds, self.silent_s
        kin = [*rounds.children, *([rounds.parent] if rounds.parent is not None else [])]
        silent = [host for host in kin if now - mesh.heard.get(host, 0.0) > silent_s]
        return bool(mesh.dead) or bool(set(silent) - mesh.left)

    async def absent(self, limit_s: float) -> tuple[str, ...]:
        """Name the hosts that the round waits for, and whose agents cannot be reached within `limit_s`: the
        coordinator of the whole tree, another agent of its parent."""
        return await self.mesh.unreached(self.rounds.awaited, limit_s)

    def close(self) -> None:
        """The next one begins: no link, and no answer any more."""
        self.mesh.close()
        self.rounds.close()
