"""Who may inspect other users' jobs at the controller: `operators`, and slurmdbd's where there is one (requirement
who-may-inspect)."""

from __future__ import annotations

import os

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.operators import Operators
from gemini_hpc.slurm.api import SlurmApi

_ACCOUNTING_KEPT_S = 300.0
_MAY = frozenset(("Operator", "Administrator"))


class Accounting:
    """slurmdbd's word about a user; whatever fails is an exception, and the caller's no."""

    def __init__(self, slurm: SlurmApi) -> None:
        self._slurm = slurm
        self._there = (0.0, False)

    async def operator(self, user: str) -> bool:
        """Whether slurmdbd has this user as Operator or Administrator; False without one. Raises `SlurmError`."""
        until, there = self._there
        if clock.monotonic() >= until:
            there = await self._slurm.accounting()
            self._there = (clock.monotonic() + _ACCOUNTING_KEPT_S, there)
        return there and await self._slurm.admin_level(user) in _MAY


def operators(settings: Settings, slurm: SlurmApi) -> Operators:
    """Whom the controller lets look at every job."""
    return Operators(settings.operators, (0, os.geteuid()), Accounting(slurm).operator)
