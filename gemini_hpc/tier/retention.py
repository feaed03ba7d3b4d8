"""Retention on the tier: the newest K versions stay, and every J-th that a job has written."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import publish, scratch, version

_UNBORN = re.compile(r"\.e[0-9]{7}-v[0-9]{13}\..{1,40}\.tmp")  # directories that never got their name, or lost it


def is_permanent(serial: int, keep_every: int) -> bool:
    """Return whether a job's `serial`-th version (from 1) is kept permanently.

    Every `keep_every`-th version is kept; 0 means none.
    """
    return bool(keep_every) and serial % keep_every == 0


def clean(directory: str, keep_last: int, *, before: Stamp | None = None) -> list[Stamp]:
    """Remove old and unfinished versions from a training's directory; return the removed stamps.

    Whole versions older than the newest `keep_last` are removed, unless they are kept permanently. Unfinished
    versions are removed if they are older than `before`. Rejected versions are not counted and stay, because
    their user may want to inspect them. Raises OSError.
    """
    whole, going = 0, []
    for stamp in version.list_stamps(directory):
        path = f"{directory}/{version.format_name(stamp)}"
        if version.is_present(f"{path}/{version.MANIFEST}"):
            if version.is_rejected(directory, stamp):
                continue
            whole += 1
            if whole > keep_last and not version.is_present(f"{path}/{version.KEPT}"):
                going.append(stamp)
        elif before is None or stamp < before:
            going.append(stamp)
    for entry in os.listdir(directory) if os.path.isdir(directory) else ():
        if _UNBORN.fullmatch(entry):
            with suppress(OSError):
                scratch.remove(f"{directory}/{entry}")
    going.reverse()
    for stamp in going:
        publish.remove(f"{directory}/{version.format_name(stamp)}")
    return going
