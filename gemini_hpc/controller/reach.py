"""The check how many other nodes this host reaches: a controller that is cut off itself must not judge."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import Port
from gemini_hpc.controller.registry import Registry
from gemini_hpc.slurm.facts import Node

MOST = 64
KEPT_S = 0.5  # a result this recent is used again
SAMPLE = 4  # of the nodes vouched for by agents, so many are probed before a node is fenced
UNSEEN = (Port.SILENT, Port.UNKNOWN)


class Reachability:
    """The probe of nodes that are not suspected, first those of one job, then those of others."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry = settings, registry
        self._asked_at, self._sure_at = 0.0, 0.0
        self.reached, self.asked = 0, 0

    async def probe_members(
        self, members: Iterable[str], accused: set[str], nodes: Mapping[str, Node], *, must_be_fresh: bool = False
    ) -> None:
        """Probe again, unless the last result is recent.

        An agent that has just connected vouches for its node. But its messages prove only the way in. With
        `must_be_fresh`, some of those nodes are probed as well, and represent the others.
        """
        began = clock.monotonic()
        if began - (self._sure_at if must_be_fresh else self._asked_at) < KEPT_S:
            return
        self._asked_at = began
        more = [h for t in self._registry.jobs.values() for h, a in t.agents.items() if a.is_connected]
        known = (h for h in dict.fromkeys([*members, *more]) if h in nodes and h not in accused)
        names = list(known)[:MOST]
        port = self._settings.slurmd_port
        targets = {n: (nodes[n].address, nodes[n].port or port) for n in names if not nodes[n].is_down}
        vouched = [n for n in targets if self._registry.is_vouched(n)]
        sample = random.sample(vouched, min(SAMPLE, len(vouched))) if must_be_fresh else []
        asked = {n: t for n, t in targets.items() if n not in vouched or n in sample}
        found = await probe.probe_ports(asked)
        if not must_be_fresh and self._sure_at > began:
            return  # a `must_be_fresh` probe has finished meanwhile, and its result is more reliable
        seen = sum(found[n] not in UNSEEN for n in sample)
        doubtful = [n for n in asked if n not in sample]
        answered = sum(found[n] not in (*UNSEEN, Port.HANGS) for n in doubtful)
        self.reached = answered + (len(vouched) * seen // len(sample) if sample else len(vouched))
        self.asked = len(targets)
        if must_be_fresh:
            self._asked_at = self._sure_at = clock.monotonic()
