"""An agent's part in saves to the tier."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.agent.tier.keeps import NamedVersions
from gemini_hpc.agent.tier.node_writer import NodeWriter
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.saver import Saver


@dataclass(frozen=True)
class TierParts:
    """The parts of one agent that save to the tier.

    Attributes:
        choice: The job's tier.
        keeps: Versions to keep by name.
        writer: Writer of this node's files.
        saver: Saver of versions.
        salvage: Saves the survivors' versions after a loss of nodes.
    """

    choice: TierChoice
    keeps: NamedVersions
    writer: NodeWriter
    saver: Saver
    salvage: Salvage
