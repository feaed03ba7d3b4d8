"""The outlook of a job on a node that is drained, and then perhaps lost: a pure rule.

A drain kills nothing. A job with an idle spare leaves the node; any other runs there until its end, or until the node
is taken away.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.query.figures import find_sealed_version
from gemini_hpc.query.inspect_document import Document

IDLE, LEAVES, STAYS = "idle", "leaves", "stays"
MEMORY, TIER = "memory", "tier"


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outlook of one job on a node that is drained and then goes away.

    Attributes:
        drain: `idle`: the node is a spare of the job; `leaves`: the job goes on without it at the next seal; `stays`.
        source: What the job would resume from after the node's loss: `memory`, `tier`, or "" for nothing.
        step: The step it would resume from, 0 for none.
        why: A sentence on what hurts, or "".
    """

    drain: str
    source: str
    step: int
    why: str = ""

    @property
    def survives(self) -> bool:
        """Return whether the job would go on from a saved step, or would not notice the loss."""
        return bool(self.source) or self.drain == IDLE


UNPROTECTED = Outlook(STAYS, "", 0, "not protected: no agent answers")


def predict_outlook(d: Document, node: str) -> Outlook:
    """Return the outlook of a job on this node.

    Args:
        d: The job's inspect document.
        node: Name of the node.
    """
    spares = d["spares"] or {"idle": [], "without": []}
    if node in spares["idle"] or node in spares["without"]:
        return Outlook(IDLE, "", 0)
    drain, why = STAYS, ""
    first = d["slurm"].get("nodes", "").split(",")[0]
    if spares["idle"] and d["replicas"] > 1:
        drain, why = (STAYS, "its batch script runs there") if node == first else (LEAVES, "")
    if drain == STAYS and d["slurm"].get("note"):
        return Outlook(drain, "", 0, d["slurm"]["note"])
    if not d["trainings"]:
        return Outlook(drain, "", 0, "nothing is saved yet")
    if all(_survives_in_memory(s, node) for s in d["trainings"]):
        return Outlook(drain, MEMORY, find_sealed_version(d) or 0, why)
    stored = [s["tier"]["version"][1] if s["tier"] and s["tier"]["version"] else 0 for s in d["trainings"]]
    if all(stored):
        return Outlook(drain, TIER, min(stored), why or "memory has no other copy of what this node holds")
    return Outlook(drain, "", 0, "this node holds the only copy, and the tier has none")


def _survives_in_memory(training: Document, node: str) -> bool:
    """Return whether other nodes hold all that the training needs if this node is lost."""
    survival = training["survival"]
    return bool(training["sealed"]) and not survival["lost_already"] and [node] not in survival["fatal"]
