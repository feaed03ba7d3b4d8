"""All copies of one agent, with the parts that change them."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.agent.replicas.closings import Closings
from gemini_hpc.agent.replicas.outlines import Outlines
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.replicas.slot_writes import SlotWrites
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.trainings import Trainings


@dataclass(frozen=True)
class Replicas:
    """The copies of one agent.

    Attributes:
        store: Shards of this node.
        trainings: The trainings that they belong to.
        filling: Writes to slots.
        outlines: Outlines of shards.
        rejections: Versions that were rejected.
        closings: Trainings that are closed.
    """

    store: Store
    trainings: Trainings
    filling: SlotWrites
    outlines: Outlines
    rejections: Rejections
    closings: Closings
