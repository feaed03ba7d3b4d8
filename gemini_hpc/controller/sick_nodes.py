"""Nodes that live, and of which agents say that they do harm: drained, so that no job begins there, where the site
wants that.

Nothing proves what agents say: they are their user's processes. So less follows than from a death: the node is
drained, never set DOWN, its job goes on, a few nodes a day, and none where a job of another owner runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gemini_hpc.config import Settings
from gemini_hpc.controller.journal import NODES, Journal
from gemini_hpc.controller.lemons import Lemons
from gemini_hpc.controller.registry import Track
from gemini_hpc.core.culprits import Cause
from gemini_hpc.slurm import SlurmError, UnknownJob
from gemini_hpc.slurm.api import SlurmApi
from gemini_hpc.slurm.facts import COMPLETING, CONFIGURING, RUNNING, Job, Node
from gemini_hpc.wire.controller import Sick
from gemini_hpc.wire.sanitize import tame

log = logging.getLogger("gemini_hpc.controller")

DAY_S = 86400.0
REASON = "gemini-hpc: sick"  # of nodes that we have drained, as their Reason begins
_WHY_CHARS = 150
_MOST_WAITING = 64
_MOST_DONE = 4096
_WHAT = {None: "unhealthy", Cause.HUNG: "hung"}


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of such a node. allowed, drained: nodes a day, and of them today; `user_`: for this owner's jobs;
    strangers: other owners of jobs there."""

    sick: Sick
    members: tuple[str, ...]
    job: Job | None
    node: Node | None
    strangers: frozenset[int]
    allowed: int
    drained: int
    user_allowed: int
    user_drained: int
    guard: bool


def why_not(case: Case) -> str:
    """Why the node is not drained; "" where it is. Pure."""
    sick, job, node = case.sick, case.job, case.node
    if sick.left:
        return "the job has gone on without it"
    if not case.allowed:
        return "sick_nodes_per_day is 0"
    if job is None or job.restarts != sick.restart or job.state not in (RUNNING, CONFIGURING, COMPLETING):
        return "the job does not run there any more"
    if sick.host not in case.members:
        return "the node is not in the job's allocation"
    if sick.cause is not None and len(case.members) < 2:
        return "the job has one node: its program may be the cause"
    if node is None:
        return "Slurm does not know this node"
    if node.withheld:
        return "the node is down or drained already"
    if case.guard and case.strangers:
        return f"jobs of other owners (uid {', '.join(map(str, sorted(case.strangers)))}) run on the node"
    if case.drained >= case.allowed:
        return f"{case.drained} nodes drained within a day, {case.allowed} allowed"
    if case.user_drained >= case.user_allowed:
        return f"{case.user_drained} nodes drained within a day for jobs of this user, {case.user_allowed} allowed"
    return ""


class SickNodes:
    """say: a line of a job's log; alert: to whom it may concern."""

    def __init__(
        self,
        settings: Settings,
        slurm: SlurmApi,
        journal: Journal,
        lemons: Lemons,
        say: Callable[[int, int, str, str, str], None],
        alert: Callable[[str, int, str, str], None],
    ) -> None:
        self._settings, self._slurm, self._journal, self._lemons = settings, slurm, journal, lemons
        self._say, self._alert = say, alert
        self._one = asyncio.Lock()  # what is counted is not counted twice
        self._waiting = 0
        self._done: dict[tuple[int, int, str], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, track: Track, sick: Sick) -> None:
        """What an agent of the job says; each node of an incarnation is looked at once."""
        key = (track.raw_id, sick.restart, sick.host)
        if key in self._done or self._waiting >= _MOST_WAITING or sick.host not in track.members(sick.restart):
            return
        self._done[key] = None
        self._lemons.add(sick.host, _WHAT.get(sick.cause, "failed"), track.raw_id, _told(sick))
        while len(self._done) > _MOST_DONE:
            del self._done[next(iter(self._done))]
        self._waiting += 1
        task = asyncio.ensure_future(self._look(track, sick))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Stop at once; what is about to end, which may still write to the journal."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    async def _look(self, track: Track, sick: Sick) -> None:
        try:
            async with self._one:
                why = await self._judge(track, sick)
                if not why:
                    await self._drain(track, sick)
                    return
        except (SlurmError, OSError) as exc:
            why = str(exc)
        finally:
            self._waiting -= 1
        self._say(track.raw_id, sick.restart, "not_drained", sick.host, f"{_told(sick)}: {why}")
        if why.endswith("allowed"):
            self._alert("sick nodes", track.raw_id, sick.host, why)

    async def _judge(self, track: Track, sick: Sick) -> str:
        host, settings = sick.host, self._settings
        try:
            job: Job | None = await self._slurm.job(track.raw_id)
        except UnknownJob:
            job = None
        nodes = await self._slurm.nodes([host])
        owners = await self._slurm.owners([host])
        allowed, count = settings.sick_nodes_per_day, self._journal.drained
        return why_not(
            Case(
                sick=sick,
                members=track.members(sick.restart),
                job=job,
                node=nodes.get(host),
                strangers=frozenset(uid for uid, _ in owners.get(host, ())) - {track.user_id},
                allowed=allowed,
                drained=count(DAY_S),
                user_allowed=(allowed + 1) // 2,
                user_drained=count(DAY_S, user_id=track.user_id),
                guard=settings.node_max_jobs_guard,
            )
        )

    async def _drain(self, track: Track, sick: Sick) -> None:
        reason = f"{REASON}, job {track.raw_id} restart {sick.restart}: {_told(sick)}"
        self._journal.write(NODES, "drain", "before", node=sick.host, user_id=track.user_id, job=track.raw_id)
        await self._slurm.node_drain(sick.host, reason)
        self._journal.write(NODES, "drain", "after", node=sick.host)
        self._say(track.raw_id, sick.restart, "drained", sick.host, _told(sick))


def _told(sick: Sick) -> str:
    """In words that may stand in a node's reason: printable ASCII, no quotes."""
    text = tame(sick.why)[:_WHY_CHARS]
    return "".join(c if c.isascii() and c not in "\"'=" else "?" for c in text)
