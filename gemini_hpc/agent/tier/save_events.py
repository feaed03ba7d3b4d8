"""What happens on the way of sealed versions to the tier, and what is then to be done: the words between the
decisions (`save_rules`) and who carries them out (`saver`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    to have; through: bytes of a set that are written; attempt: a number of which no other save bears the same.
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


# ---- what happens --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sealed:
    """The root has sealed a version."""

    name: str
    stamp: Stamp


@dataclass(frozen=True)
class Keep:
    """Versions of a set are wanted for good."""

    name: str


@dataclass(frozen=True)
class Wanted:
    """The root wants a version saved: from the parent, or the root's own."""

    message: peer.SaveDown


@dataclass(frozen=True)
class Heard:
    """What a node has written of one, or why it has not: a child's, or this node's own."""

    message: peer.SaveUp


@dataclass(frozen=True)
class Ask:
    """Somebody wants the newest version on the tier now; `Answer`."""

    id: int
    name: str


@dataclass(frozen=True)
class Leaving:
    """A node may be gone soon: the newest version of each set is to be saved."""


@dataclass(frozen=True)
class Detached:
    """The job has ended here, without success. dead: a node of it is."""

    dead: bool


@dataclass(frozen=True)
class Ended:
    """Nobody need wait for the last versions any more: the root's word, or the training has succeeded."""


@dataclass(frozen=True)
class Found:
    """The last versions are on the tier, by whoever saved them."""


@dataclass(frozen=True)
class EndsIn:
    """Slurm ends the job in so many seconds; None: it sets no time."""

    left_s: float | None


@dataclass(frozen=True)
class Stored:
    """The newest version of each of these sets on the tier, and when it was made whole (Unix time)."""

    there: Mapping[str, tuple[Stamp, float]]


@dataclass(frozen=True)
class Rejected:
    """Versions have been, since the last event."""


@dataclass(frozen=True)
class Freeze:
    """A round begins: what is on its way will not become whole."""


@dataclass(frozen=True)
class Settle:
    """What the root has begun is waited for, as long as it gets on; then it is given up; `Settled`."""

    id: int
    stalled_s: float


@dataclass(frozen=True)
class Unsettle:
    """It is not waited for any more."""

    id: int


@dataclass(frozen=True)
class Tick:
    """Some time has gone by."""


@dataclass(frozen=True)
class Cleaned:
    """What came of `Clean`."""

    name: str
    number: int


@dataclass(frozen=True)
class Published:
    """What came of `Publish`: why the version has not become whole, or ""."""

    name: str
    gathering: SaveProgress
    reason: str


@dataclass(frozen=True)
class Named:
    """What came of `Name`."""

    name: str
    stamp: Stamp
    flush: int
    reason: str


@dataclass(frozen=True)
class Looked:
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


@dataclass(frozen=True)
class Order:
    """Have all agents save a version: `Wanted` here, which says it to those below."""

    message: peer.SaveDown


@dataclass(frozen=True)
class Write:
    """Save this node's part; `Heard` tells of it."""

    message: peer.SaveDown


@dataclass(frozen=True)
class Down:
    """To the agents below in the tree."""

    message: peer.SaveDown | peer.SaveOver


@dataclass(frozen=True)
class Up:
    """To the agent above."""

    host: str
    message: peer.SaveUp


@dataclass(frozen=True)
class Clean:
    """Remove what was begun of a set before, and has not become whole; `Cleaned`."""

    name: str
    number: int


@dataclass(frozen=True)
class Publish:
    """All files of a set are there; `Published`."""

    name: str
    gathering: SaveProgress


@dataclass(frozen=True)
class Name:
    """A version of the tier gets the names that it is to have; `Named`."""

    name: str
    stamp: Stamp
    flush: int


@dataclass(frozen=True)
class Look:
    """See what the tier has, and mark there what is rejected; `Looked`."""


@dataclass(frozen=True)
class Answer:
    """Who has asked hears which version it is, and why it is not on the tier, or ""."""

    id: int
    stamp: Stamp
    reason: str


@dataclass(frozen=True)
class Settled:
    """Who waits for that may go on."""

    id: int


@dataclass(frozen=True)
class Failed:
    """Tell why a version is not on the tier."""

    name: str
    stamp: Stamp
    reason: str
    host: str = ""


@dataclass(frozen=True)
class NotSaved:
    """Tell that a version which was to be saved at once has not been."""

    stamp: Stamp
    reason: str


Effect = Order | Write | Down | Up | Clean | Publish | Name | Look | Answer | Settled | Failed | NotSaved
Effects = Sequence[Effect]
