"""In which attempt the ranks of a step are to be: told to launchers, passed along the tree (`core.attempts`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.core.attempts import Known
from gemini_hpc.core.culprits import Cause
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.ports import master_port

MAX_STEPS = 64
_REASON = 300


class Launches:
    """Of one agent, and of one incarnation at a time."""

    def __init__(
        self,
        job: int,
        node: str,
        membership: Membership,
        log: Callable[..., None],
        ended: Callable[[str, int, int, Cause, int], None],
        unhealthy: Callable[[int, str], None],
        begun: Callable[[], int],
        check: str = "",
    ) -> None:
        """ended: called with a rank here that has ended by itself: step, attempt, rank, what it shows, and the newest
        version that the attempt had begun to save here (`begun`); unhealthy: with a rank, and what the health check
        (`check`) then says of this node."""
        self._job, self._node, self._membership, self._log = job, node, membership, log
        self._ended, self._unhealthy, self._begun, self._check = ended, unhealthy, begun, check
        self._steps: dict[str, Known] = {}
        self.is_left_out = False
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """A new incarnation: its steps may have the names of earlier ones."""
        self._steps.clear()
        self.is_left_out = False
        self._wake()

    def left_out(self) -> None:
        """The job goes on without this node: its ranks end, and nobody minds."""
        self.is_left_out = True
        self._wake()

    # ---- launchers -------------------------------------------------------------------------------------

    async def ask(self, m: local.LaunchRequest) -> local.LaunchState | local.Error:
        """Take what a launcher says; answer when there is something new for it, or when its time is over."""
        incarnation = self._membership.incarnation
        if self.is_left_out:
            return local.LaunchState(max(m.attempt, 0), over="the job goes on without this node", left_out=True)
        if incarnation is None or self._membership.detached:
            return local.Error("this node has no part in a running incarnation of the job")
        known = self._steps.get(m.step, Known()).join(Known(max(m.attempt, 0), done=m.done, over=m.over))
        if m.failed:
            known = known.failed(max(m.attempt, 0), m.failed[:_REASON])
        if m.failed or m.over:
            self._log("rank_failed", detail=f"attempt {m.attempt} of step {m.step}: {m.over or m.failed}")
        if m.cause is not None:
            self._ended(m.step, m.attempt, m.rank, m.cause, self._begun())
        if m.unhealthy:
            self._unhealthy(m.rank, m.unhealthy)
        self._learn(incarnation, m.step, known, "")
        with suppress(TimeoutError):
            async with asyncio.timeout(m.wait_s):
                while not self._news(m):
                    await self._change()
        if self.is_left_out:
            return await self.ask(m)
        known = self._steps.get(m.step, known)
        return local.LaunchState(
            known.attempt, known.reason[:_REASON], known.over[:_REASON], self._place(), known.done, check=self._check
        )

    def _news(self, m: local.LaunchRequest) -> bool:
        known = self._steps.get(m.step)
        if self.is_left_out or known is None or known.over or (known.done and m.idle):
            return True
        return known.attempt > m.attempt and (not self._spares or self._place() is not None)

    async def _change(self) -> None:
        """Return when what is known of steps has changed, or the stage of the recovery round."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._changed.wait())]
        if self._membership.incarnation is not None:
            waits.append(asyncio.ensure_future(self._membership.incarnation.rounds.changed()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def _spares(self) -> bool:
        incarnation = self._membership.incarnation
        return incarnation is not None and incarnation.view.spares > 0

    def _place(self) -> local.Place | None:
        here = self._membership
        if not self._spares or here.live is None:
            return None
        master = next(host for host, rank in here.noderanks.items() if rank == 0)
        port = master_port(self._job, here.restart)
        return local.Place(here.noderanks.get(self._node, -1), here.nodes, master, port)

    def lost(self, hosts: Sequence[str], why: str = "lost") -> None:
        """The job goes on without these nodes: the ranks of all others begin anew. Each agent says so by itself."""
        incarnation = self._membership.incarnation
        assert incarnation is not None  # the view without them
        for step, known in list(self._steps.items()):
            reason = f"{', '.join(hosts)[:200]} {why}"
            self._learn(incarnation, step, known.failed(known.attempt, reason), "")
        self._wake()

    def hung(self, launch: str, reason: str) -> bool:
        """A rank of this launch hangs: the next attempt begins. False: no launchers have started it."""
        step, mark, attempt = launch.rpartition("+")
        if not mark or not (attempt.isascii() and attempt.isdigit()):
            step, attempt = launch, "0"
        incarnation, known = self._membership.incarnation, self._steps.get(step)
        if incarnation is None or known is None:
            return False
        self._learn(incarnation, step, known.failed(int(attempt), f"{local.HUNG}{reason}"[:_REASON]), "")
        return True

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
