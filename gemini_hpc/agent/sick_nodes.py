"""Nodes that are alive and do harm: their ranks fail first again and again. The rules are in `core.culprits`.

Launchers report how their ranks have ended, and the reports go up the tree. A moment after an attempt's first report
the root judges which rank failed first, and all agents count. The job leaves a sick node at once, if it has a spare.

All of this rests on reports of the job's owner. Hence the reports have only one further effect, a hint. The node's
epilog asks for the hint (`suspects_this_node`), and root runs the site's health check itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.core.culprits import SICK, Blame, Cause, Ends, Key, RankFailure, Tally, describe_cause
from gemini_hpc.core.standstill import HangStanding
from gemini_hpc.wire import peer

# Seconds after which ranks that failed by themselves at about the same time are reported, and the next attempt has
# hardly begun.
_SETTLE_S = 0.3
_MOST_OPEN = 64  # limit of attempts that are being judged
_STEP_CHARS = 64


class SickNodes:
    """The failures that one agent knows of."""

    def __init__(self, context: AgentContext, on_sick_node: Callable[[str, str], None]) -> None:
        """Create an empty record of failures.

        Args:
            context: The agent's context.
            on_sick_node: Called at the root with a node to leave, and the reason.
        """
        self._node, self._membership = context.node, context.membership
        self._log, self._spawn, self._on_sick_node = context.log, context.spawn, on_sick_node
        self._is_red = False
        self._open: dict[Key, Ends] = {}
        self._judged: dict[Key, None] = {}
        self._tally = Tally()

    @property
    def suspects_this_node(self) -> bool:
        """Return whether root should spend time on a check of this node."""
        return self._is_red or self._tally.count_failures(self._node) > 0

    def list_sick_nodes(self) -> list[str]:
        """Return the nodes whose ranks have failed first too often, also in earlier incarnations of the job."""
        return self._tally.list_sick_nodes()

    # ---- what is heard ---------------------------------------------------------------------------------

    def report_end(self, step: str, attempt: int, rank: int, cause: Cause, version: int) -> None:
        """Report that a rank of this node has ended, and not by its launcher.

        Args:
            step: The rank's step.
            attempt: The attempt of the step.
            rank: The rank.
            cause: Cause of its end.
            version: As in `peer.RankEnded`.
        """
        incarnation = self._membership.incarnation
        if incarnation is not None:
            self._pass_end(incarnation, peer.RankEnded(step, max(attempt, 0), self._node, rank, cause, version))

    def report_unhealthy(self, rank: int, why: str) -> None:
        """Report that the site's health check of this node has failed, after a rank's failure."""
        incarnation = self._membership.incarnation
        self._is_red = True
        if incarnation is not None:
            self._log("unhealthy", detail=why)
            self._pass_unhealthy(incarnation, peer.Unhealthy(self._node, rank, why))

    def record_hang(self, incarnation: Incarnation, standing: HangStanding) -> None:
        """Count, at the root, a rank that keeps the others waiting.

        If all ranks are in one collective, no rank is behind and none is counted.
        """
        least = standing.least
        if least.reached != standing.most.reached or not least.runs:
            step = f"hang in {incarnation.rounds.launch}"[:_STEP_CHARS]
            m = peer.RankEnded(step, incarnation.rounds.round, least.host, least.rank, Cause.HUNG, least.version)
            self._pass_end(incarnation, m)

    def on_message(
        self, incarnation: Incarnation, host: str, m: peer.RankEnded | peer.FailedFirst | peer.Unhealthy
    ) -> None:
        """Handle a report from a child, or the root's decision."""
        if m.host not in incarnation.hosts:
            return
        if isinstance(m, peer.RankEnded) and host in incarnation.rounds.children:
            self._pass_end(incarnation, m)
        elif isinstance(m, peer.Unhealthy) and host in incarnation.rounds.children:
            self._pass_unhealthy(incarnation, m)
        elif isinstance(m, peer.FailedFirst) and host == incarnation.rounds.parent:
            self._count_blame(incarnation, m)

    def _pass_end(self, incarnation: Incarnation, m: peer.RankEnded) -> None:
        if not incarnation.leads:
            if incarnation.rounds.parent is not None:
                incarnation.send(incarnation.rounds.parent, m)
            return
        key = (incarnation.restart, m.step, m.attempt)
        if key in self._judged or (key not in self._open and len(self._open) >= _MOST_OPEN):
            return
        if key not in self._open:
            self._spawn(self._judge(incarnation, key))
        self._open[key] = self._open.get(key, Ends()).join([RankFailure(m.cause, m.host, m.rank, m.version)])

    def _pass_unhealthy(self, incarnation: Incarnation, m: peer.Unhealthy) -> None:
        if incarnation.leads:
            self._on_sick_node(m.host, f"health check on {m.host}: {m.why}"[:300])
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
            self._count_blame(
                now, peer.FailedFirst(key[1], key[2], first.host, first.rank, first.cause, first.version)
            )

    def _count_blame(self, incarnation: Incarnation, m: peer.FailedFirst) -> None:
        incarnation.send_down(m)
        blame = Blame(m.rank, m.cause, m.version)
        if not self._tally.record_blame(m.host, (incarnation.restart, m.step, m.attempt), blame):
            return
        times = self._tally.count_failures(m.host)
        if not incarnation.leads:
            return
        what = f"rank {m.rank} on {m.host} {describe_cause(m.cause)}"
        self._log(
            "failed_first", detail=f"{what}: attempt {m.attempt} of step {m.step}, {_describe_blame(blame, times)}"
        )
        if blame.counts and times >= SICK:
            self._on_sick_node(m.host, f"{what}; {times} times its ranks failed first"[:300])


def _describe_blame(blame: Blame, times: int) -> str:
    """Return the meaning of a blame for its node, in words."""
    if blame.counts:
        return f"{times} so far that count against this node"
    where = "" if blame.step else ", before its first step"
    return f"a failure of the program{where}: it does not count against the node"
