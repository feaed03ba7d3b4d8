"""The control page: 4096 bytes of shared memory that an agent writes and its ranks read without a request.

Each field is one aligned 8-byte little-endian word with a single writer process. A reader therefore sees the old or
the new value, never a mixture. The seal's epoch and version share one word for that reason.
"""

from __future__ import annotations

import mmap
import struct

from gemini_hpc import clock
from gemini_hpc.core.numbers import VERSION_BITS

PAGE_BYTES = 4096
MAGIC = 0x0001_494E_494D_4547
_WORD = struct.Struct("<Q")

# The fourth word is free: agents of earlier versions write a time there that nobody reads.
MAGIC_AT, SEALED_AT, STATE_AT, _, DEAD_AT, ROUND_AT, ABANDONED_AT, GROWN_AT, HELD_AT = range(0, 72, 8)
SEALED_NS_AT, CPU_AT = 72, 80
_CPU = struct.Struct("<ff")

STATE_ARMING, STATE_PROTECTED, STATE_DEGRADED, STATE_FROZEN = 0, 1, 2, 3


def pack_seal(epoch: int, version: int) -> int:
    """Return one word for a sealed (epoch, version); the words sort like the pairs."""
    return (epoch << VERSION_BITS) | version


def unpack_seal(word: int) -> tuple[int, int]:
    """Return the (epoch, version) of a word made by `pack_seal`."""
    return word >> VERSION_BITS, word & ((1 << VERSION_BITS) - 1)


class ControlPage:
    """A mapped view of the control page, writable only in the agent."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map the page and write or check its magic number.

        Args:
            fd: Descriptor of the page's memory; the caller still owns and closes it.
            writable: Map for writing; only the agent does.

        Raises:
            ValueError: A page mapped for reading has no magic number.
        """
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, PAGE_BYTES, access=access)
        if writable:
            self._put(MAGIC_AT, MAGIC)
        elif self._get(MAGIC_AT) != MAGIC:
            raise ValueError("not a control page")

    def _get(self, offset: int) -> int:
        return int(_WORD.unpack_from(self._map, offset)[0])

    def _put(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._map, offset, value)

    @property
    def sealed(self) -> tuple[int, int]:
        """Return the newest sealed (epoch, version), or (0, 0) if nothing is sealed."""
        return unpack_seal(self._get(SEALED_AT))

    def set_sealed(self, epoch: int, version: int) -> None:
        """Publish a seal and its time."""
        word = pack_seal(epoch, version)
        if word != self._get(SEALED_AT):  # publishing the same seal again keeps its first time
            self._put(SEALED_NS_AT, int(clock.monotonic() * 1e9))
            self._put(SEALED_AT, word)

    @property
    def seal(self) -> tuple[tuple[int, int], float]:
        """Return the newest sealed (epoch, version) and the CLOCK_MONOTONIC seconds of its seal."""
        word, at_ns = self._get(SEALED_AT), self._get(SEALED_NS_AT)
        if word != self._get(SEALED_AT):  # a newer seal came between the two reads; no second one follows so soon
            word, at_ns = self._get(SEALED_AT), self._get(SEALED_NS_AT)
        return unpack_seal(word), at_ns * 1e-9

    @property
    def abandoned(self) -> tuple[int, int]:
        """Return the newest abandoned (epoch, version).

        An abandoned version is never sealed, so no rank should wait for its seal.
        """
        return unpack_seal(self._get(ABANDONED_AT))

    def set_abandoned(self, epoch: int, version: int) -> None:
        """Publish an abandoned version."""
        self._put(ABANDONED_AT, pack_seal(epoch, version))

    @property
    def state(self) -> int:
        """Return the protection state, one of the STATE_ constants."""
        return self._get(STATE_AT)

    def set_state(self, state: int) -> None:
        """Publish the protection state."""
        self._put(STATE_AT, state)

    @property
    def dead_nodes(self) -> int:
        """Return the number of the job's nodes that are declared dead."""
        return self._get(DEAD_AT)

    def set_dead_nodes(self, count: int) -> None:
        """Publish the number of dead nodes."""
        self._put(DEAD_AT, count)

    @property
    def is_stuck(self) -> bool:
        """Return whether nothing can be sealed now: a node is missing, or a recovery goes on."""
        return self.dead_nodes > 0 or self.state in (STATE_FROZEN, STATE_DEGRADED)

    @property
    def round(self) -> int:
        """Return the recovery round that the page belongs to."""
        return self._get(ROUND_AT)

    def set_round(self, number: int) -> None:
        """Publish the recovery round."""
        self._put(ROUND_AT, number)

    @property
    def grown(self) -> int:
        """Return how many times the agent enlarged the slots of a shard that is pushed to it.

        A rank that keeps the memory of such slots asks for the new ones when the number changes.
        """
        return self._get(GROWN_AT)

    def set_grown(self, count: int) -> None:
        """Publish the number of enlargements."""
        self._put(GROWN_AT, count)

    @property
    def cpu(self) -> tuple[float, float]:
        """Return the core-seconds that a version takes of this agent, and the cores that the agent may use.

        The cores are an average. (0.0, 0.0) if not known yet.
        """
        return _CPU.unpack(_WORD.pack(self._get(CPU_AT)))

    def set_cpu(self, version_s: float, cores: float) -> None:
        """Publish the core-seconds of a version and the cores that the agent may use on average."""
        self._put(CPU_AT, int(_WORD.unpack(_CPU.pack(version_s, cores))[0]))

    @property
    def held(self) -> int:
        """Return the epoch whose ranks are held because the job leaves a node at the next seal; 0: no hold.

        No rank of this epoch or an earlier one makes a step beyond that sealed version.
        """
        return self._get(HELD_AT)

    def set_held(self, epoch: int) -> None:
        """Publish the epoch whose ranks are held."""
        self._put(HELD_AT, epoch)

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()
