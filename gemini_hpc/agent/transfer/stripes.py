"""The connections from an agent to one holder of a shard, which carry a version's chunks side by side.

One connection copies no more than one processor core at each end can. A pair of agents therefore uses several,
shared by the ranks of the node.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from typing import NamedTuple

from gemini_hpc.core.digest import PIECE_BYTES
from gemini_hpc.wire import peer
from gemini_hpc.wire.link import BlockingLink, LinkClosed

CORES_A_STRIPE = 2  # the training keeps the other core
_MOST_BYTES = 4 * PIECE_BYTES  # of a chunk where there are several connections


def count_connections() -> int:
    """Return how many connections a pair of agents uses in all on a node with this one's cores."""
    return max(1, min(peer.MAX_STRIPES, len(os.sched_getaffinity(0)) // CORES_A_STRIPE))


def compute_share(ranks: int) -> int:
    """Return how many of these connections each of so many ranks gets. Each gets at least one."""
    return max(1, count_connections() // max(1, ranks))


def cut_chunks(offset: int, length: int, count: int) -> list[tuple[int, int]]:
    """Return the (offset, length) of chunks for `count` connections. Only the ends lie within a piece."""
    if count == 1:
        return [(offset, length)]
    step = max(PIECE_BYTES, min(_MOST_BYTES, length // count // PIECE_BYTES * PIECE_BYTES))
    chunks, end = [], offset + length
    while offset < end:
        stop = min(end, offset // PIECE_BYTES * PIECE_BYTES + step)
        chunks.append((offset, stop - offset))
        offset = stop
    return chunks


class _Chunk(NamedTuple):
    file: FileIO
    offset: int
    length: int


class Stripes:
    """The connections of one shard to one holder.

    One thread calls the methods that send. It also sends chunks on the first connection, the lead, which carries all
    messages. Each other connection has a thread of its own. The first failure ends all connections.
    """

    def __init__(self, links: Sequence[BlockingLink], name: str) -> None:
        """Start the threads.

        Args:
            links: The connections, the lead first.
            name: Name of the threads.
        """
        self.links = tuple(links)
        self._changed = threading.Condition()
        self._chunks: deque[_Chunk] = deque()  # that no connection has begun to send
        self._sent, self._arrived = [0] * len(links), [0] * len(links)
        self._said: deque[peer.PushVerified | peer.PushAgain] = deque()
        self._over = False
        self.failure = ""  # why the connections end
        self._threads = [
            threading.Thread(target=self._carry, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(1, len(links))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lead(self) -> BlockingLink:
        """Return the connection that carries the messages."""
        return self.links[0]

    def restart_counts(self) -> None:
        """Count from 0 again, for the next version. All bytes sent have been acknowledged."""
        with self._changed:
            self._sent, self._arrived = [0] * len(self.links), [0] * len(self.links)

    def send(self, file: FileIO, offset: int, length: int) -> None:
        """Send bytes of a file. On return they are sent, or other connections are sending them.

        Raises:
            OSError: The lead has failed, or ends.
        """
        chunks = [_Chunk(file, *chunk) for chunk in cut_chunks(offset, length, len(self.links))]
        with self._changed:
            self._chunks.extend(chunks)
            self._changed.notify_all()
        while (chunk := self._pop_chunk(0)) is not None:
            self._put(self.lead, chunk)

    def wait_acknowledged(self) -> None:
        """Wait until all bytes sent are acknowledged.

        Raises:
            OSError: The connections have ended.
        """
        self._wait_for(lambda: sum(self._sent) == sum(self._arrived))

    def deliver_answer(self, message: peer.PushVerified | peer.PushAgain) -> None:
        """Pass the holder's answer to the thread that sends."""
        with self._changed:
            self._said.append(message)
            self._changed.notify_all()

    def wait_for_answer(self) -> peer.PushVerified | peer.PushAgain:
        """Wait for the holder's answer.

        Raises:
            OSError: The connections have ended.
        """
        self._wait_for(lambda: self._said)
        return self._said.popleft()

    def _wait_for(self, condition: Callable[[], object]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._over)
            if not condition():
                raise OSError(self.failure or "the connections have ended")

    def record_acknowledged(self, link: BlockingLink, arrived: int) -> int:
        """Record an acknowledgement of a connection. Return how many bytes of the version are acknowledged in all.

        Raises:
            LinkClosed: The bytes were not sent on this connection, or were acknowledged before.
        """
        number = self.links.index(link)
        with self._changed:
            if not self._arrived[number] < arrived <= self._sent[number]:
                raise LinkClosed(f"{arrived} of {self._sent[number]} bytes acknowledged")
            self._arrived[number] = arrived
            if (total := sum(self._arrived)) == sum(self._sent):
                self._changed.notify_all()
            return total

    def shut(self) -> None:
        """End all connections, from any thread."""
        with self._changed:
            self._over = True
            self._chunks.clear()
            self._changed.notify_all()
        for link in self.links:
            link.shut()

    def close(self) -> None:
        """Free the connections. On return no thread sends any more."""
        self.shut()
        for thread in self._threads:
            thread.join()
        for link in self.links:
            link.close()

    def _pop_chunk(self, number: int) -> _Chunk | None:
        """Return the next chunk for this connection. The lead gets None if there is none, the others at the end."""
        with self._changed:
            if number:
                self._changed.wait_for(lambda: self._chunks or self._over)
            if self._over or not self._chunks:
                return None
            chunk = self._chunks.popleft()
            self._sent[number] += chunk.length
            return chunk

    @staticmethod
    def _put(link: BlockingLink, chunk: _Chunk) -> None:
        link.send(peer.PushChunk(chunk.offset, chunk.length), more=True)
        link.send_file(chunk.file.fileno(), chunk.offset, chunk.length)

    def _carry(self, number: int) -> None:
        try:
            while (chunk := self._pop_chunk(number)) is not None:
                self._put(self.links[number], chunk)
        except OSError as exc:
            self.failure = self.failure or str(exc)
            self.shut()
