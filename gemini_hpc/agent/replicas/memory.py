"""Replica memory: sealed memfds (never named files), whose pages are taken before use, and their budget."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gemini_hpc.client.mapped_slots import populate
from gemini_hpc.config import Settings, build_own_settings
from gemini_hpc.core.digest import Digest
from gemini_hpc.format import commit_record
from gemini_hpc.node import cgroup
from gemini_hpc.node.meminfo import read_meminfo

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # no further seal, no shrinking, no growing
_DIGEST_STRIDE_BYTES = 8 << 20
_RESERVE_STRIDE_BYTES = 16 << 20
_CLEAR_STRIDE_BYTES = 1 << 20


class NoMemory(Exception):
    """A reservation that does not fit. The message contains the numbers."""


class Memfd:
    """An anonymous file in memory of a fixed size. All its pages exist after `take_pages` or `reserve`."""

    def __init__(self, name: str, size_bytes: int, fd: int = -1, *, slot: bool = False) -> None:
        """Create the file, or wrap a descriptor.

        Args:
            name: Name of a new file, as shown in /proc.
            size_bytes: Usable bytes.
            fd: Descriptor to wrap, or -1 to create a file.
            slot: The file has room for a commit record behind the `size_bytes` bytes.
        """
        self.size_bytes = size_bytes
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._before_close: list[Callable[[], None]] = []
        self._closing = threading.Lock()
        self._record_bytes = commit_record.ROOM_BYTES if slot else 0
        if fd < 0:
            self.fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size_bytes + self._record_bytes)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)

    def reserve(self, count_left_bytes: Callable[[], int]) -> None:
        """Take and map all pages now (blocking, about 0.9 s a GiB).

        Later writes then cannot fail and cost no page faults.

        Args:
            count_left_bytes: See `take_pages`.

        Raises:
            NoMemory: The memory does not suffice.
        """
        self.take_pages(count_left_bytes)
        self.populate()

    def take_pages(self, count_left_bytes: Callable[[], int]) -> None:
        """Take all pages now (blocking, about 0.4 s a GiB).

        The pages are allocated and charged, so later writes cannot fail. The first write to a page clears and maps
        it.

        Args:
            count_left_bytes: Returns the bytes that may still be taken. Asked before each stride, because others take
                memory at the same time. The kernel does not refuse memory in a full cgroup, but kills.

        Raises:
            NoMemory: The memory does not suffice.
        """
        file_bytes = self.size_bytes + self._record_bytes
        for at in range(0, file_bytes, _RESERVE_STRIDE_BYTES):
            part = min(_RESERVE_STRIDE_BYTES, file_bytes - at)
            left = count_left_bytes()
            if left < part:
                raise NoMemory(
                    f"the node's memory ran short after {_format_mib(at)} of {_format_mib(self.size_bytes)}: "
                    f"{_format_mib(left)} left"
                )
            try:
                os.posix_fallocate(self.fd, at, part)
            except OSError as exc:
                raise NoMemory(f"the kernel refused {self.size_bytes} bytes: {os.strerror(exc.errno or 0)}") from None

    def populate(self) -> None:
        """Map all pages, which must have been taken (blocking, about 0.5 s a GiB). The content stays.

        Another thread may close the memory meanwhile: it is unmapped soon afterwards.

        Raises:
            ValueError: The memory has been given back.
        """
        populate(self._ensure_map(), lambda: self.fd < 0)

    def commit(self, committed: commit_record.Committed | None) -> None:
        """Write the commit record (as the last step), or blank it if None (as the first step).

        Memory without room for a record ignores the call.
        """
        if self._record_bytes:
            os.pwrite(
                self.fd, commit_record.BLANK if committed is None else commit_record.pack(committed), self.size_bytes
            )

    def view(self) -> memoryview:
        """Return all `size_bytes` bytes, writable, mapped at first use. Release the view before `close`."""
        return memoryview(self._ensure_map())

    def _ensure_map(self) -> mmap.mmap:
        if self.fd < 0:  # mmap would take -1 for anonymous memory
            raise ValueError("this memory has been given back")
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size_bytes)
        return self._map

    def digest(self, end: int, start: int = 0) -> str:
        """Return the digest of the bytes from `start` to `end`. The GIL is free meanwhile."""
        hasher = Digest()
        with self.view() as view:
            for at in range(start, end, _DIGEST_STRIDE_BYTES):
                hasher.update(view[at : min(end, at + _DIGEST_STRIDE_BYTES)])
        return hasher.to_hex()

    def open_read_only(self) -> int:
        """Return a new read-only descriptor of the same memory."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def call_before_close(self, release: Callable[[], None]) -> None:
        """Have a function called when the memory is given back: now, if it has been. Any thread may call this."""
        with self._closing:
            if self.fd >= 0:
                self._before_close.append(release)
                return
        release()

    def close(self) -> None:
        """Free the memory, unless another process still has it mapped."""
        with self._closing:
            fd, self.fd = self.fd, -1
            releases, self._before_close = self._before_close, []
        for release in releases:
            release()
        if self._map is not None:
            with suppress(BufferError):  # a digest or a pull still reads the memory; it is unmapped when they end
                self._map.close()
            self._map = None
        if fd >= 0:
            os.close(fd)


def clear(view: memoryview) -> None:
    """Fill memory with zeros (blocking)."""
    for at in range(0, len(view), _CLEAR_STRIDE_BYTES):
        with view[at : at + _CLEAR_STRIDE_BYTES] as part:
            part[:] = bytes(len(part))


