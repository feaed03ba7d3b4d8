"""The agent's side of `gemini-hpc flush`, which reports progress to the caller until the flush is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.tier.salvage import Salvage
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import version
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.wire.flush import FlushAsk, Flushing
from gemini_hpc.wire.link import Link

_ASK_S = 5.0  # the caller sends its request within this time
_TELL_S = 1.0  # interval of progress reports
_LOOK_S = 0.2  # interval of progress reports during a salvage
_TIER_S = 10.0  # the tier must list its versions within this time


class FlushRequests:
    """An agent's answers to flush requests."""

    def __init__(self, context: AgentContext, trainings: Iterable[Training], saver: Saver, salvage: Salvage) -> None:
        self._job, self._membership, self._spawn = context.identity.job, context.membership, context.spawn
        self._trainings, self._saver, self._salvage = trainings, saver, salvage

    async def answer(self, link: Link) -> None:
        """Serve one admitted caller."""
        async with asyncio.timeout(_ASK_S):
            if not isinstance(await link.receive(), FlushAsk):
                return
        trainings = [t for t in self._trainings if t.sealed is not None]
        if self._salvage.serves(clock.monotonic()):
            await self._flush_by_salvage(link)
            return
        why, root = self._find_refusal()
        if not (why or root) and not trainings:
            why = "no version has been sealed yet"
        if why or root:
            await link.flush(Flushing(over=True, reason=why, root=root))
            return
        await asyncio.gather(*(self._flush_training(link, training) for training in trainings))

    def _find_refusal(self) -> tuple[str, str]:
        """Return why a flush is impossible, and which host to ask instead. Both are empty if this agent can flush."""
        incarnation = self._membership.incarnation
        if incarnation is None:
            return "the job does not run on this node now", ""
        if not self._saver.tier:
            return "the job has no tier; submit it with --gemini-tier=DIR", ""
        return "", "" if incarnation.leads else incarnation.hosts[0]

    async def _flush_by_salvage(self, link: Link) -> None:
        """Flush a job that has lost a node and waits, including versions that only other agents know to be sealed.

        A restarted agent knows no versions.
        """
        salvage = self._salvage
        if not (salvage.saved or salvage.busy):
            salvage.begin_try(asked=True)
        while salvage.busy:
            await asyncio.sleep(_LOOK_S)
            for training in self._trainings:
                sealed = training.sealed or Stamp(0, 0)
                await link.flush(Flushing(training.name, sealed, self._saver.count_written_bytes(training.name)))
        saved, reason, stored = salvage.saved, salvage.reason, dict[str, Stamp]()
        if not self._membership.detached:
            reason = "the job has started again meanwhile: repeat the command"
        try:  # the tier itself shows the outcome, also to agents that did not lead
            stored = {m.training: m.stamp for m in await self._saver.find_stored((), _TIER_S)}
        except TierFailed as error:
            reason = str(error)
        wanted = {t.name: t.sealed for t in self._trainings if t.sealed is not None}
        for name in sorted(wanted.keys() | (stored.keys() if saved else set())) or [""]:
            stamp, known = wanted.get(name, Stamp(0, 0)), stored.get(name, Stamp(0, 0))
            if known >= stamp and known > Stamp(0, 0):
                await link.flush(self._build_final_answer(name, known, ""))
            else:
                gone = "the version was saved, but is no longer there" if saved else "the version has not been saved"
                await link.flush(self._build_final_answer(name, stamp, reason or gone))

    async def _flush_training(self, link: Link, training: Training) -> None:
        task = self._spawn(self._saver.flush(training))
        while not task.done():
            await asyncio.wait([task], timeout=_TELL_S)
            if not task.done():
                done_bytes = self._saver.count_written_bytes(training.name)
                await link.flush(Flushing(training.name, training.sealed or Stamp(0, 0), done_bytes))
        stamp, reason = task.result()
        await link.flush(self._build_final_answer(training.name, stamp, reason))

    def _build_final_answer(self, name: str, stamp: Stamp, reason: str) -> Flushing:
        where = f"{self._saver.directory}/{name}/{version.format_name(stamp)}"
        return Flushing(name, stamp, over=True, reason=reason, where="" if reason else where)
