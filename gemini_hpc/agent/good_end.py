"""The end of a job whose training has succeeded: what is held here is freed once no peer is missed.

A script may end well although a node was lost; then the job may come back, and needs what is held. A peer that is
silent at the job's end may be on a lost node, or have left a moment ago, or be cut off from here. So it is looked at
again for as long as a loss before the end may still be found.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.replicas.trainings import Trainings
from gemini_hpc.agent.retention import Retention
from gemini_hpc.agent.tier.keeps import Keeps
from gemini_hpc.agent.tier.saver import Saver


class GoodEnd:
    """The good end of an agent's job. finished: whether all ranks that train here have closed their checkpointers."""

    def __init__(
        self,
        membership: Membership,
        trainings: Trainings,
        saver: Saver,
        keeps: Keeps,
        retention: Retention,
        finished: Callable[[], bool | None],
    ) -> None:
        self._membership, self._trainings = membership, trainings
        self._saver, self._keeps, self._retention = saver, keeps, retention
        self._finished = finished
        self._doubted = False  # the training has succeeded here, and a peer is missed

    def attached(self) -> None:
        """Forget the end of an earlier incarnation."""
        self._doubted = False

    def ended(self, exit_code: str) -> bool:
        """Return whether all was freed at the epilog's word."""
        well = bool(self._finished()) and exit_code in ("", "0")
        self._doubted = well and self._missed()
        if not well or self._doubted:
            return False
        self._saver.succeeded = True
        return self._free()

    def look(self) -> None:
        """Free all where a doubt is over; called a few times a second while the job does not run here."""
        incarnation = self._membership.incarnation
        if not self._doubted or incarnation is None:
            return
        mesh = incarnation.mesh
        if mesh.dead or not mesh.detector.watching or self._retention.barred():
            self._doubted = False  # a node that counts as dead was missed when the job ended, whatever comes then
        elif not self._missed():
            self._doubted = False
            self._free()

    def _missed(self) -> bool:
        incarnation = self._membership.incarnation
        return incarnation is not None and bool(incarnation.mesh.dead or incarnation.mesh.silent())

    def _free(self) -> bool:
        """Return whether all was freed: what is to be kept by name has to get to the tier first."""
        kept = any(self._keeps.of_set(t.name) and t.sealed is not None for t in self._trainings if t.greeted)
        if kept and self._saver.tier:
            return False
        self._saver.succeeded = True
        self._saver.ended()
        self._retention.release("the training succeeded")
        return True
