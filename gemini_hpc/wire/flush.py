"""Messages of `gemini-hpc flush`: what a job has in memory goes to its tier now."""

from __future__ import annotations

from gemini_hpc.core.numbers import Bytes
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire.message import Message


class FlushAsk(Message, frozen=True, tag="flush?"):
    """On a `flush` connection: bring the newest sealed version of each set to the tier. Answered by a
    `Flushing` for each now and then, until all of them are `over`."""


class Flushing(Message, frozen=True, tag="flushing"):
    """How far a set is. root: another agent is to be asked, this one; over: nothing more comes of this set;
    reason: why it is not on the tier, "" where it is; set "": of the job as a whole."""

    set: str = ""
    stamp: Stamp = Stamp(0, 0)
    bytes: Bytes = 0
    over: bool = False
    reason: str = ""
    root: str = ""
    where: str = ""
