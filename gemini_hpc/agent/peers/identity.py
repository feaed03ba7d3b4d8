"""Which agent this is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gemini_hpc.config import Settings


@dataclass
class Identity:
    """Of one agent, for its life. uid: the job's owner; directory: the job's on this node; again: another agent has
    died here; instance: tells this one from those. address, interface, port: where it listens, once it does."""

    settings: Settings
    job: int
    uid: int
    node: str
    directory: str
    again: bool = False
    instance: str = field(default_factory=lambda: os.urandom(8).hex())
    address: str = ""
    interface: str = ""
    port: int = 0
