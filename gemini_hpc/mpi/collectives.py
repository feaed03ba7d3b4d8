"""Short messages between the ranks of a program: a few bytes from each, received by all."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from gemini_hpc import lines


class MpiRanks:
    """The ranks of an mpi4py communicator. All methods are collective and use no pickle."""

    subject = "program"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.world: int = comm.Get_size()

    def gather_data(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank."""
        world = self.world
        lengths = bytearray(8 * world)
        self._comm.Allgather(len(data).to_bytes(8, "little"), lengths)
        sizes = [int.from_bytes(lengths[i : i + 8], "little") for i in range(0, len(lengths), 8)]
        most = max(1, *sizes)
        gathered = bytearray(most * world)
        self._comm.Allgather(data.ljust(most, b"\x00"), gathered)
        return [bytes(gathered[i * most : i * most + size]) for i, size in enumerate(sizes)]

    def exit_process(self, status: int) -> NoReturn:
        """End this process with a status, once all ranks are about to."""
        lines.flush_streams()
        self._comm.Barrier()
        os._exit(status)

    def find_first_text(self, text: str) -> str:
        """Return the text of the lowest rank that has a non-empty one, or ""."""
        return next((word.decode() for word in self.gather_data(text.encode()) if word), "")
