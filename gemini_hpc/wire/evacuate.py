"""Messages of `gemini-hpc evacuate`, which moves a job off one of its nodes to a spare."""

from __future__ import annotations

from gemini_hpc.wire.message import Message

# Reason given by an agent whose node the job has left or not entered; the caller asks another agent.
NO_PART = "the job does not run on this node now"


class EvacuateAsk(Message, frozen=True, tag="evacuate?"):
    """A request that the job leave this host, sent on an `evacuate` connection to another node."""

    host: str


class Evacuated(Message, frozen=True, tag="evacuated"):
    """The answer: the job continues without the node.

    Attributes:
        reason: Reason for a failure; "": success.
    """

    reason: str = ""
