"""What happens while the nodes that are left save a job's last version, and what is then to be done: the words
between the decisions (`salvaging`) and who carries them out (`salvage`).

run: of which try of `Salvaging` it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message


@dataclass(frozen=True)
class Facts:
    """What an agent knows besides. hosts: of the incarnation, dead: those of them that are, heard: when something
    came of them last; noderanks: of the last plan; own: what is sealed and held here, unwanted: all that was sealed
    here has been rejected; rejected: whether a version of a set has; detached: the job does not run here; attempt: a
    number of which no other save bears the same."""

    hosts: tuple[str, ...]
    dead: Collection[str]
    heard: Mapping[str, float]
    noderanks: Mapping[str, int]
    own: peer.SalvageHave
    unwanted: bool
    rejected: Callable[[str, Stamp], bool]
    detached: bool
    attempt: int


# ---- what happens --------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """Try it. last: memory is to be freed; asked: by hand, which puts off nothing that happens by itself."""

    last: bool = False
    asked: bool = False


class Reset(msgspec.Struct, frozen=True):
    """Another incarnation, or another round: what is here is needed for something else."""


class Tick(msgspec.Struct, frozen=True):
    """Some time has gone by."""


class Heard(msgspec.Struct, frozen=True):
    """A message of a peer; also what this agent has written for its own lead."""

    host: str
    message: Message


class Reached(msgspec.Struct, frozen=True):
    """What came of `Reach`."""

    run: int
    host: str
    there: bool


class Settled(msgspec.Struct, frozen=True):
    """What came of `Settle`."""

    run: int


class Looked(msgspec.Struct, frozen=True):
    """What came of `Look`: by set the newest version on the tier, or None, and why that is not known."""

    run: int
    stored: Mapping[str, Stamp] | None
    reason: str = ""


class Published(msgspec.Struct, frozen=True):
    """What came of `Publish`: why the version has not become whole, or ""."""

    run: int
    reason: str


class Cleaned(msgspec.Struct, frozen=True):
    """What came of `Clean`."""

    run: int


class Broken(msgspec.Struct, frozen=True):
    """What was to be done has failed by a fault of ours."""

    run: int


Event = Begin | Reset | Tick | Heard | Reached | Settled | Looked | Published | Cleaned | Broken

# ---- what is to be done --------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """To a peer."""

    host: str
    message: Message


class Reach(msgspec.Struct, frozen=True):
    """See whether there is a way to this peer; `Reached`."""

    run: int
    host: str
    within_s: float


class Settle(msgspec.Struct, frozen=True):
    """Let what the root has begun get on, or end; `Settled`."""

    run: int
    stalled_s: float


class Look(msgspec.Struct, frozen=True):
    """See what the tier has; `Looked`."""

    run: int
    within_s: float


class Write(msgspec.Struct, frozen=True):
    """Write this node's part; `leader` is told of it."""

    order: peer.SalvageWrite
    leader: str


class Publish(msgspec.Struct, frozen=True):
    """All files of a set are there; `Published`."""

    run: int
    name: str
    gathering: SaveProgress


class Clean(msgspec.Struct, frozen=True):
    """Remove what has not become whole of a set, up to this version; `Cleaned`."""

    run: int
    name: str
    stamp: Stamp


class Begun(msgspec.Struct, frozen=True):
    """Tell that a version is being saved, since these hosts are gone."""

    stamp: Stamp
    gone: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True):
    """Tell why a version has not been saved."""

    name: str
    stamp: Stamp
    reason: str


class Halt(msgspec.Struct, frozen=True):
    """What was begun for this agent's own lead, and is still being done, is to end."""


class Saved(msgspec.Struct, frozen=True):
    """Nobody need wait for the last versions any more."""


Effect = Send | Reach | Settle | Look | Write | Publish | Clean | Begun | Failed | Halt | Saved
