"""What happens on the way of sealed versions to the tier, and what is then to be done: the words between the
decisions (`save_rules`) and who carries them out (`saver`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer


@dataclass(frozen=True)
class Facts:
    """What an agent knows besides.

    here: restart and round, None before the first incarnation; parent: in the tree; epoch: of the last plan; sealed:
    by set the newest version and the ranks of the training; missing: a node is, silent_s: after which silence;
    salvaging: whether the nodes that are left save the last versions by themselves; tier: there is one, interval_s:
    from save to save, before_end_s: how long before the job's time limit, flushes: whether agents stay for the last
    versions; rejected: whether a version of a set has been, any_rejected: one has; names: that a version of a set is
    to have; through: bytes of a set that are written; attempt: a number of which no other save bears the same;
    unserved_per_day: failures that memory cannot serve, where the interval follows from them: interval_s is then that
    before the first save.
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
    rejected: Callable[[str, Stamp], bool]
    any_rejected: bool
    names: Callable[[str, Stamp], Mapping[str, int]]
    through: Callable[[str], int]
    attempt: int
    unserved_per_day: float | None = None


# ---- what happens --------------------------------------------------------------------------------------


class Sealed(msgspec.Struct, frozen=True):
    """The root has sealed a version."""

    name: str
    stamp: Stamp


class Keep(msgspec.Struct, frozen=True):
    """Versions of a set are wanted for good."""

    name: str


class Wanted(msgspec.Struct, frozen=True):
    """The root wants a version saved: from the parent, or the root's own."""

    message: peer.SaveDown


class Heard(msgspec.Struct, frozen=True):
    """What a node has written of one, or why it has not: a child's, or this node's own."""

    message: peer.SaveUp


class Ask(msgspec.Struct, frozen=True):
    """Somebody wants the newest version on the tier now; `Answer`."""

    id: int
    name: str


class Leaving(msgspec.Struct, frozen=True):
    """A node may be gone soon: the newest version of each set is to be saved."""


class Detached(msgspec.Struct, frozen=True):
    """The job has ended here, without success. dead: a node of it is."""

    dead: bool


class Ended(msgspec.Struct, frozen=True):
    """Nobody need wait for the last versions any more: the root's word, or the training has succeeded."""


class Found(msgspec.Struct, frozen=True):
    """The last versions are on the tier, by whoever saved them."""


class EndsIn(msgspec.Struct, frozen=True):
    """Slurm ends the job in so many seconds; None: it sets no time."""

    left_s: float | None


class Stored(msgspec.Struct, frozen=True):
    """The newest version of each of these sets on the tier, and when it was made whole (Unix time)."""

    there: Mapping[str, tuple[Stamp, float]]


class Rejected(msgspec.Struct, frozen=True):
    """Versions have been, since the last event."""


class Freeze(msgspec.Struct, frozen=True):
    """A round begins: what is on its way will not become whole."""


class Settle(msgspec.Struct, frozen=True):
    """What the root has begun is waited for, as long as it gets on; then it is given up; `Settled`."""

    id: int
    stalled_s: float


class Unsettle(msgspec.Struct, frozen=True):
    """It is not waited for any more."""

    id: int


class Tick(msgspec.Struct, frozen=True):
    """Some time has gone by."""


class Cleaned(msgspec.Struct, frozen=True):
    """What came of `Clean`."""

    name: str
    number: int


class Published(msgspec.Struct, frozen=True):
    """What came of `Publish`: why the version has not become whole, or ""."""

    name: str
    gathering: SaveProgress
    reason: str


class Named(msgspec.Struct, frozen=True):
    """What came of `Name`."""

    name: str
    stamp: Stamp
    flush: int
    reason: str


class Looked(msgspec.Struct, frozen=True):
    """What came of `Look`."""


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

# ---- what is to be done --------------------------------------------------------------------------------


class Order(msgspec.Struct, frozen=True):
    """Have all agents save a version: `Wanted` here, which says it to those below."""

    message: peer.SaveDown


class Write(msgspec.Struct, frozen=True):
    """Save this node's part; `Heard` tells of it."""

    message: peer.SaveDown


class Down(msgspec.Struct, frozen=True):
    """To the agents below in the tree."""

    message: peer.SaveDown | peer.SaveOver


class Up(msgspec.Struct, frozen=True):
    """To the agent above."""

    host: str
    message: peer.SaveUp


class Clean(msgspec.Struct, frozen=True):
    """Remove what was begun of a set before, and has not become whole; `Cleaned`."""

    name: str
    number: int


class Publish(msgspec.Struct, frozen=True):
    """All files of a set are there; `Published`."""

    name: str
    gathering: SaveProgress


class Name(msgspec.Struct, frozen=True):
    """A version of the tier gets the names that it is to have; `Named`."""

    name: str
    stamp: Stamp
    flush: int


class Look(msgspec.Struct, frozen=True):
    """See what the tier has, and mark there what is rejected; `Looked`."""


class Answer(msgspec.Struct, frozen=True):
    """Who has asked hears which version it is, and why it is not on the tier, or ""."""

    id: int
    stamp: Stamp
    reason: str


class Settled(msgspec.Struct, frozen=True):
    """Who waits for that may go on."""

    id: int


class Failed(msgspec.Struct, frozen=True):
    """Tell why a version is not on the tier."""

    name: str
    stamp: Stamp
    reason: str
    host: str = ""


class NotSaved(msgspec.Struct, frozen=True):
    """Tell that a version which was to be saved at once has not been."""

    stamp: Stamp
    reason: str


Effect = Order | Write | Down | Up | Clean | Publish | Name | Look | Answer | Settled | Failed | NotSaved
Effects = Sequence[Effect]
