"""The drain of nodes that root has found red by the site's health check, a few a day.

A job's agents are processes of its owner: no message of theirs brings a node here. They only make the epilog run
the check (`node.health_report`). Its result arrives under root's MUNGE credential, from the node's own address.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from gemini_hpc import clock
from gemini_hpc.controller.journal import NODES
from gemini_hpc.controller.recovery_context import RecoveryContext
from gemini_hpc.controller.withheld import DRAIN
from gemini_hpc.slurm import SlurmError
from gemini_hpc.slurm.facts import Node
from gemini_hpc.wire.controller import HealthVerdict, RedNode

log = logging.getLogger("gemini_hpc.controller")

REASON = "gemini-hpc: sick"  # prefix of the Reason of nodes that are drained here
_WORDS = {
    HealthVerdict.RED: "the health check is red",
    HealthVerdict.HANGS: "the health check does not end",
}


@dataclass(frozen=True, slots=True)
class RedNodeCase:
    """The facts about a red node.

    Attributes:
        node: The node as Slurm has it; None if Slurm does not know it.
        allowed: Nodes that may be drained in a day.
        drained: Nodes drained within the last day.
    """

    node: Node | None
    allowed: int
    drained: int


def explain_refusal(case: RedNodeCase) -> str:
    """Return why the node is not drained; "" if it is. Pure."""
    if not case.allowed:
        return "sick_nodes_per_day is 0"
    if case.node is None:
        return "Slurm does not know this node"
    if case.node.is_withheld:
        return "the node is down or drained already"
    if case.drained >= case.allowed:
        return f"{case.drained} nodes drained within a day, {case.allowed} allowed"
    return ""


class SickNodeDrains:
    """The drains of one controller."""

    def __init__(self, home: RecoveryContext) -> None:
        self._home = home
        self._lock = asyncio.Lock()  # no drain is counted twice
        self._tasks: set[asyncio.Task[str]] = set()

    async def judge_node(self, host: str, red: RedNode) -> str:
        """Drain a node that root has found red, or leave it. Return the result in one sentence."""
        task = asyncio.ensure_future(self._judge(host, red))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    def cancel(self) -> list[asyncio.Task[str]]:
        """Cancel all work. Return the tasks that are about to end, which may still write to the journal."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    async def _judge(self, host: str, red: RedNode) -> str:
        found = _WORDS[red.verdict]
        self._home.lemons.add_visit(host, "unhealthy", red.job, found)
        try:
            async with self._lock:
                nodes = await self._home.slurm.read_nodes([host])
                allowed, drained = (
                    self._home.settings.sick_nodes_per_day,
                    self._home.journal.count_drained(clock.DAY_S),
                )
                why = explain_refusal(RedNodeCase(nodes.get(host), allowed, drained))
                if not why and (mode := self._home.gate.explain_refusal(nodes[host].partitions)):
                    if self._home.withheld.record_act(DRAIN, red.job, red.restart, host, found, mode):
                        self._home.journal.write_line(NODES, "drain", "withheld", node=host, job=red.job)
                    why = mode
                if not why:
                    await self._drain(host, red, found)
        except (SlurmError, OSError) as exc:
            why = str(exc)
        log.warning("event=%s host=%s job=%d detail=%s", "not-drained" if why else "drained", host, red.job, why)
        if not why:
            self._home.log_event(red.job, red.restart, "drained", host, found)
            return "drained"
        self._home.log_event(red.job, red.restart, "not_drained", host, f"{found}: {why}")
        if why.endswith("allowed"):
            self._home.alerts.send_alert("sick nodes", red.job, host, why)
        return f"not drained: {why}"

    async def _drain(self, host: str, red: RedNode, found: str) -> None:
        reason = f"{REASON}, {found}, after job {red.job} restart {red.restart}"
        self._home.journal.write_line(NODES, "drain", "before", node=host, job=red.job)
        await self._home.slurm.drain_node(host, reason)
        self._home.journal.write_line(NODES, "drain", "after", node=host)
