"""The state that a successor needs after an agent's death within an incarnation.

The state is one file in the job's directory, written before the messages that depend on it are sent. If the write
fails, the round goes on all the same and the agent reports the failure. The training then stays protected while its
agents live. An agent's death costs a new round, or that agent's copies.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from gemini_hpc.files import replace_file
from gemini_hpc.wire import local, peer

NAME = "state"


class State(msgspec.Struct, frozen=True):
    """The incarnation that the agent was in, and the progress of its rounds.

    A file of an earlier software version has no progress but a plan. The other fields then have their defaults.

    Attributes:
        plan: The plan that the agent took last.
        live: The agent knew that all agents have taken the plan.
        begun: The number of the last round that the agent began as coordinator.
        step: The launch of that round.
    """

    attach: local.Attach
    plan: peer.PlanDown | None = None
    live: bool = False
    begun: int = 0
    step: str = ""


class StateFile:
    """A state file, with the state that should be in it."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, NAME)
        self._wanted: State | None = None
        self.problem = ""  # reason why the file differs from the wanted state

    def read(self) -> State | None:
        """Return the predecessor's state, or None if there is no usable state."""
        try:
            found = msgspec.json.decode(self._get(), type=State)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        self._wanted = found
        return found

    @property
    def state(self) -> State | None:
        """Return the state last read, or last given to be written."""
        return self._wanted

    def write(self, state: State) -> bool:
        """Put the file in place in one step. Return whether this succeeded.

        If the write fails, a file of an earlier incarnation is removed: an agent that continued from it would have no
        peers. A file of this incarnation stays, because it leads to a new round.
        """
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

    def write_again(self) -> bool:
        """Repeat a failed write. Return whether the file is in place now."""
        return self._wanted is not None and self.write(self._wanted)

    def remove(self) -> None:
        """Remove the file: no agent should continue from here."""
        self._wanted, self.problem = None, ""
        with suppress(OSError):
            self._unlink()

    # ---- the disk --------------------------------------------------------------------------------------

    def _get(self) -> bytes:
        return Path(self._path).read_bytes()

    def _put(self, data: bytes) -> None:
        replace_file(self._path, data)

    def _unlink(self) -> None:
        os.unlink(self._path)
