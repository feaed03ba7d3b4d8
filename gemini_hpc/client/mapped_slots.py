"""Replica memory in a process of the job: the two slots of one shard, mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gemini_hpc.format import commit_record

_MADV_POPULATE_WRITE = 23
_POPULATE_STEP_BYTES = 256 << 10  # other threads that map or unmap memory wait for a step: some 0.1 ms
# Of a training that is to be protected: after each step its thread may wait 5 ms for the GIL. In small steps that is
# ten times as long as the mapping itself, where the training runs Python.
_AWAITED_STEP_BYTES = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(
    mapping: mmap.mmap, has_ended: Callable[[], bool] = lambda: False, step_bytes: int = _POPULATE_STEP_BYTES
) -> None:
    """Fault in all pages of a mapping, so that later copies pay for no page faults.

    The GIL is free meanwhile. Kernels before 5.14 cannot do this and leave it to the first copy.

    Args:
        mapping: The mapping, which cannot be unmapped meanwhile.
        has_ended: Returns whether the mapping is no longer of use.
        step_bytes: Bytes in one call of the kernel, for which it holds the process's address space.
    """
    held = ctypes.c_char.from_buffer(mapping)
    start, total = ctypes.addressof(held), len(mapping)
    for at in range(0, total, step_bytes):
        if has_ended() or _libc.madvise(start + at, min(step_bytes, total - at), _MADV_POPULATE_WRITE):
            return


@dataclass
class Content:
    """The known content of a slot; an empty digest means nothing complete."""

    epoch: int = 0
    version: int = 0
    used: int = 0
    digest: str = ""


class MappedSlot:
    """A mapped slot."""

    def __init__(self, fd: int, total_bytes: int) -> None:
        """Map a slot and take ownership of `fd`, which is needed to hand the memory to a new agent."""
        self.fd = fd
        self._map = mmap.mmap(fd, total_bytes)
        self.size_bytes = total_bytes
        self.content = Content()
        self.has_manifest = False

    def read_content(self) -> Content:
        """Return the complete content: by this process's record, else by the agent's commit record."""
        if self.content.digest:
            return self.content
        try:
            found = commit_record.parse(os.pread(self.fd, commit_record.RECORD_BYTES, self.size_bytes))
        except OSError:
            found = None
        return Content(*found.stamp, found.used_bytes, found.digest) if found is not None else Content()

    def populate(self, *, awaited: bool = True) -> None:
        """Fault in all pages (see `populate`).

        Args:
            awaited: Protection waits for them. Otherwise other threads come first.
        """
        populate(self._map, step_bytes=_AWAITED_STEP_BYTES if awaited else _POPULATE_STEP_BYTES)

    def put(self, offset: int, data: bytes | bytearray) -> None:
        """Write a few bytes at an offset."""
        self._map[offset : offset + len(data)] = data

    def view(self) -> memoryview:
        """Return a view of all bytes."""
        return memoryview(self._map)


class SlotMappings:
    """Threads that fault in the pages of slots, one for each slot."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, slots: Sequence[MappedSlot]) -> None:
        """Start a thread for each of these slots."""
        for slot in slots:
            thread = threading.Thread(target=slot.populate, name="gemini-mapping", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait until all pages are there."""
        for thread in self._threads:
            thread.join()


S = TypeVar("S", bound=MappedSlot)


class MappedShard(Generic[S]):
    """Both slots of the shard of training rank `rank`, whose home is node rank `home`."""

    def __init__(
        self,
        rank: int,
        world: int,
        home: int,
        total_bytes: int,
        fds: list[int],
        slot: Callable[[int, int], S],
        *,
        pushed: bool = False,
    ) -> None:
        """Map both slots and take ownership of the descriptors.

        Args:
            rank: Training rank whose shard it is.
            world: Number of training ranks.
            home: Node rank of the shard's home.
            total_bytes: Size of a slot in bytes.
            fds: Descriptors of the two slots.
            slot: Maps a slot from a descriptor and a size in bytes.
            pushed: Agents fill the slots.

        Raises:
            ValueError: There are not exactly two descriptors.
        """
        if len(fds) != 2:
            for fd in fds:
                os.close(fd)
            raise ValueError(f"the agent sent {len(fds)} descriptors for a shard, 2 wanted")
        self.rank, self.world, self.home, self.total_bytes = rank, world, home, total_bytes
        self.pushed, self._slot = pushed, slot
        self.slots = [slot(fd, total_bytes) for fd in fds]

    def map_onto(self, fds: list[int]) -> Any:
        """Return the same shard in other memory."""
        return MappedShard(self.rank, self.world, self.home, self.total_bytes, fds, self._slot, pushed=self.pushed)

    def list_slots_by_age(self) -> list[S]:
        """Return the slots in the order in which versions will fill them: the older content first."""
        return sorted(self.slots, key=lambda slot: (slot.read_content().epoch, slot.read_content().version))

    def populate(self) -> None:
        """Fault in all pages of both slots (see `Slot.populate`)."""
        for slot in self.slots:
            slot.populate()

    def close(self) -> None:
        """Close the descriptors; the mappings end with the last tensor that views them."""
        for slot in self.slots:
            if slot.fd >= 0:
                os.close(slot.fd)
                slot.fd = -1


K = TypeVar("K", bound=MappedShard[Any])


class ShardOwner(Generic[K]):
    """The shard that one thread fills, and its former slots if larger ones replaced them.

    The former slots hold the newest sealed version until a version in the new slots is sealed. A new agent must get
    them back until then.
    """

    def __init__(self) -> None:
        self.shard: K | None = None
        self.former: list[K] = []
        # A second thread may write to the shard only while it holds `writing`, and while `grants` still has the value
        # that it had when the agent granted the slot. New memory is installed with the lock held and `grants` raised.
        self.writing = threading.Lock()
        self.grants = 0

    def outgrow(self, shard: K) -> None:
        """Fill `shard` from now on and keep the present one as a former shard."""
        if self.shard is not None:
            self.former = [*self.former, self.shard]
        self.shard = shard

    def release(self, sealed: tuple[int, int]) -> None:
        """Close the former slots if they are no longer needed.

        Args:
            sealed: Newest sealed (epoch, version).
        """
        if not self.former or self.shard is None:
            return
        contents = [slot.read_content() for slot in self.shard.slots]
        if any(c.digest and (c.epoch, c.version) <= sealed for c in contents):
            gone, self.former = self.former, []
            for shard in gone:
                shard.close()

    def close(self) -> None:
        """Close all shards at the end of the training.

        A process that goes on afterwards (an evaluation) must not keep the node's memory.
        """
        shards = [*self.former, *([] if self.shard is None else [self.shard])]
        self.shard, self.former = None, []
        for shard in shards:
            shard.close()
