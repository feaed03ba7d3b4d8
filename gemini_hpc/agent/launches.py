"""In which attempt the ranks of a step are to be: told to launchers, passed along the tree (`core.attempts`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.core.attempts import Known
from gemini_hpc.wire import local, peer

MAX_STEPS = 64
_REASON = 300


class Launches:
    """Of one agent, and of one incarnation at a time."""

    def __init__(self, node: str, membership: Membership, log: Callable[..., None]) -> None:
        self._node, self._membership, self._log = node, membership, log
        self._steps: dict[str, Known] = {}
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """A new incarnation: its steps may have the names of earlier ones."""
        self._steps.clear()
        self._wake()

    # ---- launchers -------------------------------------------------------------------------------------

    async def ask(self, m: local.LaunchRequest) -> local.LaunchState | local.Error:
        """Take what a launcher says; answer when there is something new for it, or when its time is over."""
        incarnation = self._membership.incarnation
        if incarnation is None or self._membership.detached:
            return local.Error("this node has no part in a running incarnation of the job")
        known = self._steps.get(m.step, Known()).join(Known(m.attempt, done=m.done, over=m.over))
        if m.failed:
            known = known.failed(m.attempt, m.failed[:_REASON])
        if m.failed or m.over:
            self._log("rank_failed", detail=f"attempt {m.attempt} of step {m.step}: {m.over or m.failed}")
        self._learn(incarnation, m.step, known, "")
        with suppress(TimeoutError):
            async with asyncio.timeout(m.wait_s):
                while (now := self._steps.get(m.step)) is not None and now.attempt <= m.attempt and not now.over:
                    await self._changed.wait()
        known = self._steps.get(m.step, known)
        return local.LaunchState(known.attempt, known.reason[:_REASON], known.over[:_REASON])

    # ---- peers -----------------------------------------------------------------------------------------

    def heard(self, incarnation: Incarnation, host: str, m: peer.Launch) -> None:
        """What a neighbour in the tree knows."""
        if host == incarnation.rounds.parent or host in incarnation.rounds.children:
            known = self._steps.get(m.step, Known())
            self._learn(incarnation, m.step, known.join(Known(m.attempt, m.reason, m.over, m.done)), host)

    def on_link(self, incarnation: Incarnation, host: str) -> None:
        """A link to a peer is new: what it may have missed is told again."""
        if host == incarnation.rounds.parent or host in incarnation.rounds.children:
            for step, known in self._steps.items():
                incarnation.send(host, _message(step, known))

    def _learn(self, incarnation: Incarnation, step: str, known: Known, source: str) -> None:
        before = self._steps.get(step, Known())
        if known == before and step in self._steps:
            return
        self._steps[step] = known
        while len(self._steps) > MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        if known == before:
            return
        if incarnation.leads and (known.attempt > before.attempt or known.over > before.over):
            what = known.over or f"attempt {known.attempt} begins: {known.reason}"
            self._log("relaunch" if not known.over else "not_relaunched", detail=f"step {step}: {what}"[:_REASON])
        for host in (incarnation.rounds.parent, *incarnation.rounds.children):
            if host is not None and host != source:
                incarnation.send(host, _message(step, known))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _message(step: str, known: Known) -> peer.Launch:
    return peer.Launch(step, known.attempt, known.reason[:_REASON], known.over[:_REASON], known.done)
