"""The agent's side of `gemini-hpc flush`: who asked is told how far it is until it is done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gemini_hpc.tier import version
from gemini_hpc.wire.flush import FlushAsk, Flushing
from gemini_hpc.wire.link import Link

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent
    from gemini_hpc.agent.trainingset import TrainingSet

_ASK_S = 5.0
_TELL_S = 1.0


async def answer(agent: Agent, link: Link) -> None:
    """Serve one caller, who has been admitted."""
    async with asyncio.timeout(_ASK_S):
        if not isinstance(await link.receive(), FlushAsk):
            return
    why, root = _refusal(agent)
    trainings = [t for t in agent.sets if t.sealed is not None]
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


async def _one(agent: Agent, link: Link, training: TrainingSet) -> None:
    task = agent.spawn(agent.drains.flush(training))
    while not task.done():
        await asyncio.wait([task], timeout=_TELL_S)
        if not task.done():
            done_bytes = agent.drains.progress(training.name)
            await link.flush(Flushing(training.name, training.sealed or (0, 0), done_bytes))
    stamp, reason = task.result()
    where = f"{version.job_directory(agent.drains.tier, agent.job)}/{training.name}/{version.name(stamp)}"
    await link.flush(Flushing(training.name, stamp, over=True, reason=reason, where="" if reason else where))
