"""The watch for nodes and partitions that are drained under a running job.

An administrator intends to take them away. So the job's agents get a `Draining` message and bring the sealed state
to the tier. The job itself is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemini_hpc import clock
from gemini_hpc.controller.registry import Track
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import Node
from gemini_hpc.wire.controller import Draining

LOOK_S = 10.0  # shortest time between two queries


class DrainWatch:
    """The watch that queries Slurm for partitions and the nodes of all running jobs, at most every LOOK_S."""

    def __init__(self, slurm: SlurmApi, *, clock: Callable[[], float] = clock.monotonic) -> None:
        self._slurm, self._clock = slurm, clock
        self._looked = -LOOK_S
        # By raw job id and restart count: (node, ""), or (partition, its state).
        self._reported: dict[tuple[int, int], set[tuple[str, str]]] = {}

    async def report_drains(self, running: Iterable[Track]) -> None:
        """Report to the agents of these jobs which nodes and partitions have begun to drain.

        Raises:
            SlurmError: Slurm did not answer.
        """
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        tracks = {(t.raw_id, t.job.restarts): t for t in running if t.job is not None}
        self._reported = {key: hosts for key, hosts in self._reported.items() if key in tracks}
        names = sorted({host for (_, restart), track in tracks.items() for host in track.list_members(restart)})
        if not names:
            return
        nodes, partitions = await self._slurm.read_nodes(names), await self._slurm.read_partitions()
        for (raw_id, restart), track in tracks.items():
            members = [nodes[host] for host in track.list_members(restart) if host in nodes]
            draining = {(node.name, "") for node in members if _is_drained(node)}
            partition = track.job.partition if track.job is not None else ""
            if (state := partitions.get(partition, "UP")) != "UP":
                draining.add((partition, state))
            reported = self._reported.get((raw_id, restart), set())
            if new := draining - reported:
                agents = [a for a in track.agents.values() if a.is_connected and a.restart == restart]
                hosts = tuple(sorted(name for name, state in new if not state))
                partition_state = next((f"partition {name} is {state}" for name, state in new if state), "")
                for agent in agents:
                    agent.link.send(Draining(raw_id, hosts, partition_state))
                draining = draining if agents else reported
            self._reported[raw_id, restart] = draining


def _is_drained(node: Node) -> bool:
    """Return whether an administrator has drained the node. A node that is down does not count."""
    return "DRAIN" in node.flags and not node.is_down