def adopt(fd: int, size_bytes: int) -> Memfd:
    """Return a `Memfd` around a duplicate of a descriptor that a trainer handed back.

    A process that can shrink a file can kill the process that has it mapped. The seals are therefore checked.

    Raises:
        ValueError: The descriptor is no replica's memory, has other seals, or has another size.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        seals = -1
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if seals != _SEALS or not writable or not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:gemini"):
        raise ValueError("the descriptor handed back is not a replica's memory")
    info = os.fstat(fd)
    room = info.st_size - size_bytes
    if room not in (0, commit_record.ROOM_BYTES):
        raise ValueError(f"handed back {info.st_size} bytes, wanted {size_bytes}")
    if info.st_blocks * 512 < size_bytes:  # a file with holes would charge all agents of the node for filling them
        raise ValueError(f"handed back {info.st_blocks * 512} bytes of memory, wanted {size_bytes}")
    return Memfd("", size_bytes, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), slot=room > 0)


class Budget:
    """The memory of the node and its cgroup that one agent may take (requirement memory)."""

    def __init__(self, settings: Settings, share_bytes: int = 0, share: str = "") -> None:
        """Create the budget. If the job has a cgroup of its own, that cgroup defines the share.

        Args:
            settings: Settings of the agent.
            share_bytes: This job's share of the node's cap when its agent began. 0 means all.
            share: The share in words, for the user.
        """
        self._settings = settings
        self._floor_bytes = settings.memory_floor_bytes
        self._room = cgroup.Room(settings)
        self._share_bytes, self._share = share_bytes, share
        self.taken_bytes = 0

    @property
    def cap_bytes(self) -> int:
        """Return the most that this agent may take."""
        share = self._room.read_share_bytes()
        share = (self._share_bytes or None) if share is None else share
        return self._node_cap_bytes if share is None else min(share, self._node_cap_bytes)

    @property
    def _node_cap_bytes(self) -> int:
        return cgroup.compute_cap_bytes(self._settings, read_meminfo()["MemTotal"])

    @property
    def cgroup_path(self) -> str:
        """Return the memory cgroup that is charged, or "" if none is visible."""
        return self._room.path

    def measure_left_bytes(self) -> int:
        """Return the bytes that can be reserved now, given the node's free memory and the cgroup's."""
        free = read_meminfo()["MemAvailable"] - self._floor_bytes
        left = self._room.count_free_bytes()
        return max(0, free if left is None else min(free, left[0]))

    def reserve(self, wanted_bytes: int, name: str, *, present: bool = False) -> None:
        """Count a reservation.

        Args:
            wanted_bytes: Bytes to reserve.
            name: Name of the reservation, for the message.
            present: The pages exist already (a trainer hands them back), so only the cap counts.

        Raises:
            NoMemory: The reservation does not fit. The message contains the numbers.
        """
        cap, available, left = self.cap_bytes, read_meminfo()["MemAvailable"], self._room.count_free_bytes()
        if self.taken_bytes + wanted_bytes > cap:
            why = f" beside {_format_mib(self.taken_bytes)} already held, {self._describe_cap(cap)}"
        elif not present and wanted_bytes > available - self._floor_bytes:
            why = f", available {_format_mib(available)} less the floor of {_format_mib(self._floor_bytes)}"
        elif not present and left is not None and wanted_bytes > left[0]:
            whose = f" for {left[1]}" if left[1] else ""
            why = f", the memory cgroup {self._room.path} has {_format_mib(left[0])} left{whose}"
        else:
            self.taken_bytes += wanted_bytes
            return
        raise NoMemory(f"{name}: not enough memory for the replicas: wanted {_format_mib(wanted_bytes)}{why}")

    def _describe_cap(self, cap: int) -> str:
        s, all_of_it = self._settings, self._node_cap_bytes
        source = "memory_cap_bytes" if s.memory_cap_bytes else f"memory_fraction {s.memory_fraction:g}"
        if cap == all_of_it:
            return f"the node's cap is {_format_mib(cap)} ({source})"
        if s == build_own_settings():
            return (
                f"the job's agents may take {_format_mib(cap)} ({self._share}); "
                "more memory for the job (--mem) raises it"
            )
        part = f" ({self._share})" if self._share else ""
        return (
            f"the job's share of the node{part} is {_format_mib(cap)} of its cap of {_format_mib(all_of_it)} "
            f"({source}); more CPUs or GPUs of the node, or --exclusive, raise it"
        )

    def release(self, given_bytes: int) -> None:
        """Return a freed reservation to the budget."""
        self.taken_bytes -= given_bytes

    @contextmanager
    def hold(self, wanted_bytes: int, what: str, *owned: Memfd, present: bool = False) -> Iterator[list[Memfd]]:
        """Count a reservation for memory that the block makes and adds to the list.

        If the block fails, the memory in the list is closed, and the reservation is returned to the budget.

        Args:
            wanted_bytes: Bytes to reserve.
            what: Name of the reservation, for the message.
            owned: Memory that is in the list from the beginning.
            present: See `reserve`.

        Raises:
            NoMemory: The reservation does not fit, or its memory does not suffice.
        """
        made, counted_bytes = list(owned), 0
        try:
            self.reserve(wanted_bytes, what, present=present)
            counted_bytes = wanted_bytes
            yield made
        except BaseException as exc:
            for memory in made:
                memory.close()
            self.release(counted_bytes)
            if counted_bytes and isinstance(exc, (NoMemory, OSError)):
                raise NoMemory(f"{what}: {exc}") from None
            raise

    def free(self, memory: Memfd) -> None:
        """Free reserved memory, unless it was closed before."""
        if memory.fd >= 0:
            memory.close()
            self.release(memory.size_bytes)

    def is_below_floor(self, share: float = 1.0) -> bool:
        """Return whether the node's free memory is below the floor, or below this share of it."""
        return read_meminfo()["MemAvailable"] < share * self._floor_bytes


def _format_mib(n: int) -> str:
    return f"{n / (1 << 20):,.0f} MiB"
