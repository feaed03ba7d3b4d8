"""What happens while the nodes that are left save a job's last version, and what is then to be done: the words
between the decisions (`salvaging`) and who carries them out (`salvage`).

run: of which try of `Salvaging` it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Begin:
    """Try it. last: memory is to be freed; asked: by hand, which puts off nothing that happens by itself."""

    last: bool = False
    asked: bool = False


@dataclass(frozen=True)
class Reset:
    """Another incarnation, or another round: what is here is needed for something else."""


@dataclass(frozen=True)
class Tick:
    """Some time has gone by."""


@dataclass(frozen=True)
class Heard:
    """A message of a peer; also what this agent has written for its own lead."""

    host: str
    message: Message


@dataclass(frozen=True)
class Reached:
    """What came of `Reach`."""

    run: int
    host: str
    there: bool


@dataclass(frozen=True)
class Settled:
    """What came of `Settle`."""

    run: int


@dataclass(frozen=True)
class Looked:
    """What came of `Look`: by set the newest version on the tier, or None, and why that is not known."""

    run: int
    stored: Mapping[str, Stamp] | None
    reason: str = ""


@dataclass(frozen=True)
class Published:
    """What came of `Publish`: why the version has not become whole, or ""."""

    run: int
    reason: str


@dataclass(frozen=True)
class Cleaned:
    """What came of `Clean`."""

    run: int


@dataclass(frozen=True)
class Broken:
    """What was to be done has failed by a fault of ours."""

    run: int


Event = Begin | Reset | Tick | Heard | Reached | Settled | Looked | Published | Cleaned | Broken

# ---- what is to be done --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """To a peer."""

    host: str
    message: Message


@dataclass(frozen=True)
class Reach:
    """See whether there is a way to this peer; `Reached`."""

    run: int
    host: str
    within_s: float


@dataclass(frozen=True)
class Settle:
    """Let what the root has begun get on, or end; `Settled`."""

    run: int
    stalled_s: float


@dataclass(frozen=True)
class Look:
    """See what the tier has; `Looked`."""

    run: int
    within_s: float


@dataclass(frozen=True)
class Write:
    """Write this node's part; `leader` is told of it."""

    order: peer.SalvageWrite
    leader: str


@dataclass(frozen=True)
class Publish:
    """All files of a set are there; `Published`."""

    run: int
    name: str
    gathering: SaveProgress


@dataclass(frozen=True)
class Clean:
    """Remove what has not become whole of a set, up to this version; `Cleaned`."""

    run: int
    name: str
    stamp: Stamp


@dataclass(frozen=True)
class Begun:
    """Tell that a version is being saved, since these hosts are gone."""

    stamp: Stamp
    gone: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """Tell why a version has not been saved."""

    name: str
    stamp: Stamp
    reason: str


@dataclass(frozen=True)
class Halt:
    """What was begun for this agent's own lead, and is still being done, is to end."""


@dataclass(frozen=True)
class Saved:
    """Nobody need wait for the last versions any more."""


Effect = Send | Reach | Settle | Look | Write | Publish | Clean | Begun | Failed | Halt | Saved
