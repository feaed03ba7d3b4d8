"""Events and effects of the recovery rounds, exchanged between their rules (`recovery_round`) and the agent.

Effects are carried out in order. A message therefore leaves only after the state that it promises is on disk. Other
rules of the agent share `Heard`, `Send` and `Log`.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Tier

# ---- events --------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """A request to the coordinator to start the next round, for this launch."""

    step: str


class Resume(msgspec.Struct, frozen=True):
    """The state on disk of an agent that has died, for its successor.

    Attributes:
        plan: The plan that the predecessor took last.
        live: The predecessor had received *go*.
        begun: The last round that the predecessor began as coordinator.
        step: The launch of that round.
    """

    plan: peer.PlanDown | None
    live: bool
    begun: int
    step: str


class Heard(msgspec.Struct, frozen=True):
    """A message of a peer, or this agent's own report: its inventory as the result of `TakeInventory`."""

    host: str
    message: Message


class Linked(msgspec.Struct, frozen=True):
    """A new link to a peer."""

    host: str


class Tick(msgspec.Struct, frozen=True):
    """The passing of some time. Ticks come a few times a second.

    Attributes:
        now: The time in seconds, from a clock that never goes back.
        linked: Hosts with a link.
    """

    now: float
    linked: Set[str]


class Decided(msgspec.Struct, frozen=True):
    """The result of `Decide`: the plan of a round."""

    plan: peer.PlanDown


# `NeedRound` as an event is the request of this agent's own ranks.
Event = Begin | Resume | Heard | Linked | Tick | Decided | peer.NeedRound

# ---- effects -------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """A message to send to a peer."""

    host: str
    message: Message


class Log(msgspec.Struct, frozen=True):
    """An event to log."""

    name: str
    detail: str
    version: int = 0


class Change(msgspec.Struct, frozen=True):
    """A notice of a new stage, or of a new launch of the live round."""


class Freeze(msgspec.Struct, frozen=True):
    """An order to stop sealing, drop the trainers, and void half-filled slots."""


class TakeInventory(msgspec.Struct, frozen=True):
    """An order to verify the copies on this node. The result is `Heard` with an inventory of this round."""

    round: int


class StoreBegin(msgspec.Struct, frozen=True):
    """An order to store on disk that the coordinator has used this round number."""

    round: int
    step: str


class StorePlan(msgspec.Struct, frozen=True):
    """An order to store on disk that this agent has taken the plan, and whether all agents have."""

    plan: peer.PlanDown
    live: bool


class Decide(msgspec.Struct, frozen=True):
    """An order to make a plan of these inventories. The result is `Decided`.

    Attributes:
        round: Number of the round.
        step: Launch that the round serves.
        records: Inventories of all agents.
        search: Search outside this incarnation's nodes if they cannot serve. Otherwise there is then no result.
    """

    round: int
    step: str
    records: tuple[peer.InventoryRecord, ...]
    search: bool


class ApplyPlan(msgspec.Struct, frozen=True):
    """An order to void all but the chosen versions, take map and epoch, and pull."""

    plan: peer.PlanDown


class AdmitRanks(msgspec.Struct, frozen=True):
    """An order to write the map and let trainers come."""

    plan: peer.PlanDown


class ChooseTier(msgspec.Struct, frozen=True):
    """An order to take the tier that a program has chosen."""

    tier: Tier


Effect = (
    Send
    | Log
    | Change
    | Freeze
    | TakeInventory
    | StoreBegin
    | StorePlan
    | Decide
    | ApplyPlan
    | AdmitRanks
    | ChooseTier
)
