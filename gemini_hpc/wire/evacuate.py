"""Messages of `gemini-hpc evacuate`: a job leaves one of its nodes, with a spare in its place."""

from __future__ import annotations

from gemini_hpc.wire.message import Message

# The reason of an agent whose node the job has left, or has not entered: another one is to be asked.
NO_PART = "this node has no part in a running incarnation of the job"


class EvacuateAsk(Message, frozen=True, tag="evacuate?"):
    """On an `evacuate` connection to an agent of another node of the job: leave this one."""

    host: str


class Evacuated(Message, frozen=True, tag="evacuated"):
    """The job goes on without the node; reason: why not, "" where it does."""

    reason: str = ""
