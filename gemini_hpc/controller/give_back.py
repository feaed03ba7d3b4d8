"""The return of rebooted fenced nodes to service, if the site enables it (requirement administrators-resume).

It is off by default. It serves only nodes with our reason that this controller's journal lists as fenced. They must
have booted after that, and their slurmd must have answered for `auto_resume_s` without a gap. Each node is returned
at most twice a day: a node that dies again and again stays with the administrator.
"""

from __future__ import annotations

import asyncio
import logging
import re

from gemini_hpc import clock
from gemini_hpc.controller import probe
from gemini_hpc.controller.fencing import REASON, Port
from gemini_hpc.controller.journal import NODES
from gemini_hpc.controller.recovery_context import RecoveryContext
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.facts import Node

log = logging.getLogger("gemini_hpc.controller")

PER_DAY = 2
MAX_INTERVAL_S = 10.0  # longest pause between two checks
_STAMP = re.compile(r"\s*\[[^][\s]+@[0-9-]{10}T[0-9:]{8}\]$")


def is_ours(node: Node) -> bool:
    """Return whether the controller has taken this node out of service."""
    return node.is_withheld and node.reason.startswith(REASON)


def find_drain_reason(node: Node) -> str:
    """Return the reason for which an administrator has drained this node; "" if none has.

    The stamp with the user and the time is removed.
    """
    if "DRAIN" not in node.flags or is_ours(node):
        return ""
    return _STAMP.sub("", node.reason) or "drained by hand"


class GiveBack:
    """The task that checks the fenced nodes every few seconds."""

    def __init__(self, home: RecoveryContext) -> None:
        self._home = home
        self._answers_since: dict[str, tuple[float, float]] = {}

    async def run(self) -> None:
        """Run until cancelled. Return at once if the site has not enabled it."""
        wait_s = self._home.settings.auto_resume_s
        while wait_s > 0:
            try:
                await self.check_fenced()
            except SlurmError as exc:
                log.warning("give-back: %s", exc)
            await asyncio.sleep(min(MAX_INTERVAL_S, wait_s / 4))

    async def check_fenced(self) -> None:
        """Check the fenced nodes once, and resume those that are due."""
        fenced = self._home.journal.read_fence_times()
        if not fenced:
            return
        nodes = await self._home.slurm.read_nodes()
        ours = {n.name: n for n in nodes.values() if n.name in fenced and is_ours(n)}
        back = {n: node for n, node in ours.items() if node.boot_time > fenced[n]}
        port = self._home.settings.slurmd_port
        seen = await probe.probe_ports({n: (node.address, node.port or port) for n, node in back.items()})
        now = clock.monotonic()
        before, self._answers_since = self._answers_since, {}
        for name, node in back.items():
            if seen[name] is not Port.ANSWERS:
                continue
            boot, since = before.get(name, (node.boot_time, now))
            self._answers_since[name] = (node.boot_time, since if boot == node.boot_time else now)
            if now - self._answers_since[name][1] >= self._home.settings.auto_resume_s:
                await self._resume(node)

    async def _resume(self, node: Node) -> None:
        given_back = self._home.journal.count_given_back(node.name, clock.DAY_S)
        if given_back >= PER_DAY or self._home.gate.explain_refusal(node.partitions):
            return
        self._home.journal.write_line(NODES, "resume", "before", node=node.name)
        await self._home.slurm.resume_node(node.name)
        self._home.journal.write_line(NODES, "resume", "after", node=node.name)
        self._answers_since.pop(node.name, None)
        why = f"the node has rebooted and answered for {self._home.settings.auto_resume_s:g} s"
        log.info("event=given-back host=%s reason=%r", node.name, why)
