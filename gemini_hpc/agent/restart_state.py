"""What a successor needs after an agent's death in mid-incarnation: one file in the job's directory.

It is written before the messages leave that depend on it. Where it cannot be written the round goes on all the same,
and says so: the training is protected as long as its agents live, and who dies then costs a new round, or its part.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from gemini_hpc.wire import local, peer

NAME = "state"


class State(msgspec.Struct, frozen=True):
    """Which incarnation the agent was in, and how far its rounds had come.

    plan: that it took last; live: whether it heard that everybody has taken it. begun, step: the number of the last
    round that it began as coordinator, and the launch that this is for. A file of an earlier version has a plan only:
    it counts as one of which nothing else is known.
    """

    attach: local.Attach
    plan: peer.PlanDown | None = None
    live: bool = False
    begun: int = 0
    step: str = ""


class StateFile:
    """The file, and whether what is to be in it is there."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, NAME)
        self._wanted: State | None = None
        self.problem = ""  # why the file is not as it should be

    def read(self) -> State | None:
        """What the predecessor has left; None: nothing that can be used."""
        try:
            found = msgspec.json.decode(self._get(), type=State)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        self._wanted = found
        return found

    @property
    def state(self) -> State | None:
        """What was read, or was to be written, last."""
        return self._wanted

    def write(self, state: State) -> bool:
        """Put the file in place in one step; whether it is there. If not, a file of an earlier incarnation goes: who
        would go on from it is nobody's peer. One of this incarnation stays, for it leads to a new round."""
        before, self._wanted = self._wanted, state
        try:
            self._put(msgspec.json.encode(state))
            self.problem = ""
        except OSError as exc:
            self.problem = exc.strerror or str(exc)
            if before is None or before.attach != state.attach:
                with suppress(OSError):
                    self._unlink()
        return not self.problem

    def again(self) -> bool:
        """Write once more what could not be written; whether it is there now."""
        return self._wanted is not None and self.write(self._wanted)

    def remove(self) -> None:
        """Nobody is to go on from here."""
        self._wanted, self.problem = None, ""
        with suppress(OSError):
            self._unlink()

    # ---- the disk --------------------------------------------------------------------------------------

    def _get(self) -> bytes:
        return Path(self._path).read_bytes()

    def _put(self, data: bytes) -> None:
        Path(f"{self._path}.new").write_bytes(data)
        os.replace(f"{self._path}.new", self._path)

    def _unlink(self) -> None:
        os.unlink(self._path)
