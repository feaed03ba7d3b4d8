"""Lasting requests of a job's ranks to its agents: one file in the job's directory.

The file outlives the agent and the incarnation. The file lists versions to keep under a name until that is done,
versions that must not be loaded any more, and closed trainings. If the file cannot be written, an agent's death loses
its entries, but other agents know them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from gemini_hpc.core.numbers import TrainingName, Version
from gemini_hpc.core.sequence import Closed, Closing
from gemini_hpc.files import replace_file
from gemini_hpc.wire.bounds import Strict
from gemini_hpc.wire.stored import Rejection

NAME = "pledges"


class Wish(msgspec.Struct, frozen=True, order=True):
    """A request to keep this version of a training, or the first later version possible, under a name."""

    training: TrainingName
    name: TrainingName
    version: Version


class Pledged(msgspec.Struct, frozen=True):
    """The contents of the file: wishes, rejections, closed trainings and this node's closings."""

    wishes: tuple[Wish, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    closed: tuple[Closed, ...] = ()
    closing: tuple[Closing, ...] = ()


_decoder = Strict(msgspec.json.Decoder(Pledged))


class Pledges:
    """The file of pledges and its current contents."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, NAME)
        self.now = Pledged()
        self._written = True
        with suppress(OSError, msgspec.MsgspecError):
            self.now = _decoder.decode(self._get())

    def put(self, now: Pledged) -> bool:
        """Replace the contents and write them to disk atomically. Return whether they are on disk."""
        if now != self.now or not self._written:
            self.now = now
            try:
                self._put(msgspec.json.encode(now))
                self._written = True
            except OSError:
                self._written = False
        return self._written

    def remove(self) -> None:
        """Remove the file: the agent ends, and no successor continues from here."""
        for path in (self._path, f"{self._path}.new"):
            with suppress(OSError):
                os.unlink(path)

    # ---- the disk --------------------------------------------------------------------------------------

    def _get(self) -> bytes:
        return Path(self._path).read_bytes()

    def _put(self, data: bytes) -> None:
        replace_file(self._path, data)
