"""Which versions stay on the tier: the newest K, and every J-th that a job has written."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import place, version


@dataclass(frozen=True)
class Retention:
    """keep_last >= 1. keep_every: each so manieth of a job's versions stays for good; 0: none does."""

    keep_last: int = 2
    keep_every: int = 0

    def for_good(self, serial: int) -> bool:
        """Whether a job's `serial`-th version (from 1) stays."""
        return bool(self.keep_every) and serial % self.keep_every == 0


def clean(directory: str, keep_last: int, *, busy: Stamp | None = None) -> list[Stamp]:
    """In a set's directory: remove whole versions behind the newest `keep_last`, unless they stay for good, and what
    was begun and never became whole, all but `busy`. Returns what went. Raises OSError."""
    whole, going = 0, []
    for stamp in version.stamps(directory):
        path = f"{directory}/{version.name(stamp)}"
        if os.path.lexists(f"{path}/{version.MANIFEST}"):
            whole += 1
            if whole > keep_last and not os.path.lexists(f"{path}/{version.KEPT}"):
                going.append(stamp)
        elif stamp != busy:
            going.append(stamp)
    going.reverse()
    for stamp in going:
        place.remove(f"{directory}/{version.name(stamp)}")
    return going
