"""Transfer of one copy from its holders to this node, over several connections, digest verified on arrival.

A copy travels in runs of whole pieces (`core.digest`). Each connection takes the next run that nobody has taken, from
whichever holder it leads to. What a connection leaves unfinished goes to the others. If the digest of the whole does
not match, the pieces' digests of a holder tell which pieces are wrong, and only these are pulled again. Such a list
needs no trust: the planned digest is its digest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import NamedTuple

from gemini_hpc import clock
from gemini_hpc.agent.replicas.memory import Memfd
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.digest import PIECE_BYTES, PIECE_DIGEST_BYTES, Digest, Pieces, combine_pieces
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import peer
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import HandshakeClient, HandshakeError
from gemini_hpc.wire.link import BlockingLink, LinkClosed

AT_ONCE = 8  # copies of a node at once, and connections that they share: more streams do not make a link faster
SILENCE_S = 5.0  # time limit for one message or one read
PATIENCE_S = 60.0  # patience with a source that still makes or pulls the copy, or hashes it
_LOOK_S = 0.05  # interval of retries with a source that does not have the copy yet
_STOP_S = 0.1  # interval of looks at `stop` while nothing else happens
_RUN = 16  # pieces asked for at once: far more than one round trip's bytes, and few enough to balance connections
_PART_BYTES = 4 << 20


class PullFailed(Exception):
    """A failure of all sources to serve the copy. The message names each source with its reason."""


class Source(NamedTuple):
    """An agent that may serve a copy, and the stamp that the copy has there."""

    host: str
    address: str
    port: int
    client: HandshakeClient
    stamp: Stamp


class NotYet(PullFailed):
    """A refusal of a source that does not have the copy yet."""


_FAILURES = (OSError, HandshakeError, LinkClosed, FrameError, PullFailed)


class Pulled(NamedTuple):
    """A pulled copy: the hosts that bytes came from, the failures of sources, and the bytes that came in all."""

    hosts: tuple[str, ...]
    failures: str
    bytes: int


def fetch(copy: Copy, memory: Memfd, sources: Sequence[Source], stop: Event, connections: int = 1) -> Pulled:
    """Pull a copy into `memory` (blocking). No thread writes to the memory any more on return.

    Args:
        copy: The copy to pull.
        memory: Memory to write to.
        sources: Sources, the preferred ones first.
        stop: Cancels the pull.
        connections: Number of connections at once. There is at least one for each source.

    Raises:
        PullFailed: All sources fail, or `stop` is set meanwhile.
    """
    with memory.view() as view:
        return _Fetch(copy, view, sources, stop, connections).run()


class _Fetch:
    """The pull of one copy: what is missing, what came from where, and which sources have failed."""

    def __init__(
        self, copy: Copy, view: memoryview, sources: Sequence[Source], stop: Event, connections: int
    ) -> None:
        self._copy, self._view, self._sources, self._stop = copy, view, sources, stop
        self._most = max(connections, len(sources))
        self._pieces = Pieces(copy.used)
        count = self._pieces.count
        self._right = b""  # the pieces' digests, once a source has told them
        self._from = [-1] * count  # the source of each piece, by its index
        self._changed = threading.Condition()
        self._missing = deque((first, min(count, first + _RUN)) for first in range(0, count, _RUN))
        self._under_way = 0  # runs asked for
        self._busy = [0] * len(sources)  # connections of each source
        self._dialling = 0  # connections without an answer so far
        self._answered: set[int] = set()  # sources that have begun to serve
        self._retried: set[int] = set()  # sources of wrong pieces that are asked again, because no other is left
        self._over = False
        self._failures: dict[int, str] = {}
        self._came = 0

    def run(self) -> Pulled:
        """Pull the copy.

        Raises:
            PullFailed: All sources fail, or the pull is stopped.
        """
        try:
            self._gather()
            while self._pieces.compute_digest() != self._copy.digest:
                self._right = self._right or self._fetch_digests()
                self._suspect()
                self._gather()
        finally:
            self._over = True
        hosts = tuple(self._sources[index].host for index in sorted(set(self._from)))
        return Pulled(hosts, self._describe_failures(), self._came)

    def _describe_failures(self) -> str:
        return "; ".join(f"{self._sources[index].host}: {reason}" for index, reason in self._failures.items())

    def _list_usable(self) -> list[int]:
        return [index for index in range(len(self._sources)) if index not in self._failures]

    def _gather(self) -> None:
        """Pull all missing pieces. A connection that still dials on return will bring nothing."""
        with self._changed:
            while self._under_way or (self._missing and not self._stop.is_set()):
                self._open_connections()
                if self._missing and not any(self._busy):
                    break
                self._changed.wait(_STOP_S)
            self._over = self._stop.is_set() or bool(self._missing)
            if self._stop.is_set():
                raise PullFailed("cancelled by a new recovery round")
            if self._missing:
                raise PullFailed(self._describe_failures() or "no node holds the copy")

    def _open_connections(self) -> None:
        """Open as many connections as there is work for: one to a source, and more once the source has answered."""
        while len(self._missing) > self._dialling and sum(self._busy) < self._most and not self._stop.is_set():
            ways = [index for index in self._list_usable() if not self._busy[index] or index in self._answered]
            if not ways:
                return
            index = min(ways, key=lambda index: self._busy[index])
            self._busy[index] += 1
            self._dialling += 1
            threading.Thread(target=self._run_connection, args=(index,), name="gemini-pull", daemon=True).start()

    def _fetch_digests(self) -> bytes:
        """Return the right digests of all pieces: those of a source whose whole copy matches."""
        for index in sorted(self._list_usable(), key=lambda index: index in self._from):
            source = self._sources[index]
            try:
                with _dial(source) as link:
                    _ask(link, self._copy, source, 0, self._copy.used, digests=True, bare=True)
                    pieces = _receive_head(link, self._copy, PATIENCE_S).pieces
                if combine_pieces(pieces, self._copy.used) == self._copy.digest:
                    return pieces
                self._failures[index] = "the digest does not match: damaged copy"
            except _FAILURES as exc:
                self._failures[index] = str(exc) or type(exc).__name__
        raise PullFailed(self._describe_failures())

    def _suspect(self) -> None:
        """Count the wrong pieces as missing. Their sources do not serve them again, unless no other can."""
        wrong = self._pieces.find_differing(self._right)
        guilty = {self._from[number] for number in wrong}
        innocent = [index for index in self._list_usable() if index not in guilty]
        for index in sorted(guilty):
            if not innocent and index not in self._retried:
                self._retried.add(index)
                continue
            count = sum(self._from[number] == index for number in wrong)
            self._failures.setdefault(index, f"damaged pieces: {count}")
        self._missing.extend((number, number + 1) for number in wrong)

    # ---- in the connections' threads -------------------------------------------------------------------

    def _run_connection(self, index: int) -> None:
        failure = ""
        has_answered = Event()
        try:
            self._bring_patiently(index, has_answered)
        except _FAILURES as exc:
            failure = str(exc) or type(exc).__name__
        finally:
            with self._changed:
                self._busy[index] -= 1
                self._dialling -= not has_answered.is_set()
                if failure:
                    self._failures.setdefault(index, failure)
                self._changed.notify_all()

    def _bring_patiently(self, index: int, has_answered: Event) -> None:
        deadline = clock.monotonic() + PATIENCE_S
        while self._missing and not self._over:
            try:
                self._bring(index, has_answered)
            except NotYet:
                if clock.monotonic() > deadline or self._stop.is_set():
                    raise
                clock.sleep(_LOOK_S)
            else:
                break

    def _bring(self, index: int, has_answered: Event) -> None:
        source, asked = self._sources[index], deque[tuple[int, int]]()
        try:
            with _dial(source) as link:
                self._ask(link, source, asked)
                while asked:
                    _receive_head(link, self._copy, SILENCE_S)
                    self._record_answer(index, has_answered)
                    self._ask(link, source, asked)  # so that the source never waits for the next question
                    self._receive(link, index, asked)
        finally:
            with self._changed:
                self._under_way -= len(asked)
                self._missing.extendleft(reversed(asked))
                self._changed.notify_all()

    def _record_answer(self, index: int, has_answered: Event) -> None:
        if not has_answered.is_set():
            has_answered.set()
            with self._changed:
                self._dialling -= 1
                self._answered.add(index)
                self._changed.notify_all()

    def _ask(self, link: BlockingLink, source: Source, asked: deque[tuple[int, int]]) -> None:
        with self._changed:
            if not self._missing or self._over or self._stop.is_set():
                return
            first, last = self._missing.popleft()
            self._under_way += 1
            asked.append((first, last))
        _ask(link, self._copy, source, *self._compute_range(first, last))

    def _compute_range(self, first: int, last: int) -> tuple[int, int]:
        return first * PIECE_BYTES, min(self._copy.used, last * PIECE_BYTES)

    def _receive(self, link: BlockingLink, index: int, asked: deque[tuple[int, int]]) -> None:
        first, last = asked[0]
        start, end = self._compute_range(first, last)
        hasher, came = Digest(), 0

        def take(data: memoryview) -> None:
            nonlocal came
            if self._stop.is_set():
                raise PullFailed("cancelled by a new recovery round")
            hasher.update(data)
            came += len(data)

        try:
            with self._view[start:end] as part:
                link.fill(part, SILENCE_S, take)
        finally:
            digests = hasher.pieces
            whole = last - first if came == end - start else came // PIECE_BYTES
            with self._changed:
                self._came += came
                for at in range(whole):
                    self._pieces.put(first + at, digests[at * PIECE_DIGEST_BYTES : (at + 1) * PIECE_DIGEST_BYTES])
                    self._from[first + at] = index
                if whole == last - first:
                    asked.popleft()
                    self._under_way -= 1
                else:
                    asked[0] = first + whole, last


def fetch_part(
    copy: Copy, start: int, end: int, source: Source, write_bytes: Callable[[int, memoryview], None], stop: Event
) -> None:
    """Pull the bytes from `start` to `end` of a copy, or of the parity beside it (blocking).

    Args:
        copy: The copy.
        start: First byte.
        end: Byte after the last one.
        source: Agent to pull from.
        write_bytes: Receives each part with its distance from `start`, before the digests of the pieces are verified.
        stop: Cancels the pull.

    Raises:
        PullFailed: The source cannot serve the part, the digest does not match, or `stop` is set.
        OSError: The connection fails.
        HandshakeError: The handshake fails.
        LinkClosed: The source closes the connection.
        FrameError: The source sends a malformed frame.
    """
    with _dial(source) as link:
        _ask(link, copy, source, start, end, digests=True)
        head = _receive_head(link, copy, PATIENCE_S)
        if head.copy is not None and _describe_content(head.copy) != _describe_content(copy):
            raise PullFailed("offers a different copy from the planned one")
        hasher, room = Digest(), bytearray(min(_PART_BYTES, end - start))
        at = 0

        def step(data: memoryview) -> None:
            nonlocal at
            if stop.is_set():
                raise PullFailed("cancelled by a new recovery round")
            hasher.update(data)
            write_bytes(at, data)
            at += len(data)

        while at < end - start:
            with memoryview(room)[: min(len(room), end - start - at)] as part:
                link.fill(part, SILENCE_S, step)
        if hasher.pieces != head.pieces:
            raise PullFailed("the digest of a part does not match")


def _describe_content(copy: Copy) -> tuple[object, ...]:
    return copy.used, copy.digest, copy.members, copy.blocks, copy.room


@contextmanager
def _dial(source: Source) -> Iterator[BlockingLink]:
    link = BlockingLink.connect(source.address, source.port, source.client, SILENCE_S)
    try:
        link.limit_silence(SILENCE_S)
        yield link
    finally:
        link.close()


def _ask(
    link: BlockingLink, copy: Copy, source: Source, start: int, end: int, *, digests: bool = False, bare: bool = False
) -> None:
    link.send(peer.PullAsk(copy.training, copy.rank, source.stamp, bool(copy.members), start, end, digests, bare))


def _receive_head(link: BlockingLink, copy: Copy, within_s: float) -> peer.PullHead:
    """Return the answer to a question.

    Raises:
        LinkClosed: No answer comes.
        PullFailed: The source refuses, or has a different copy.
    """
    if not link.wait(within_s):
        raise LinkClosed(f"silent for {within_s:.0f} s")
    head = link.receive(peer.PullHead)
    if head.copy is None:
        raise (NotYet if head.later else PullFailed)(head.reason)
    if head.copy.used != copy.used or head.copy.digest != copy.digest:
        raise PullFailed("offers a different copy from the planned one")
    return head
