"""The grant page: shared memory in which a rank says how many bytes of a version its agent may send, and until when.

The agent makes one page for each channel (`wire.local.OpenPush`) and passes it with the channel. The rank writes a
grant and withdraws it without a request. The agent writes what has gone and when. Neither process wakes up for it.

Each field is one aligned 8-byte little-endian word with a single writer process, so a reader never sees a mixture. A
rank withdraws a grant before it writes the next one, and writes the time last. A torn reading thus grants nothing.

The agent believes nothing that a rank writes: it reads each word once and sends no byte that the version lacks. It
never reads back its own words.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import NamedTuple

from gemini_hpc import clock

PAGE_BYTES = 4096
LEAST_BYTES = 32 << 10  # a smaller part of a grant is not sent: each costs some 0.3 ms of processors at both ends
_WORD = struct.Struct("<Q")
_SPELL = struct.Struct("<QQQ")
_UNTIL_AT, _BEFORE_AT, _RATE_AT = range(0, 24, 8)  # the rank's words
_ASLEEP_AT, _SENT_AT, _ARRIVED_AT, _MOVED_AT, _SPELLS_AT = range(64, 104, 8)  # the agent's words
_RING_AT, _RING = 128, 128  # the newest spells
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # no further seal, no shrinking, no growing: a read never faults


class Grant(NamedTuple):
    """A permission to send.

    Attributes:
        until: Bytes of the version that may go in all.
        before: Time at which all of them must have arrived (CLOCK_MONOTONIC, seconds); 0: nothing may be sent.
        rate: Bytes a second that the link carries.
    """

    until: int
    before: float
    rate: float

    def compute_room(self, sent: int, in_flight: int, now: float) -> int:
        """Return how many bytes may be sent now, so that they arrive in time; 0 if too few to be sent.

        Args:
            sent: Bytes that have been sent.
            in_flight: Those of them that have not arrived.
            now: The current time.
        """
        left = self.until - sent
        fitting = min(left, int((self.before - now) * self.rate) - in_flight)
        return fitting if fitting >= min(left, LEAST_BYTES) > 0 else 0


class Spell(NamedTuple):
    """A time in which bytes were in flight, from the first one sent to the last one acknowledged.

    Attributes:
        size: Number of bytes.
        sent_at: CLOCK_MONOTONIC seconds.
        acked_at: CLOCK_MONOTONIC seconds.
    """

    size: int
    sent_at: float
    acked_at: float


def make() -> int:
    """Return the descriptor of a new page whose size no process can change."""
    fd = os.memfd_create("gemini:grants", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


class _Page:
    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)

    def _get(self, offset: int) -> int:
        return int(_WORD.unpack_from(self._map, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._map, offset, value)

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()


class GrantReader(_Page):
    """The agent's end of a page."""

    def __init__(self, fd: int) -> None:
        """Map the page. The caller still owns and closes the descriptor."""
        super().__init__(fd)
        self._spells = 0

    def grant(self, total: int) -> Grant:
        """Return the grant of the rank, for a version of `total` bytes."""
        until, rate, before = self._get(_UNTIL_AT), self._get(_RATE_AT), self._get(_BEFORE_AT)
        return Grant(min(until, total), before * 1e-9, float(rate))

    def publish_asleep(self, asleep: bool) -> None:
        """Publish whether the sending thread has to be woken for a grant."""
        self._put(_ASLEEP_AT, asleep)

    def publish_progress(self, sent: int, arrived: int) -> None:
        """Publish how many bytes of the version have been sent, and how many have arrived."""
        self._put(_SENT_AT, sent)
        self._put(_ARRIVED_AT, arrived)
        self._put(_MOVED_AT, int(clock.monotonic() * 1e9))

    def add(self, spell: Spell) -> None:
        """Publish a spell."""
        at = _RING_AT + self._spells % _RING * _SPELL.size
        _SPELL.pack_into(self._map, at, spell.size, int(spell.sent_at * 1e9), int(spell.acked_at * 1e9))
        self._spells += 1
        self._put(_SPELLS_AT, self._spells)


class GrantWriter(_Page):
    """The rank's end of a page."""

    def __init__(self, fd: int) -> None:
        """Map the page. The caller still owns and closes the descriptor.

        Raises:
            ValueError: The descriptor is no grant page.
        """
        try:
            fits = fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS and os.fstat(fd).st_size == PAGE_BYTES
        except OSError:
            fits = False
        if not fits:
            raise ValueError("not a grant page")
        super().__init__(fd)
        self._spells = 0

    def write(self, grant: Grant) -> bool:
        """Replace the grant. Return whether the agent has to be woken for it."""
        self.withdraw()
        self._put(_UNTIL_AT, grant.until)
        self._put(_RATE_AT, int(grant.rate))
        self._put(_BEFORE_AT, int(grant.before * 1e9))
        return bool(self._get(_ASLEEP_AT))

    def withdraw(self) -> None:
        """End the grant: the agent begins to send nothing more. Bytes in flight arrive."""
        self._put(_BEFORE_AT, 0)

    @property
    def sent(self) -> int:
        """Return the bytes of the version that the agent has sent."""
        return self._get(_SENT_AT)

    @property
    def arrived(self) -> int:
        """Return the bytes of the version that have arrived."""
        return self._get(_ARRIVED_AT)

    @property
    def moved_at(self) -> float:
        """Return when a byte was last sent or acknowledged (CLOCK_MONOTONIC, seconds); 0: never."""
        return self._get(_MOVED_AT) * 1e-9

    def read_spells(self) -> list[Spell]:
        """Return the spells that were added since the last call, as far as the page still has them."""
        count = self._get(_SPELLS_AT)
        found = []
        for number in range(max(self._spells, count - _RING + 1), count):
            size, sent_ns, acked_ns = _SPELL.unpack_from(self._map, _RING_AT + number % _RING * _SPELL.size)
            found.append(Spell(size, sent_ns * 1e-9, acked_ns * 1e-9))
        self._spells = count
        return found
