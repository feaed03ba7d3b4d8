"""Which versions stay on the tier: the newest K, and every J-th that a job has written."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import publish, version

_UNBORN = re.compile(r"\.e[0-9]{7}-v[0-9]{13}\..{1,40}\.tmp")  # directories that got no name, or lost it


def for_good(serial: int, keep_every: int) -> bool:
    """Whether a job's `serial`-th version (from 1) stays: each `keep_every`-th does; 0: none."""
    return bool(keep_every) and serial % keep_every == 0


def clean(directory: str, keep_last: int, *, before: Stamp | None = None) -> list[Stamp]:
    """In a set's directory: remove whole versions behind the newest `keep_last`, unless they stay for good, and what
    was begun and never became whole, if it is older than `before`. Rejected ones are not counted, and stay: their
    user may want to look at them. Returns what went. Raises OSError."""
    whole, going = 0, []
    for stamp in version.stamps(directory):
        path = f"{directory}/{version.name(stamp)}"
        if version.there(f"{path}/{version.MANIFEST}"):
            if version.rejected(directory, stamp):
                continue
            whole += 1
            if whole > keep_last and not version.there(f"{path}/{version.KEPT}"):
                going.append(stamp)
        elif before is None or stamp < before:
            going.append(stamp)
    for entry in os.listdir(directory) if os.path.isdir(directory) else ():
        if _UNBORN.fullmatch(entry):
            with suppress(OSError):
                shutil.rmtree(f"{directory}/{entry}")
    going.reverse()
    for stamp in going:
        publish.remove(f"{directory}/{version.name(stamp)}")
    return going
