"""What the ranks of a job have asked of its agents for good: one file in the job's directory.

It outlives the agent and the incarnation: versions that are to be kept under a name until that has been done, and
versions that are not to be loaded any more; also which trainings they have closed. Where it cannot be written an
agent's death forgets it, and others know.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from gemini_hpc.core.numbers import SetName, Version
from gemini_hpc.core.sequence import Closed, Closing
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import Rejection

NAME = "pledges"


class Wish(msgspec.Struct, frozen=True, order=True):
    """A version of a set that is to be kept under this name, or the first one after it that can be."""

    set: SetName
    name: SetName
    version: Version


class Pledged(msgspec.Struct, frozen=True):
    """All of it."""

    wishes: tuple[Wish, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    closed: tuple[Closed, ...] = ()
    closing: tuple[Closing, ...] = ()


_decoder = Strict(msgspec.json.Decoder(Pledged))


class Pledges:
    """The file, and what is to be in it."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, NAME)
        self.now = Pledged()
        self._written = True
        with suppress(OSError, msgspec.MsgspecError):
            self.now = _decoder.decode(self._get())

    def put(self, now: Pledged) -> bool:
        """Take this, and write it in one step; whether it is on disk."""
        if now != self.now or not self._written:
            self.now = now
            try:
                self._put(msgspec.json.encode(now))
                self._written = True
            except OSError:
                self._written = False
        return self._written

    def remove(self) -> None:
        """The agent ends, and nobody is to go on from here."""
        for path in (self._path, f"{self._path}.new"):
            with suppress(OSError):
                os.unlink(path)

    # ---- the disk --------------------------------------------------------------------------------------

    def _get(self) -> bytes:
        return Path(self._path).read_bytes()

    def _put(self, data: bytes) -> None:
        Path(f"{self._path}.new").write_bytes(data)
        os.replace(f"{self._path}.new", self._path)
