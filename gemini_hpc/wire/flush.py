"""Messages of `gemini-hpc flush`, which writes a job's versions in memory to its tier now."""

from __future__ import annotations

from gemini_hpc.core.numbers import Bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.message import Message


class FlushAsk(Message, frozen=True, tag="flush?"):
    """A request on a `flush` connection to write the newest sealed version of each training to the tier.

    The agent answers with a `Flushing` per training from time to time, until all trainings are `over`.
    """


class Flushing(Message, frozen=True, tag="flushing"):
    """The progress of one training's flush.

    Attributes:
        training: The training; "": the job as a whole.
        over: No more messages follow for this training.
        reason: Reason why the version is not on the tier; "": the version is there.
        root: Agent to ask instead of this one.
    """

    training: str = ""
    stamp: Stamp = Stamp(0, 0)
    bytes: Bytes = 0
    over: bool = False
    reason: str = ""
    root: str = ""
    where: str = ""
