"""What one recovery asks of its controller: Slurm, the journal, its view, and what other recoveries know."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gemini_hpc.config import Settings
from gemini_hpc.controller.alert import Alerts
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.reach import Reach
from gemini_hpc.controller.registry import Registry, Track
from gemini_hpc.slurm.api import SlurmApi


class RecoveryContext(Protocol):
    """`recoveries.Recoveries` is one. reserving: held while nodes are chosen and reserved, by one recovery at a time;
    longest_epilog_s: the longest that a job was seen COMPLETING."""

    settings: Settings
    slurm: SlurmApi
    journal: Journal
    registry: Registry
    primary: Primary
    alerts: Alerts
    reach: Reach
    lemons: Lemons
    reserving: asyncio.Lock
    longest_epilog_s: float

    def say(self, raw_id: int, restart: int, event: str, host: str = "", detail: str = "") -> None:
        """One line of a job's event log."""

    def accused(self) -> set[str]:
        """Hosts that any recovery suspects."""

    def silent(self, hosts: set[str], user_id: int | None = None) -> set[str]:
        """These hosts, and all that are silent in other recoveries (of this user)."""

    def remember_silent(self, hosts: set[str]) -> None:
        """These were too many to be fenced; they count when the next one is judged."""

    def why_hold(self, track: Track) -> str:
        """Why this job is to be held in place of running again; "" if it is not."""

    def reservation_minutes(self) -> int:
        """How long a reservation lasts if nobody ends it."""

    def protected_of_others(self, user_id: int) -> set[str]:
        """Nodes of other owners' protected jobs."""

    def survivors_of(self, name: str) -> set[str] | None:
        """For whom a reservation of ours is there; None where that is not known."""
