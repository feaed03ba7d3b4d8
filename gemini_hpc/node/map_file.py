"""The map file: an incarnation as the SPANK plugin and the batch script read it, all or nothing.

See requirement all-or-nothing-map.

The first line has the version of the format, the others are `key=value`. The plugin reads the file only if it is the
job owner's and every line is in order. It skips unknown keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

NAME = "map"
WAITING = "waiting"  # without a map, steps wait a moment: slurmd may have skipped the prolog (see `agent.wake_peers`)


def write(directory: str, fields: Mapping[str, object]) -> None:
    """Put a file with these fields in place atomically; `agent.recovery_member` has their names."""
    temporary = os.path.join(directory, f".{NAME}.{os.getpid()}")
    with open(temporary, "w", encoding="ascii") as f:
        f.write("GEMINI_MAP 1\n" + "".join(f"{key}={value}\n" for key, value in fields.items()))
    os.replace(temporary, os.path.join(directory, NAME))
    end_wait(directory)


def remove(directory: str) -> None:
    """Remove the map: the job runs as under plain Slurm."""
    with suppress(OSError):  # the map is missing, or its directory is gone
        os.unlink(os.path.join(directory, NAME))


def begin_wait(directory: str) -> None:
    """Remove the map and mark that the agent has no notice of the next incarnation yet."""
    remove(directory)
    with suppress(OSError), open(os.path.join(directory, WAITING), "w", encoding="ascii"):
        pass


def end_wait(directory: str) -> None:
    """Remove the mark of `begin_wait`: the decision on the map has been made."""
    with suppress(OSError):
        os.unlink(os.path.join(directory, WAITING))
