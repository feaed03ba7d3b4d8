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
    if agent.scavenge.serves:
        await _left(agent, link)
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


async def _left(agent: Agent, link: Link) -> None:
    """Of a job that has lost a node and waits, for what others have sealed, too: an agent that has been started anew
    knows of nothing."""
    scavenge = agent.scavenge
    if not (scavenge.saved or scavenge.busy):
        scavenge.begin(asked=True)
    while scavenge.busy:
        await asyncio.sleep(_LOOK_S)
        for training in agent.sets:
            sealed = training.sealed or (0, 0)
            await link.flush(Flushing(training.name, sealed, agent.drains.progress(training.name)))
    saved, reason, there = scavenge.saved, scavenge.reason, dict[str, Stamp]()
    if not agent.detached:
        reason = "the job has come back meanwhile"
    try:  # the tier itself tells, also those who did not lead
        there = {m.set: Stamp(*m.stamp) for m in await agent.drains.stored((), _TIER_S)}
    except TierFailed as error:
        reason = str(error)
    wanted = {t.name: t.sealed for t in agent.sets if t.sealed is not None}
    for name in sorted(wanted.keys() | (there.keys() if saved else set())) or [""]:
        stamp, known = wanted.get(name, Stamp(0, 0)), there.get(name, Stamp(0, 0))
        if known >= stamp and known > Stamp(0, 0):
            await link.flush(_over(agent, name, known, ""))
        else:
            gone = "it was saved, and is not there any more" if saved else "it has not been saved"
            await link.flush(_over(agent, name, stamp, reason or gone))


async def _one(agent: Agent, link: Link, training: TrainingSet) -> None:
    task = agent.spawn(agent.drains.flush(training))
    while not task.done():
        await asyncio.wait([task], timeout=_TELL_S)
        if not task.done():
            done_bytes = agent.drains.progress(training.name)
            await link.flush(Flushing(training.name, training.sealed or (0, 0), done_bytes))
    stamp, reason = task.result()
    await link.flush(_over(agent, training.name, stamp, reason))


def _over(agent: Agent, name: str, stamp: Stamp, reason: str) -> Flushing:
    where = f"{version.job_directory(agent.drains.tier, agent.job)}/{name}/{version.name(stamp)}"
    return Flushing(name, stamp, over=True, reason=reason, where="" if reason else where)
