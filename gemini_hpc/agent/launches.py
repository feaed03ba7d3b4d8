"""The attempt in which the ranks of a step should run, sent to launchers and along the tree (`core.attempts`).

News goes to the parent and the children in the tree. Over a new link goes all that is known. A restarted agent learns
everything from its launchers and neighbours; a new incarnation forgets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.core.attempts import End, Known
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.wire import local, peer
from gemini_hpc.wire.ports import compute_master_port

MAX_STEPS = 64
_REASON = 300


class Launches:
    """An agent's knowledge of steps and their attempts, in one incarnation at a time."""

    def __init__(
        self,
        context: AgentContext,
        on_end: Callable[[str, int, int, Cause, int], None],
        on_unhealthy: Callable[[int, str], None],
        read_begun_version: Callable[[], int],
    ) -> None:
        """Create an empty table of steps.

        Args:
            context: The agent's context.
            on_end: Called when a rank here has ended by itself. Its arguments are step, attempt, rank, cause, and the
                newest version that the attempt had begun to save here (`read_begun_version`).
            on_unhealthy: Called with a rank and the result of the health check that followed its failure.
            read_begun_version: Returns the newest version that ranks have begun to save here.
        """
        self._job, self._node, self._check = context.identity.job, context.node, context.settings.health_check
        self._membership, self._log = context.membership, context.log
        self._on_end, self._on_unhealthy, self._read_begun_version = on_end, on_unhealthy, read_begun_version
        self._steps: dict[str, Known] = {}
        self._watched: set[str] = set()  # steps with launchers here
        self.is_left_out = False
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """Forget all steps: those of a new incarnation may have the names of earlier ones."""
        self._steps.clear()
        self._watched.clear()
        self.is_left_out = False
        self._wake()

    def note_left_out(self) -> None:
        """Note that the job goes on without this node: the end of its ranks matters no more."""
        self.is_left_out = True
        self._wake()

    # ---- launchers -------------------------------------------------------------------------------------

    async def answer(self, m: local.LaunchRequest) -> local.LaunchState | local.Error:
        """Take a launcher's report. Answer when there is news for the launcher, or when its time is over."""
        incarnation = self._membership.incarnation
        if self.is_left_out:
            return local.LaunchState(max(m.attempt, 0), over="the job goes on without this node", left_out=True)
        if incarnation is None or self._membership.detached:
            return local.Error("the job does not run on this node now")
        attempt = max(m.attempt, 0)
        self._watched.add(m.step)
        reported = Known(attempt, over=m.over, given_up=m.given_up, done=m.done)
        known = self._steps.get(m.step, Known()).join(reported)
        if (end := m.shown) is not None:
            known = known.add_failure(attempt, end) if m.failed else known.add_end(attempt, end)
            cause = Cause.RAISED if end.memory else end.cause  # a program's own use of memory is no fault of the node
            self._on_end(m.step, m.attempt, end.rank, cause, self._read_begun_version())
        if m.failed or m.over:
            why = "; ".join(filter(None, (end.text if end is not None else "", m.over)))
            self._log("rank_failed", detail=f"attempt {m.attempt} of step {m.step}: {why}"[:_REASON])
        if m.unhealthy:
            self._on_unhealthy(m.rank, m.unhealthy)
        self._learn(incarnation, m.step, known, "")
        with suppress(TimeoutError):
            async with asyncio.timeout(m.wait_s):
                while not self._has_news(m):
                    await self._wait_for_change()
        if self.is_left_out:
            return await self.answer(m)
        known = self._steps.get(m.step, known)
        return local.LaunchState(
            known.attempt,
            known.first,
            known.before,
            known.why_over[:_REASON],
            known.last,
            self._find_place(),
            known.done,
            check=self._check,
        )

    @property
    def last(self) -> local.StepEnd | None:
        """Return the newest step with a known end."""
        for step, known in reversed(self._steps.items()):
            if known.given_up:
                return local.StepEnd(step, known.ending, known.why_over[:_REASON])
            if known.last.text:
                return local.StepEnd(step, known.last)
        return None

    def has_launchers(self, launch: str) -> bool:
        """Return whether launchers have started the ranks of this launch here."""
        return launch in self._watched or launch.rpartition("+")[0] in self._watched

    def record_end(self, step: str, end: End) -> None:
        """Record the end of a rank without a launcher."""
        incarnation = self._membership.incarnation
        if incarnation is None:
            return
        if end.memory:
            self._log("rank_failed", detail=f"step {step}: {end.text}"[:_REASON])
        self._learn(incarnation, step, self._steps.get(step, Known()).add_end(0, end), "")

    def _has_news(self, m: local.LaunchRequest) -> bool:
        known = self._steps.get(m.step)
        if self.is_left_out or known is None or known.over or (known.done and m.idle):
            return True
        return known.attempt > m.attempt and (not self._spares or self._find_place() is not None)

    async def _wait_for_change(self) -> None:
        """Wait until the knowledge of steps changes, or the stage of the recovery round."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._changed.wait())]
        if self._membership.incarnation is not None:
            waits.append(asyncio.ensure_future(self._membership.incarnation.changed.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def _spares(self) -> bool:
        incarnation = self._membership.incarnation
        return incarnation is not None and incarnation.view.spares > 0

    def _find_place(self) -> local.Place | None:
        membership = self._membership
        if not self._spares or membership.live is None:
            return None
        master = next(host for host, rank in membership.noderanks.items() if rank == 0)
        port = compute_master_port(self._job, membership.restart)
        return local.Place(membership.noderanks.get(self._node, -1), membership.nodes, master, port)

    def record_loss(self, hosts: Sequence[str], why: str = "lost") -> None:
        """Start the ranks of all other nodes again: the job goes on without these nodes.

        Each agent does so by itself.
        """
        incarnation = self._membership.incarnation
        assert incarnation is not None  # the view without these nodes
        for step, known in [(step, known) for step, known in self._steps.items() if step in self._watched]:
            end = End(f"{', '.join(hosts)[:200]} {why}", Cause.CRASHED, t=clock.time())
            self._learn(incarnation, step, known.add_failure(known.attempt, end), "")
        self._wake()

    def record_hang(self, launch: str, rank: int, description: str) -> bool:
        """Begin the next attempt because a rank of this node hangs.

        Return whether launchers started the step here.
        """
        step, mark, attempt = launch.rpartition("+")
        number = parse_number(attempt, -1) if mark else -1
        if number < 0:
            step, number = launch, 0
        incarnation, known = self._membership.incarnation, self._steps.get(step)
        if incarnation is None or known is None or step not in self._watched:
            return False
        end = End(f"hung: {self._node}: {description}"[:_REASON], Cause.HUNG, rank, host=self._node, t=clock.time())
        self._learn(incarnation, step, known.add_failure(number, end), "")
        return True

    # ---- peers -----------------------------------------------------------------------------------------

    def on_message(self, incarnation: Incarnation, host: str, m: peer.Launch) -> None:
        """Take a tree neighbour's knowledge of a step."""
        if host == incarnation.rounds.parent or host in incarnation.rounds.children:
            known = self._steps.get(m.step, Known())
            first = m.first if m.first.text else End(m.reason)
            reported = Known(m.attempt, first, m.before, m.over, m.last, m.given_up, m.done)
            self._learn(incarnation, m.step, known.join(reported), host)

    def on_link(self, incarnation: Incarnation, host: str) -> None:
        """Resend all steps to a peer with a new link, which may have missed them."""
        if host == incarnation.rounds.parent or host in incarnation.rounds.children:
            for step, known in self._steps.items():
                incarnation.send(host, _build_message(step, known))

    def _learn(self, incarnation: Incarnation, step: str, known: Known, source: str) -> None:
        before = self._steps.get(step, Known())
        if known == before and step in self._steps:
            return
        self._steps[step] = known
        while len(self._steps) > MAX_STEPS:
            oldest = next(iter(self._steps))
            del self._steps[oldest]
            self._watched.discard(oldest)
        if known == before:
            return
        if incarnation.leads and (known.attempt > before.attempt or known.over > before.over):
            what = known.why_over or f"attempt {known.attempt} begins: {known.reason}"
            self._log("relaunch" if not known.over else "not_relaunched", detail=f"step {step}: {what}"[:_REASON])
        for host in (incarnation.rounds.parent, *incarnation.rounds.children):
            if host is not None and host != source:
                incarnation.send(host, _build_message(step, known))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _build_message(step: str, known: Known) -> peer.Launch:
    reason, ends = known.reason[:_REASON], (known.first, known.before, known.last)
    return peer.Launch(step, known.attempt, reason, known.over, known.done, *ends, known.given_up)
