"""What the ranks of a program say to each other: a few bytes each, heard by all."""

from __future__ import annotations

from typing import Any


class MpiRanks:
    """Over a communicator of mpi4py. All methods are collective; no pickle."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.world: int = comm.Get_size()

    def all(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank."""
        world = self.world
        lengths = bytearray(8 * world)
        self._comm.Allgather(len(data).to_bytes(8, "little"), lengths)
        sizes = [int.from_bytes(lengths[i : i + 8], "little") for i in range(0, len(lengths), 8)]
        most = max(1, *sizes)
        gathered = bytearray(most * world)
        self._comm.Allgather(data.ljust(most, b"\x00"), gathered)
        return [bytes(gathered[i * most : i * most + size]) for i, size in enumerate(sizes)]

    def agreed(self, mine: bool) -> bool:
        """Whether it is so on all ranks."""
        return all(word == b"1" for word in self.all(b"1" if mine else b"0"))

    def first(self, text: str) -> str:
        """The text of the lowest rank that has one."""
        return next((word.decode() for word in self.all(text.encode()) if word), "")
