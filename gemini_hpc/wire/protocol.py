"""All messages that a link between two machines carries, and the version of the protocol that each came with."""

from __future__ import annotations

import msgspec

from gemini_hpc.wire import controller, flush, inspect_schema, peer
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.message import Message

AnyMessage = (
    peer.Ping
    | peer.ProbeAsk
    | peer.ProbeAnswer
    | peer.Liveness
    | peer.Left
    | peer.Collect
    | peer.InventoryUp
    | peer.Wake
    | peer.PlanDown
    | peer.PlanAck
    | peer.Go
    | peer.NeedRound
    | peer.RoundLost
    | peer.VoteUp
    | peer.DecisionDown
    | peer.SaveDown
    | peer.SaveUp
    | peer.SaveOver
    | peer.KeepWish
    | peer.KeepDone
    | peer.SalvageAsk
    | peer.SalvageHave
    | peer.SalvageWrite
    | peer.SalvageWrote
    | peer.SalvageOver
    | peer.PullAsk
    | peer.PullHead
    | peer.PushAsk
    | peer.PushAnswer
    | peer.PushHead
    | peer.PushChunk
    | peer.PushDone
    | peer.PushAck
    | inspect_schema.InspectAsk
    | inspect_schema.InspectPart
    | controller.Registration
    | controller.Report
    | controller.EventsUp
    | controller.Release
    | controller.Notice
    | controller.Ending
    | controller.Draining
    | controller.Waits
    | controller.HoldersAsk
    | controller.Holders
    | inspect_schema.JobAsk
    | inspect_schema.JobAnswer
    | inspect_schema.JobsAsk
    | inspect_schema.JobsAnswer
    | flush.FlushAsk
    | flush.Flushing
)

decoder: Strict[AnyMessage] = Strict(msgspec.msgpack.Decoder(AnyMessage))
encode = msgspec.msgpack.Encoder().encode

# The version with which a message came; all others are of version 1. A field that is added to a message has a default
# and needs no entry: older ends skip it.
_PUSHES = (peer.PushAsk, peer.PushAnswer, peer.PushHead, peer.PushChunk, peer.PushDone, peer.PushAck)
_DRAINS = (peer.SaveDown, peer.SaveUp, peer.SaveOver, flush.FlushAsk, flush.Flushing)
_KEEPS = (peer.KeepWish, peer.KeepDone)
_SCAVENGES = (peer.SalvageAsk, peer.SalvageHave, peer.SalvageWrite, peer.SalvageWrote, peer.SalvageOver)
SINCE: dict[type[Message], int] = {
    peer.Wake: 2,
    peer.Left: 2,
    controller.Notice: 2,
    controller.Ending: 2,
    controller.Draining: 2,
    controller.Waits: 2,
    inspect_schema.JobsAsk: 2,
    inspect_schema.JobsAnswer: 2,
    **dict.fromkeys((*_PUSHES, *_DRAINS, *_KEEPS, *_SCAVENGES), 2),
}


def known(message: Message, proto: int) -> bool:
    """Whether an end that speaks this protocol knows such a message; to any other it would be the end of the link."""
    return SINCE.get(type(message), 1) <= proto
