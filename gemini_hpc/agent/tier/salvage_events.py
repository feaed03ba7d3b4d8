"""Events and effects of a salvage, exchanged between the rules (`salvage_rules`) and their executor (`salvage`).

The field `run` names the try of `SalvageRules` to which an event or effect belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from gemini_hpc.agent.peers.round_events import Heard, Log, Send
from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer


@dataclass(frozen=True)
class SalvageFacts:
    """The facts that an agent knows besides the events.

    Attributes:
        hosts: Hosts of the incarnation.
        dead: Dead hosts among them.
        heard: Time of the last message of each host, in seconds.
        noderanks: Node ranks of the last plan.
        own: Seals and copies of this node.
        unwanted: All versions sealed here have been rejected.
        is_rejected: Returns whether a version of a training has been rejected.
        detached: The job does not run here.
        attempt: Number that no other save has.
    """

    hosts: tuple[str, ...]
    dead: Collection[str]
    heard: Mapping[str, float]
    noderanks: Mapping[str, int]
    own: peer.SalvageHave
    unwanted: bool
    is_rejected: Callable[[str, Stamp], bool]
    detached: bool
    attempt: int


# ---- events --------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """A request for a try.

    Attributes:
        last: Memory is to be freed.
        asked: The try is requested by hand. It resets the gap between automatic tries instead of doubling it.
    """

    last: bool = False
    asked: bool = False


class Reset(msgspec.Struct, frozen=True):
    """A new incarnation or round, which needs the memory for another purpose."""


class Tick(msgspec.Struct, frozen=True):
    """The passing of some time."""


class Reached(msgspec.Struct, frozen=True):
    """The result of `Reach`."""

    run: int
    host: str
    there: bool


class Settled(msgspec.Struct, frozen=True):
    """The result of `Settle`."""

    run: int


class Looked(msgspec.Struct, frozen=True):
    """The result of `Look`.

    Attributes:
        run: Number of the try.
        stored: Newest version on the tier, by training, or None if unknown.
        reason: Why the tier's content is unknown.
    """

    run: int
    stored: Mapping[str, Stamp] | None
    reason: str = ""


class Published(msgspec.Struct, frozen=True):
    """The result of `Publish`: the reason why the version has not become whole, or ""."""

    run: int
    reason: str


class Cleaned(msgspec.Struct, frozen=True):
    """The result of `Clean`."""

    run: int


class Broken(msgspec.Struct, frozen=True):
    """An effect that has failed through an internal error."""

    run: int


Outcome = Reached | Settled | Looked | Published | Cleaned | Broken  # of an effect of one try
Event = Begin | Reset | Tick | Heard | Outcome

# ---- effects -------------------------------------------------------------------------------------------


class Reach(msgspec.Struct, frozen=True):
    """A check whether a peer is reachable. The result is `Reached`."""

    run: int
    host: str
    within_s: float


class Settle(msgspec.Struct, frozen=True):
    """A wait for the root's saves to progress or end. The result is `Settled`."""

    run: int
    stalled_s: float


class Look(msgspec.Struct, frozen=True):
    """A reading of the tier's versions. The result is `Looked`."""

    run: int
    within_s: float


class Write(msgspec.Struct, frozen=True):
    """An order to write this node's part and to report to `leader`."""

    order: peer.SalvageWrite
    leader: str


class Publish(msgspec.Struct, frozen=True):
    """An order to make a version whole, whose files are all on the tier. The result is `Published`."""

    run: int
    name: str
    gathering: SaveProgress


class Clean(msgspec.Struct, frozen=True):
    """An order to remove unfinished versions of a training, up to this one. The result is `Cleaned`."""

    run: int
    name: str
    stamp: Stamp


class Failed(msgspec.Struct, frozen=True):
    """A notice why a version has not been saved."""

    name: str
    stamp: Stamp
    reason: str


class Halt(msgspec.Struct, frozen=True):
    """An order to end all effects in progress for this agent's own lead."""


class Saved(msgspec.Struct, frozen=True):
    """A notice that no agent needs to wait for the last versions any more."""


Effect = Send | Reach | Settle | Look | Write | Publish | Clean | Log | Failed | Halt | Saved
