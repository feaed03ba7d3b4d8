"""The right to inspect other users' jobs at the controller (requirement who-may-inspect).

The setting `operators` grants it. If there is a slurmdbd, its Operators and Administrators have it, too.
"""

from __future__ import annotations

import os

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.operators import Operators
from gemini_hpc.slurm.api import SlurmApi

_ACCOUNTING_KEPT_S = 300.0  # whether there is a slurmdbd is checked again after this
_MAY = frozenset(("Operator", "Administrator"))


class Accounting:
    """The operators known to slurmdbd.

    Every failure raises an exception, which the caller treats as a refusal.
    """

    def __init__(self, slurm: SlurmApi) -> None:
        self._slurm = slurm
        self._there = (0.0, False)

    async def is_operator(self, user: str) -> bool:
        """Return whether slurmdbd has this user as Operator or Administrator; False without a slurmdbd.

        Raises:
            SlurmError: Slurm did not answer.
        """
        until, has_accounting = self._there
        if clock.monotonic() >= until:
            has_accounting = await self._slurm.has_accounting()
            self._there = (clock.monotonic() + _ACCOUNTING_KEPT_S, has_accounting)
        return has_accounting and await self._slurm.read_admin_level(user) in _MAY


def find_operators(settings: Settings, slurm: SlurmApi) -> Operators:
    """Return the users who may inspect every job at the controller."""
    return Operators(settings.operators, (0, os.geteuid()), Accounting(slurm).is_operator)
