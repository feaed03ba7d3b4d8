"""The last seal of each training: one file in the job's directory, for a successor of this agent.

A root that is killed after a seal may be the only agent that knows of the seal. Its successor must not abandon that
version, even if a copy has been damaged since. The file has one line per training. The line is written in place
before the decision is sent, without a sync: the file must outlive the process, not the node. A line counts only in
the recovery round that it names.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

import msgspec

from gemini_hpc.core import numbers
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import bounds

NAME = "seals"
_LINE_BYTES = 256
_MOST_BYTES = 64 * _LINE_BYTES


class Within(NamedTuple):
    """The place of a seal: the incarnation, its recovery round, and the epoch of that round."""

    restart: int
    round: int
    epoch: int


class _Line(msgspec.Struct, frozen=True, array_like=True):
    training: numbers.TrainingName
    restart: numbers.Restart
    round: numbers.Round
    epoch: numbers.Epoch
    sealed: Stamp


_decoder = bounds.Strict(msgspec.json.Decoder(_Line))


class SealNotes:
    """The file of seals, which survives its agent.

    If the file cannot be written, the seal of a killed root may be lost, like the state of its round.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, NAME)
        self._fd: int | None = None
        self._places: dict[str, int] = {}  # number of the line, by training

    def note(self, name: str, within: Within, sealed: Stamp) -> bool:
        """Write the training's newest seal. Return whether it is in the file."""
        line = _Line(name, *within, sealed)
        try:
            self._put(name, msgspec.json.encode(line).ljust(_LINE_BYTES - 1) + b"\n")
        except OSError:
            return False
        return True

    def forget(self, name: str) -> None:
        """Free this training's line for another training."""
        if self._fd is not None and (place := self._places.pop(name, None)) is not None:
            with suppress(OSError):
                os.pwrite(self._fd, b"\n".rjust(_LINE_BYTES), place * _LINE_BYTES)

    def read(self, within: Within) -> dict[str, Stamp]:
        """Return the seals, by training, that a predecessor has noted in this round."""
        found: dict[str, Stamp] = {}
        for line in self._read_lines():
            if line is not None and (line.restart, line.round, line.epoch) == within:
                found[line.training] = line.sealed
        return found

    def close_file(self) -> None:
        """Close the file: the job's directory has changed, and the new one contains a copy of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._places.clear()

    def remove(self) -> None:
        """Remove the file: no successor continues from here."""
        self.close_file()
        with suppress(OSError):
            os.unlink(self._path)

    def _read_lines(self) -> list[_Line | None]:
        lines: list[_Line | None] = []
        with suppress(OSError):
            for text in self._get().splitlines():
                try:
                    lines.append(_decoder.decode(text))
                except msgspec.MsgspecError:  # truncated, or changed by the job's owner
                    lines.append(None)
        return lines

    # ---- the disk --------------------------------------------------------------------------------------

    def _get(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, _MOST_BYTES, 0)
        finally:
            os.close(fd)

    def _put(self, name: str, line: bytes) -> None:
        if self._fd is None:
            notes = self._read_lines()
            self._places = {old.training: number for number, old in enumerate(notes) if old is not None}
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        place = self._places.get(name)
        if place is None:
            taken = set(self._places.values())
            place = self._places[name] = next(n for n in range(len(taken) + 1) if n not in taken)
        os.pwrite(self._fd, line, place * _LINE_BYTES)
