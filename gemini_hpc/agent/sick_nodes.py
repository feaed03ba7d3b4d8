"""Nodes that live and do harm: whose ranks fail first again and again. The rules are in `core.culprits`.

Launchers tell how their ranks have ended; that goes up the tree. A moment after the first word of an attempt the root
judges which rank failed first, and all agents count. A node that is sick is left at once, where the job has a spare;
else the controller is told, which drains it if the site wants that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_hpc.agent.peers.event_log import Log
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.tasks import Spawn
from gemini_hpc.core.culprits import SICK, Cause, Ends, Failure, Key, Tally, told
from gemini_hpc.core.standstill import Standing
from gemini_hpc.wire import peer
from gemini_hpc.wire.controller import Sick

# Ranks that fail by themselves at about the same time have been heard of by then; the next attempt has hardly begun.
_SETTLE_S = 0.3
_MOST_OPEN = 64  # attempts that are being judged
_STEP_CHARS = 64


class SickNodes:
    """Of one agent. found: told, at the root, of a node that is to be left."""

    def __init__(
        self,
        job: int,
        node: str,
        membership: Membership,
        log: Log,
        spawn: Spawn,
        found: Callable[[Sick], None],
    ) -> None:
        self._job, self._node, self._membership = job, node, membership
        self._log, self._spawn, self._found = log, spawn, found
        self._open: dict[Key, Ends] = {}
        self._judged: dict[Key, None] = {}
        self._tally = Tally()

    # ---- what is heard ---------------------------------------------------------------------------------

    def ended(self, step: str, attempt: int, rank: int, cause: Cause) -> None:
        """A rank of this node has ended, and not by its launcher."""
        incarnation = self._membership.incarnation
        if incarnation is not None:
            self._pass(incarnation, peer.RankEnded(step, max(attempt, 0), self._node, rank, cause))

    def unhealthy(self, rank: int, why: str) -> None:
        """The site's health check of this node is red, after a rank's failure."""
        incarnation = self._membership.incarnation
        if incarnation is not None:
            self._log("unhealthy", detail=why)
            self._pass_red(incarnation, peer.Unhealthy(self._node, rank, why))

    def hung(self, incarnation: Incarnation, standing: Standing) -> None:
        """At the root: a rank keeps the others waiting. Where all ranks are in one collective nobody is behind."""
        least = standing.least
        if least.reached != standing.most.reached or not least.runs:
            step = f"hang in {incarnation.rounds.step}"[:_STEP_CHARS]
            m = peer.RankEnded(step, incarnation.rounds.round, least.host, least.rank, Cause.HUNG)
            self._pass(incarnation, m)

    def heard(
        self, incarnation: Incarnation, host: str, m: peer.RankEnded | peer.FailedFirst | peer.Unhealthy
    ) -> None:
        """A child passes an end on; or the root has judged."""
        if m.host not in incarnation.hosts:
            return
        if isinstance(m, peer.RankEnded) and host in incarnation.rounds.children:
            self._pass(incarnation, m)
        elif isinstance(m, peer.Unhealthy) and host in incarnation.rounds.children:
            self._pass_red(incarnation, m)
        elif isinstance(m, peer.FailedFirst) and host == incarnation.rounds.parent:
            self._count(incarnation, m)

    def _pass(self, incarnation: Incarnation, m: peer.RankEnded) -> None:
        if not incarnation.leads:
            if incarnation.rounds.parent is not None:
                incarnation.send(incarnation.rounds.parent, m)
            return
        key = (incarnation.restart, m.step, m.attempt)
        if key in self._judged or (key not in self._open and len(self._open) >= _MOST_OPEN):
            return
        if key not in self._open:
            self._spawn(self._judge(incarnation, key))
        self._open[key] = self._open.get(key, Ends()).join([Failure(m.cause, m.host, m.rank)])

    def _pass_red(self, incarnation: Incarnation, m: peer.Unhealthy) -> None:
        if incarnation.leads:
            why = f"health check on {m.host}: {m.why}"
            self._found(Sick(self._job, incarnation.restart, m.host, m.rank, 1, None, why[:300]))
        elif incarnation.rounds.parent is not None:
            incarnation.send(incarnation.rounds.parent, m)

    # ---- what follows ----------------------------------------------------------------------------------

    async def _judge(self, incarnation: Incarnation, key: Key) -> None:
        await asyncio.sleep(_SETTLE_S)
        first = self._open.pop(key).first
        self._judged[key] = None
        while len(self._judged) > _MOST_OPEN:
            del self._judged[next(iter(self._judged))]
        now = self._membership.incarnation
        if first is not None and now is not None and now.restart == incarnation.restart and first.host in now.hosts:
            self._count(now, peer.FailedFirst(key[1], key[2], first.host, first.rank, first.cause))

    def _count(self, incarnation: Incarnation, m: peer.FailedFirst) -> None:
        incarnation.send_down(m)
        if not self._tally.blame(m.host, (incarnation.restart, m.step, m.attempt)):
            return
        times = self._tally.count(m.host)
        if not incarnation.leads:
            return
        what = f"rank {m.rank} on {m.host} {told(m.cause)}"
        self._log("failed_first", detail=f"{what}: attempt {m.attempt} of step {m.step}, {times} so far on this node")
        if times >= SICK:
            why = f"{what}; {times} times its ranks failed first"
            self._found(Sick(self._job, incarnation.restart, m.host, m.rank, times, m.cause, why[:300]))
