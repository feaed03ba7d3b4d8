"""The interface of the controller to one recovery: Slurm, the journal, its reachability, and other recoveries."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gemini_hpc.config import Settings
from gemini_hpc.controller.alert import Alerts
from gemini_hpc.controller.gate import Gate
from gemini_hpc.controller.journal import Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.primary import Primary
from gemini_hpc.controller.reach import Reachability
from gemini_hpc.controller.registry import Registry, Track
from gemini_hpc.controller.withheld import Withheld
from gemini_hpc.slurm.api import SlurmApi


class RecoveryContext(Protocol):
    """The interface that `recoveries.Recoveries` implements.

    Attributes:
        reserving: Lock that one recovery holds while it chooses and reserves nodes.
        longest_epilog_s: Longest time for which a job was seen COMPLETING, in seconds.
    """

    settings: Settings
    slurm: SlurmApi
    journal: Journal
    registry: Registry
    primary: Primary
    alerts: Alerts
    reach: Reachability
    lemons: Lemons
    gate: Gate
    withheld: Withheld
    reserving: asyncio.Lock
    longest_epilog_s: float

    def log_event(self, raw_id: int, restart: int, event: str, host: str = "", detail: str = "") -> None:
        """Write one line to a job's event log."""

    def list_accused(self) -> set[str]:
        """Return the hosts that any recovery suspects."""

    def list_silent(self, hosts: set[str], user_id: int | None = None) -> set[str]:
        """Return these hosts and all hosts that are silent in other recoveries (of this user, if given)."""

    def remember_silent(self, hosts: set[str]) -> None:
        """Remember hosts that were too many to be fenced. They count when the next host is judged."""

    def explain_hold(self, track: Track) -> str:
        """Return why this job must be held instead of running again; "" if it need not be."""

    def compute_reservation_minutes(self) -> int:
        """Return how many minutes a reservation lasts if it is not deleted."""

    def list_protected(self, user_id: int) -> set[str]:
        """Return the nodes of other owners' protected jobs."""

    def find_survivors(self, name: str) -> set[str] | None:
        """Return the job's survivors for whom the reservation was made; None if they are not known."""
