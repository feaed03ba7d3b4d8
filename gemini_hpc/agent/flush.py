"""The agent's side of `gemini-hpc flush`: who asked is told how far it is until it is done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import version
from gemini_hpc.wire.flush import FlushAsk, Flushing
from gemini_hpc.wire.link import Link

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent
    from gemini_hpc.agent.trainingset import TrainingSet

_ASK_S = 5.0
_TELL_S = 1.0
_LOOK_S = 0.2
_TIER_S = 10.0  # within which the tier tells what is there


async def answer(agent: Agent, link: Link) -> None:
    """Serve one caller, who has been admitted."""
    async with asyncio.timeout(_ASK_S):
        if not isinstance(await link.receive(), FlushAsk):
            return
    trainings = [t for t in agent.sets if t.sealed is not None]
    if trainings and agent.scavenge.serves:
        await _left(agent, link, trainings)
        return
    why, root = _refusal(agent)
    if not (why or root) and not trainings:
        why = "nothing has been sealed yet"
    if why or root:
        await link.flush(Flushing(over=True, reason=why, root=root))
        return
    await asyncio.gather(*(_one(agent, link, training) for training in trainings))


def _refusal(agent: Agent) -> tuple[str, str]:
    """Why nothing can be done, and who else is to be asked; both empty where it can be done here."""
    rounds = agent.rounds
    if rounds is None:
        return "this node has no part in a running incarnation of the job", ""
    if not agent.drains.tier:
        return "the job has no tier; it is given with --gemini-tier=DIR", ""
    return "", "" if rounds.parent is None else agent.hosts[0]


async def _left(agent: Agent, link: Link, trainings: list[TrainingSet]) -> None:
    """Of a job that has lost a node and waits: whoever leads the others tells how far it is, and how it went."""
    scavenge = agent.scavenge
    if not (scavenge.saved or scavenge.busy):
        scavenge.begin()
    while scavenge.busy and scavenge.leader in ("", agent.node):
        await asyncio.sleep(_LOOK_S)
        for training in trainings:
            sealed = training.sealed or (0, 0)
            await link.flush(Flushing(training.name, sealed, agent.drains.progress(training.name)))
    if not scavenge.saved and scavenge.leader not in ("", agent.node):
        await link.flush(Flushing(over=True, root=scavenge.leader))
        return
    reason = "" if agent.detached else "the job has come back meanwhile"
    try:  # the tier itself tells, also who did not lead
        await agent.drains.stored((), _TIER_S)
    except TierFailed as error:
        reason = str(error)
    for training in trainings:
        stamp, why = training.sealed or Stamp(0, 0), ""
        known = agent.drains.saved.get(training.name)
        if known is not None and known[0] >= stamp:
            stamp = known[0]
        else:
            why = reason or scavenge.reasons.get(training.name) or "it has not been saved"
        await link.flush(_over(agent, training, stamp, why))


async def _one(agent: Agent, link: Link, training: TrainingSet) -> None:
    task = agent.spawn(agent.drains.flush(training))
    while not task.done():
        await asyncio.wait([task], timeout=_TELL_S)
        if not task.done():
            done_bytes = agent.drains.progress(training.name)
            await link.flush(Flushing(training.name, training.sealed or (0, 0), done_bytes))
    stamp, reason = task.result()
    await link.flush(_over(agent, training, stamp, reason))


def _over(agent: Agent, training: TrainingSet, stamp: Stamp, reason: str) -> Flushing:
    where = f"{version.job_directory(agent.drains.tier, agent.job)}/{training.name}/{version.name(stamp)}"
    return Flushing(training.name, stamp, over=True, reason=reason, where="" if reason else where)
