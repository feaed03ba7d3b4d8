"""A training of the job as this node sees it: its seal, the version to resume from, and its participants."""

from __future__ import annotations

from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.agent.replicas.pace import VersionGaps
from gemini_hpc.agent.replicas.progress import RankPages
from gemini_hpc.agent.replicas.voting import Voting
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import control_page, peer
from gemini_hpc.wire.local_server import LocalClient


class Training:
    """The state of one training (`Checkpointer(name=...)`) on this node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.world = 0
        self._memory = Memfd(f"gemini:page:{name}", control_page.PAGE_BYTES)
        self.page = control_page.ControlPage(self._memory.fd, writable=True)
        self.pace = VersionGaps()
        self.ranks = RankPages()
        self.load_copies: dict[int, Memfd] = {}
        self.apply_plan(None, 0)

    def apply_plan(self, plan: peer.PlannedTraining | None, round_number: int) -> None:
        """Reset this training to the plan of a round."""
        self.pace.reset()
        self.ranks.reset()
        if plan is None:
            plan = peer.PlannedTraining(self.name, None, (), None, 0, (), ())
        else:
            self.world = plan.world
        self.chosen, self.chosen_world, self.stored, self.lost = plan.chosen, plan.world, plan.stored, plan.lost
        self.sources = {copy.rank: hosts for copy, hosts in plan.copies}
        self.chosen_copies = {copy.rank: copy for copy, _ in plan.copies}
        self.settled = plan.sealed
        self.sealing: Voting | None = None
        self.begun = 0  # the newest version that a rank of this launch has begun to save here
        self.note = ""
        self.hung = ""  # the reported reason and place of a hang
        self.restarts: set[int] = set()  # ranks that are restarted when they fail
        self.present: dict[int, LocalClient] = {}
        self.greeted: set[int] = set()
        self.finished: set[int] = set()
        self.left: dict[int, str] = {}  # ranks without protection any more, and the reason: no version is sealed then
        self._complaint: tuple[str, Stamp | None] = "", None
        self.void: Stamp | None = None  # a version whose ranks disagree on its moment
        self.void_note = ""  # their difference, until rank 0 has received it
        self.page.set_sealed(*(self.settled or (0, 0)))
        self.page.set_abandoned(0, 0)
        self.page.set_state(control_page.STATE_ARMING)
        self.page.set_round(round_number)

    @property
    def sealed(self) -> Stamp | None:
        """Return the newest sealed version, from the root's decision or, before one, from the plan."""
        word = self.sealing.decision.sealed if self.sealing is not None else None
        return word if word is not None else self.settled

    @property
    def reached(self) -> int:
        """Return the newest step that a rank of this launch has completed here, 0 before the first."""
        return max(self.begun, self.ranks.reached)

    def record_trouble(self, text: str) -> None:
        """Record a rank's reason why versions are not sealed. The reason holds until the next seal."""
        self._complaint = text, self.sealed

    @property
    def trouble(self) -> str:
        """Return the reason that ranks here have given why versions are not sealed now, or ""."""
        gone = "; ".join(f"rank {rank} is no longer protected: {why}" for rank, why in sorted(self.left.items()))
        text, sealed = self._complaint
        return (gone or (text if self.sealed == sealed else ""))[:500]

    @property
    def succeeded(self) -> bool:
        """Return whether all ranks that trained here have closed their checkpointers."""
        return bool(self.greeted) and self.finished >= self.greeted

    def open_page(self) -> int:
        """Return a read-only descriptor of the control page for a trainer."""
        return self._memory.open_read_only()

    def close(self) -> None:
        """Free the pages of this training."""
        self.ranks.reset()
        self.page.close()
        self._memory.close()
