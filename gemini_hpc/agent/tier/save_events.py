"""Events and effects of saves to the tier, between the rules (`save_rules`) and their executor (`saver`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer


@dataclass(frozen=True)
class SaveFacts:
    """The facts that an agent knows besides the events.

    Attributes:
        here: Restart and round, or None before the first incarnation.
        leads: Whether this agent is the root.
        parent: The parent in the tree, or None at the root.
        epoch: Epoch of the last plan.
        sealed: Newest sealed version and number of ranks, by training.
        missing: A node is missing.
        silent_s: Silence after which a node counts as missing, in seconds.
        salvaging: The surviving nodes save the last versions by themselves.
        tier: The job has a tier.
        interval_s: Interval between saves, in seconds. With an automatic interval, its value before the first
            save.
        before_end_s: How long before the job's time limit a version is saved, in seconds.
        flushes: Agents stay until the last versions are saved.
        is_rejected: Returns whether a version of a training has been rejected.
        any_rejected: Any version has been rejected.
        find_names: Returns the names that a version of a training is to have.
        count_written_bytes: Returns the bytes of a training that are written.
        attempt: Number that no other save has.
        unserved_per_day: Failures a day that memory cannot serve, if the interval is derived from them, else
            None.
    """

    here: tuple[int, int] | None
    leads: bool
    parent: str | None
    epoch: int
    sealed: Mapping[str, tuple[Stamp, int]]
    missing: bool
    silent_s: float
    salvaging: bool
    tier: bool
    interval_s: float
    before_end_s: float
    flushes: bool
    is_rejected: Callable[[str, Stamp], bool]
    any_rejected: bool
    find_names: Callable[[str, Stamp], Mapping[str, int]]
    count_written_bytes: Callable[[str], int]
    attempt: int
    unserved_per_day: float | None = None


# ---- events --------------------------------------------------------------------------------------------


class Sealed(msgspec.Struct, frozen=True):
    """A seal of a version by the root."""

    name: str
    stamp: Stamp


class Keep(msgspec.Struct, frozen=True):
    """A request to keep versions of a training permanently."""

    name: str


class Wanted(msgspec.Struct, frozen=True):
    """An order of the root to save a version, from the parent or of this root itself."""

    message: peer.SaveDown


class Heard(msgspec.Struct, frozen=True):
    """A report of a node on a version: its file, or the reason for a failure.

    The report is a child's, or this node's own.
    """

    message: peer.SaveUp


class Ask(msgspec.Struct, frozen=True):
    """A request for the newest version on the tier now. The result is `Answer`."""

    id: int
    name: str


class Leaving(msgspec.Struct, frozen=True):
    """A warning that a node may go soon: the newest version of each training is to be saved."""


class Detached(msgspec.Struct, frozen=True):
    """The end of the job here, without success. `dead` tells whether a node of the job is dead."""

    dead: bool


class Ended(msgspec.Struct, frozen=True):
    """A notice that no agent needs to wait for the last versions any more.

    It comes from the root, or after the training has succeeded.
    """


class Found(msgspec.Struct, frozen=True):
    """A notice that the last versions are on the tier, no matter which agent saved them."""


class EndsIn(msgspec.Struct, frozen=True):
    """The seconds until Slurm ends the job, or None without a time limit."""

    left_s: float | None


class Stored(msgspec.Struct, frozen=True):
    """The newest version of each training on the tier, and the time when it became whole (Unix time)."""

    there: Mapping[str, tuple[Stamp, float]]


class Rejected(msgspec.Struct, frozen=True):
    """A notice that versions have been rejected since the last event."""


class Freeze(msgspec.Struct, frozen=True):
    """The begin of a round: pending saves will not become whole."""


class Settle(msgspec.Struct, frozen=True):
    """A wait for the root's saves while they progress. Stalled saves are aborted. The result is `Settled`."""

    id: int
    stalled_s: float


class Unsettle(msgspec.Struct, frozen=True):
    """The end of such a wait by its caller."""

    id: int


class Tick(msgspec.Struct, frozen=True):
    """The passing of some time."""


class Cleaned(msgspec.Struct, frozen=True):
    """The result of `Clean`."""

    name: str
    number: int


class Published(msgspec.Struct, frozen=True):
    """The result of `Publish`: the reason why the version has not become whole, or ""."""

    name: str
    gathering: SaveProgress
    reason: str


class Named(msgspec.Struct, frozen=True):
    """The result of `Name`."""

    name: str
    stamp: Stamp
    flush: int
    reason: str


class Looked(msgspec.Struct, frozen=True):
    """The result of `Look`."""


Event = (
    Sealed
    | Keep
    | Wanted
    | Heard
    | Ask
    | Leaving
    | Detached
    | Ended
    | Found
    | EndsIn
    | Stored
    | Rejected
    | Freeze
    | Settle
    | Unsettle
    | Tick
    | Cleaned
    | Published
    | Named
    | Looked
)

# ---- effects -------------------------------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True):
    """An order to all agents to save a version. It arrives as `Wanted` here, and goes on to the agents below."""

    message: peer.SaveDown


class Write(msgspec.Struct, frozen=True):
    """An order to save this node's part. The result is `Heard`."""

    message: peer.SaveDown


class Down(msgspec.Struct, frozen=True):
    """A message to the agents below in the tree."""

    message: peer.SaveDown | peer.SaveOver


class Up(msgspec.Struct, frozen=True):
    """A message to the agent above in the tree."""

    host: str
    message: peer.SaveUp


class Clean(msgspec.Struct, frozen=True):
    """An order to remove older unfinished versions of a training. The result is `Cleaned`."""

    name: str
    number: int


class Publish(msgspec.Struct, frozen=True):
    """An order to make a version whole, whose files are all on the tier. The result is `Published`."""

    name: str
    gathering: SaveProgress


class Name(msgspec.Struct, frozen=True):
    """An order to give a version on the tier its names. The result is `Named`."""

    name: str
    stamp: Stamp
    flush: int


class Look(msgspec.Struct, frozen=True):
    """An order to read the tier's versions and to mark rejected ones there. The result is `Looked`."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to `Ask`: the version, and the reason why it is not on the tier, or ""."""

    id: int
    stamp: Stamp
    reason: str


class Settled(msgspec.Struct, frozen=True):
    """The end of a wait that `Settle` began."""

    id: int


class Failed(msgspec.Struct, frozen=True):
    """A notice why a version is not on the tier."""

    name: str
    stamp: Stamp
    reason: str
    host: str = ""


class NotSaved(msgspec.Struct, frozen=True):
    """A notice that a version that was to be saved at once has not been saved."""

    stamp: Stamp
    reason: str


Effect = Order | Write | Down | Up | Clean | Publish | Name | Look | Answer | Settled | Failed | NotSaved
