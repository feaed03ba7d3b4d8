"""Replica memory as seen by a process of the job: the two slots of one shard, mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gemini_hpc.format import commit_record

_MADV_POPULATE_WRITE = 23
_POPULATE_STEP_BYTES = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(mapping: mmap.mmap) -> None:
    """Make a mapping's pages present, so that no later copy pays for page faults. The GIL is free meanwhile. A kernel
    that cannot (before 5.14) leaves it to the first copy."""
    start, total = ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping)
    for at in range(0, total, _POPULATE_STEP_BYTES):
        if _libc.madvise(start + at, min(_POPULATE_STEP_BYTES, total - at), _MADV_POPULATE_WRITE):
            return


@dataclass
class Content:
    """What is known of a slot. digest empty: nothing complete."""

    epoch: int = 0
    version: int = 0
    used: int = 0
    digest: str = ""


class Slot:
    """One mapped buffer. Takes `fd`, and keeps it for handing the memory back to a new agent."""

    def __init__(self, fd: int, total_bytes: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, total_bytes)
        self.size_bytes = total_bytes
        self.content = Content()
        self.has_manifest = False

    def known(self) -> Content:
        """What is complete in here: by what this process knows, else by what the agent has committed."""
        if self.content.digest:
            return self.content
        try:
            found = commit_record.parse(os.pread(self.fd, commit_record.RECORD_BYTES, self.size_bytes))
        except OSError:
            found = None
        return Content(*found.stamp, found.used_bytes, found.digest) if found is not None else Content()

    def populate(self) -> None:
        """See `populate`."""
        populate(self._map)

    def put(self, at: int, data: bytes | bytearray) -> None:
        """Write small bytes."""
        self._map[at : at + len(data)] = data

    def view(self) -> memoryview:
        """All bytes."""
        return memoryview(self._map)


S = TypeVar("S", bound=Slot)


class Shard(Generic[S]):
    """Both slots of the shard of training rank `rank`, whose home is node rank `home`. pushed: agents fill them."""

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
        """Takes the descriptors. slot: maps one of so many bytes."""
        if len(fds) != 2:
            for fd in fds:
                os.close(fd)
            raise ValueError(f"the agent sent {len(fds)} descriptors for a shard, 2 wanted")
        self.rank, self.world, self.home, self.total_bytes = rank, world, home, total_bytes
        self.pushed, self._slot = pushed, slot
        self.slots = [slot(fd, total_bytes) for fd in fds]

    def of(self, fds: list[int]) -> Any:
        """The same shard in other memory."""
        return Shard(self.rank, self.world, self.home, self.total_bytes, fds, self._slot, pushed=self.pushed)

    def populate(self) -> None:
        """See `Slot.populate`."""
        for slot in self.slots:
            slot.populate()

    def close(self) -> None:
        """Give the descriptors up; the mappings end with the last tensor that views them."""
        for slot in self.slots:
            if slot.fd >= 0:
                os.close(slot.fd)
                slot.fd = -1


K = TypeVar("K", bound=Shard[Any])


class Keeper(Generic[K]):
    """The shard that one thread fills; where larger slots took its place, also the former ones, until a version in
    the new ones is sealed: until then the former hold the newest sealed version, which an agent that dies has to be
    given back."""

    def __init__(self) -> None:
        self.shard: K | None = None
        self.former: list[K] = []
        # Beside the agent itself another thread may write to the shard: only while it has `writing`, and `grants` is
        # what it was when the agent allowed it. Memory changes hands with both.
        self.writing = threading.Lock()
        self.grants = 0

    def outgrow(self, shard: K) -> None:
        """Fill `shard` from now on."""
        if self.shard is not None:
            self.former = [*self.former, self.shard]
        self.shard = shard

    def release(self, sealed: tuple[int, int]) -> None:
        """Give the former slots up if they are no longer needed. sealed: the newest sealed (epoch, version)."""
        if not self.former or self.shard is None:
            return
        contents = [slot.known() for slot in self.shard.slots]
        if any(c.digest and (c.epoch, c.version) <= sealed for c in contents):
            gone, self.former = self.former, []
            for shard in gone:
                shard.close()

    def close(self) -> None:
        """The training is over. A process that goes on after it (an evaluation) must not keep the node's memory."""
        shards = [*self.former, *([] if self.shard is None else [self.shard])]
        self.shard, self.former = None, []
        for shard in shards:
            shard.close()
