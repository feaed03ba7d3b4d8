"""The union of all messages on a link between two machines, with its decoder and encoder."""

from __future__ import annotations

import msgspec

from gemini_hpc.wire import controller, evacuate, flush, inspect_schema, peer
from gemini_hpc.wire.bounds import Strict

AnyMessage = (
    peer.Ping
    | peer.ProbeAsk
    | peer.ProbeAnswer
    | peer.Liveness
    | peer.AgentLeft
    | peer.Launch
    | peer.RankEnded
    | peer.FailedFirst
    | peer.Unhealthy
    | peer.Collect
    | peer.InventoryUp
    | peer.Wake
    | peer.PlanDown
    | peer.PlanAck
    | peer.TakenOver
    | peer.Go
    | peer.NeedRound
    | peer.RoundLost
    | peer.VoteUp
    | peer.DecisionDown
    | peer.StandingUp
    | peer.HungDown
    | peer.ClosedUp
    | peer.ClosedDown
    | peer.MoveUp
    | peer.HoldDown
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
    | peer.Outline
    | peer.OutlineDigest
    | peer.PullAsk
    | peer.PullHead
    | peer.PushAsk
    | peer.PushStripe
    | peer.PushAnswer
    | peer.PushHead
    | peer.PushTrial
    | peer.PushTried
    | peer.PushChunk
    | peer.PushDone
    | peer.PushAck
    | peer.PushAgain
    | peer.PushVerified
    | inspect_schema.InspectAsk
    | inspect_schema.InspectPart
    | controller.Registration
    | controller.Report
    | controller.EventsUp
    | controller.RedNode
    | controller.Release
    | controller.Notice
    | controller.Ending
    | controller.Draining
    | controller.Waits
    | controller.MayAct
    | controller.HoldersAsk
    | controller.Holders
    | inspect_schema.JobAsk
    | inspect_schema.JobAnswer
    | inspect_schema.JobsAsk
    | inspect_schema.JobsAnswer
    | evacuate.EvacuateAsk
    | evacuate.Evacuated
    | flush.FlushAsk
    | flush.Flushing
)

decoder: Strict[AnyMessage] = Strict(msgspec.msgpack.Decoder(AnyMessage))
encode = msgspec.msgpack.Encoder().encode
