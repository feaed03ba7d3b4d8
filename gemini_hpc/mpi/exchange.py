"""Exchange of a version's shards between the ranks, in chunks, over a communicator of its own.

All sizes are known on both sides, so receives go directly into the other holder's slot. MPI moves data only while it
is called. A thread of ours calls it if MPI allows that (MPI_THREAD_MULTIPLE). Otherwise the program's own MPI calls
and `step()` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gemini_hpc import clock

_DIGEST_TAG, _CHUNK_TAG = 1, 2
DIGEST_BYTES = 32  # in hexadecimal
Written = Callable[[], str]
WINDOW = 8  # chunks
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3


class _Stream:
    """A shard to or from one rank: its chunks, then its digest, with up to `WINDOW` requests in flight."""

    def __init__(self, comm: Any, rank: int, memory: memoryview, chunk_bytes: int, written: Written | None) -> None:
        self.rank, self.memory, self.digest = rank, memory, bytearray(DIGEST_BYTES)
        self._post = comm.Irecv if written is None else comm.Isend
        self._written, self._chunk_bytes, self._at, self._open = written, chunk_bytes, 0, 0
        self._posted_digest = False

    @property
    def over(self) -> bool:
        return self._posted_digest and not self._open

    def ended(self) -> None:
        """Record the end of one request."""
        self._open -= 1

    def next(self) -> Any:
        """Return another request, or None if none is left or enough are in flight."""
        if self._open >= WINDOW or self._posted_digest:
            return None
        if self._at >= len(self.memory):
            return self._post_digest()
        self._open += 1
        part = self.memory[self._at : self._at + self._chunk_bytes]
        self._at += len(part)
        return self._post(part, self.rank, _CHUNK_TAG)

    def _post_digest(self) -> Any:
        """Return the last request; None while the digest to send is not known."""
        if self._written is not None:
            found = self._written()
            if not found:
                return None
            self.digest = bytearray(found.encode())
        self._open, self._posted_digest = self._open + 1, True
        return self._post(self.digest, self.rank, _DIGEST_TAG)


class Exchange:
    """The exchange of one version."""

    def __init__(
        self,
        comm: Any,
        memory: memoryview,
        written: Written,
        targets: Sequence[int],
        arrivals: Mapping[int, memoryview],
        chunk_bytes: int,
        arrived: Callable[[int, str], None],
    ) -> None:
        """Post the first requests.

        Args:
            comm: The checkpointer's communicator, which the program does not use.
            memory: Used bytes of this rank's shard, unchanged until the exchange is over.
            written: Returns the digest of those bytes; "" while it is not known.
            targets: Ranks that receive the shard.
            arrivals: Memory for the shards of other ranks, by rank.
            chunk_bytes: Size of a chunk in bytes.
            arrived: Called with rank and digest of each complete shard.
        """
        self._arrived = arrived
        streams = [_Stream(comm, r, m, chunk_bytes, None) for r, m in arrivals.items()]
        self._receiving = set(streams)
        streams += [_Stream(comm, r, memory, chunk_bytes, written) for r in targets]
        self._requests: list[Any] = []
        self._streams: list[_Stream] = []  # of each request
        self._all = streams
        for stream in streams:
            self._fill(stream)

    def _fill(self, stream: _Stream) -> None:
        while (request := stream.next()) is not None:
            self._requests.append(request)
            self._streams.append(stream)

    @property
    def over(self) -> bool:
        """Return whether all data has been sent and received."""
        return not self._requests and all(stream.over for stream in self._all)

    def progress(self) -> bool:
        """Let MPI work; return whether any request completed."""
        from mpi4py import MPI

        for stream in self._all:
            self._fill(stream)  # the digest to send may be known by now
        done = MPI.Request.Testsome(self._requests) if self._requests else None
        for index in sorted(done or (), reverse=True):
            del self._requests[index]
            stream = self._streams.pop(index)
            stream.ended()
            self._fill(stream)
            if stream.over and stream in self._receiving:
                self._arrived(stream.rank, stream.digest.decode("ascii", "replace"))
        return bool(done)


class Patience:
    """A pause between two polls, which doubles as long as no data moves."""

    def __init__(self) -> None:
        self._pause_s = _SHORTEST_S

    def __call__(self, moved: bool) -> None:
        """Sleep, for the shortest time if data moved."""
        self._pause_s = _SHORTEST_S if moved else min(_LONGEST_S, 2 * self._pause_s)
        clock.sleep(self._pause_s)
