"""What a successor needs after an agent's death in mid-incarnation: one file in the job's directory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from gemini_hpc.wire import local, peer

NAME = "state"


class State(msgspec.Struct, frozen=True):
    """Which incarnation the agent was in, and the plan of its last round."""

    attach: local.Attach
    plan: peer.PlanDown


def write(directory: str, state: State) -> None:
    """Put the file in place in one step; where that fails, a successor waits for the next round."""
    temporary = os.path.join(directory, f"{NAME}.new")
    with suppress(OSError):
        Path(temporary).write_bytes(msgspec.json.encode(state))
        os.replace(temporary, os.path.join(directory, NAME))


def read(directory: str) -> State | None:
    """What the predecessor has left; None: nothing that can be used."""
    try:
        return msgspec.json.decode(Path(directory, NAME).read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None


def remove(directory: str) -> None:
    """Nobody is to go on from here."""
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, NAME))
