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
WINDOW = 8  # chunks
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # from the latency of a message up to what a busy core may lose to polls


class _Stream:
    """The chunks of a shard to or from one rank, with up to `WINDOW` requests in flight, and its digest.

    Attributes:
        digest: The digest; of a shard to send it is empty until it is known.
    """

    def __init__(self, comm: Any, rank: int, memory: memoryview, digest: bytearray, chunk_bytes: int, *, send: bool):
        self.rank, self.memory, self.digest = rank, memory, digest
        self._post = comm.Isend if send else comm.Irecv
        self._chunk_bytes, self._offset, self._open = chunk_bytes, 0, 0

    @property
    def over(self) -> bool:
        return self._offset >= len(self.memory) and not self._open

    def post_digest(self) -> Any:
        """Return the request for the digest."""
        self._open += 1
        return self._post(self.digest, self.rank, _DIGEST_TAG)

    def record_end(self) -> None:
        """Record the end of one request."""
        self._open -= 1

    def post_next(self) -> Any:
        """Return another request, or None if none is left or enough are in flight."""
        if self._open >= WINDOW or self._offset >= len(self.memory):
            return None
        self._open += 1
        part = self.memory[self._offset : self._offset + self._chunk_bytes]
        self._offset += len(part)
        return self._post(part, self.rank, _CHUNK_TAG)


class Exchange:
    """The exchange of one version."""

    def __init__(
        self,
        comm: Any,
        memory: memoryview,
        digest: Callable[[], str],
        targets: Sequence[int],
        arrivals: Mapping[int, memoryview],
        chunk_bytes: int,
        arrived: Callable[[int, str], None],
    ) -> None:
        """Post the first requests.

        Args:
            comm: The checkpointer's communicator, which the program does not use.
            memory: Used bytes of this rank's shard, unchanged until the exchange is over.
            digest: Returns the digest of those bytes, or "" as long as it is unknown. It travels when it is known.
            targets: Ranks that receive the shard.
            arrivals: Memory for the shards of other ranks, by rank.
            chunk_bytes: Size of a chunk in bytes.
            arrived: Called with rank and digest of each complete shard.
        """
        self._arrived, self._digest = arrived, digest
        streams = [_Stream(comm, r, m, bytearray(32), chunk_bytes, send=False) for r, m in arrivals.items()]
        self._receiving = set(streams)
        self._outgoing = [_Stream(comm, r, memory, bytearray(), chunk_bytes, send=True) for r in targets]
        self._requests: list[Any] = []
        self._streams: list[_Stream] = []
        for stream in streams:
            self._add(stream, stream.post_digest())
        for stream in [*streams, *self._outgoing]:
            self._fill(stream)

    def _add(self, stream: _Stream, request: Any) -> None:
        self._requests.append(request)
        self._streams.append(stream)

    def _fill(self, stream: _Stream) -> None:
        while (request := stream.post_next()) is not None:
            self._add(stream, request)

    def _send_digest(self) -> bool:
        """Send the digest to all targets once it is known; return whether that has happened now."""
        digest = self._digest() if self._outgoing else ""
        if not digest:
            return False
        for stream in self._outgoing:
            stream.digest = bytearray(digest.encode())
            self._add(stream, stream.post_digest())
        self._outgoing = []
        return True

    @property
    def over(self) -> bool:
        """Return whether all data has been sent and received."""
        return not (self._requests or self._outgoing)

    def advance(self) -> bool:
        """Let MPI work; return whether any request completed."""
        from mpi4py import MPI

        sent = self._send_digest()
        done = MPI.Request.Testsome(self._requests) if self._requests else None
        for index in sorted(done or (), reverse=True):
            del self._requests[index]
            stream = self._streams.pop(index)
            stream.record_end()
            self._fill(stream)
            if stream.over and stream in self._receiving:
                self._arrived(stream.rank, stream.digest.decode("ascii", "replace"))
        return sent or bool(done)


class Patience:
    """A pause between two polls, which doubles as long as no data moves."""

    def __init__(self) -> None:
        self._pause_s = _SHORTEST_S

    def __call__(self, moved: bool) -> None:
        """Sleep, for the shortest time if data moved."""
        self._pause_s = _SHORTEST_S if moved else min(_LONGEST_S, 2 * self._pause_s)
        clock.sleep(self._pause_s)
