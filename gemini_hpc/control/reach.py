"""How many other nodes this host reaches: a controller that is cut off itself must not judge."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from gemini_hpc.config import Settings
from gemini_hpc.control import probe
from gemini_hpc.control.fencing import Port
from gemini_hpc.control.registry import Registry
from gemini_hpc.control.slurm.facts import Node

MOST = 64
KEPT_S = 0.5


class Reach:
    """Looks at nodes that nobody suspects: those of one job first, then those of others."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry = settings, registry
        self._at = 0.0
        self.reached, self.asked = 0, 0

    async def look(self, members: Iterable[str], accused: set[str], nodes: Mapping[str, Node]) -> None:
        """Ask anew, unless that was done a moment ago."""
        if time.monotonic() - self._at < KEPT_S:
            return
        self._at = time.monotonic()
        more = [h for t in self._registry.jobs.values() for h, a in t.agents.items() if a.connected]
        known = (h for h in dict.fromkeys([*members, *more]) if h in nodes and h not in accused)
        names = list(known)[:MOST]
        port = self._settings.slurmd_port
        targets = {n: (nodes[n].address, nodes[n].port or port) for n in names if not nodes[n].down}
        doubtful = {n: t for n, t in targets.items() if not self._registry.vouched(n)}
        silent = [n for n, p in (await probe.reached(doubtful)).items() if p in (Port.SILENT, Port.HANGS)]
        self.reached, self.asked = len(targets) - len(silent), len(targets)
