"""The end of a job whose training has succeeded: its memory is freed once no peer is missed.

A script may end well although a node was lost. The job may then come back, and needs the copies. A peer that is
silent at the job's end may have left a moment ago. It may also be on a lost node, or cut off from here. The agent
therefore looks again, for as long as a loss before the end may still be found.

Once any node counts as dead, or the job is pending, the memory stays.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.retention import Retention
from gemini_hpc.agent.tier.tier_parts import TierParts


class GoodEnd:
    """The good end of an agent's job."""

    def __init__(
        self,
        context: AgentContext,
        trainings: Trainings,
        tier: TierParts,
        retention: Retention,
        has_finished: Callable[[], bool | None],
    ) -> None:
        """Create the watch for a good end.

        Args:
            context: The agent's context.
            trainings: The agent's trainings.
            tier: The agent's part in saves to the tier.
            retention: Decides when the memory is freed.
            has_finished: Returns whether all ranks that train here have closed their checkpointers.
        """
        self._membership, self._trainings = context.membership, trainings
        self._saver, self._keeps = tier.saver, tier.keeps
        self._retention, self._has_finished = retention, has_finished
        self._doubted = False  # the training has succeeded here, but a peer is missed

    def forget_end(self) -> None:
        """Forget the end of an earlier incarnation."""
        self._doubted = False

    def free_if_succeeded(self, exit_code: str) -> bool:
        """Return whether all memory was freed at the epilog's message."""
        well = bool(self._has_finished()) and exit_code in ("", "0")
        self._doubted = well and self._misses_peer()
        if not well or self._doubted:
            return False
        self._saver.succeeded = True
        return self._free_memory()

    def check_doubt(self) -> None:
        """Free all memory once a doubt is over. Called a few times a second while the job does not run here."""
        incarnation = self._membership.incarnation
        if not self._doubted or incarnation is None:
            return
        mesh = incarnation.mesh
        if mesh.dead or not mesh.detector.watching or self._retention.explain_refusal():
            self._doubted = False  # a node that counts as dead was missed when the job ended, whatever follows
        elif not self._misses_peer():
            self._doubted = False
            self._free_memory()

    def _misses_peer(self) -> bool:
        incarnation = self._membership.incarnation
        return incarnation is not None and bool(incarnation.mesh.dead or incarnation.mesh.list_silent())

    def _free_memory(self) -> bool:
        """Free all memory and return whether this was possible.

        Versions to keep by name must first reach the tier.
        """
        kept = any(
            self._keeps.list_wished_names(t.name) and t.sealed is not None for t in self._trainings if t.greeted
        )
        if kept and self._saver.tier:
            return False
        self._saver.succeeded = True
        self._saver.stop_waiting()
        self._retention.release("the training succeeded")
        return True
