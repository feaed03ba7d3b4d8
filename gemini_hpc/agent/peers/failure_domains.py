"""Failure domains of a job's nodes, for the coordinator of a recovery round.

The domains come from the site's file or from Slurm's own topology.conf. Nodes with an unknown domain are not kept
apart, and no round waits long for the file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping

from gemini_hpc.core import topology
from gemini_hpc.core.topology import TopologyError
from gemini_hpc.files import read_regular_file

# slurmd's places for it: beside slurm.conf as packaged, and where slurmctld sends it (`enable_configless`).
SLURMS = ("/etc/slurm/topology.conf", "/run/slurm/conf/topology.conf")
NONE = "none"
LOOK_S = 2.0  # seconds: the prologs of all nodes wait, and a file system may be away


class FailureDomains:
    """The failure domains of nodes, read from a file."""

    def __init__(self, setting: str, warn: Callable[[str], None]) -> None:
        """Create an empty table of domains.

        Args:
            setting: `Settings.failure_domains`.
            warn: Called once, with one sentence, if a file cannot be used.
        """
        self._setting, self._warn = setting, warn
        self._said = ""
        self.by_host: Mapping[str, str] = {}

    async def read_domains(self, hosts: Iterable[str]) -> None:
        """Read the file again, for these hosts."""
        if self._setting == NONE:
            return
        self.by_host, problem = {}, ""
        try:
            async with asyncio.timeout(LOOK_S):
                found = await asyncio.to_thread(read, self._setting)
            self.by_host = {host: found[host] for host in hosts if host in found}
        except TopologyError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"{self._setting or SLURMS[0]} could not be read within {LOOK_S:g} s"
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
        if problem not in ("", self._said):
            self._said = problem
            self._warn(f"failure domains are not known, so nodes side by side hold each other's copies: {problem}")


def find_path(setting: str) -> str:
    """Return the file that the setting names, or "" if Slurm has none."""
    return setting or next(filter(os.path.exists, SLURMS), "")


def read(setting: str) -> dict[str, str]:
    """Return the failure domains by node.

    The result is empty if the setting names no file and Slurm has none.

    Raises:
        TopologyError: The file's content is invalid.
        OSError: The file cannot be read.
    """
    path = find_path(setting)
    if not path:
        return {}
    text = read_regular_file(path, topology.MAX_BYTES + 1).decode(errors="replace")
    try:
        return topology.parse(text)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from None
