"""Processes of this host, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

AGENT, CONTROL = b"gemini_hpc.agent", b"gemini_hpc.controller"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `arguments` is set by the process itself, and thus only a hint."""

    pid: int
    parent: int
    uid: int
    name: str
    arguments: tuple[bytes, ...]

    @property
    def agent_of(self) -> int | None:
        """Return the job whose agent (or agent's supervisor) this process is."""
        if AGENT not in self.arguments or b"--job" not in self.arguments:
            return None
        after = self.arguments[self.arguments.index(b"--job") + 1 :]
        return int(after[0]) if after and after[0].isdigit() and len(after[0]) <= 10 else None

    @property
    def controller(self) -> bool:
        """Return whether this process is the controller service."""
        return CONTROL in self.arguments or (
            b"controller" in self.arguments and any(a.endswith(b"gemini-hpc") for a in self.arguments[:3])
        )


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as f:
        return f.read(_MAX_BYTES)


def _uid(pid: str) -> int:
    """Return a process's effective uid.

    The owner of its files in /proc does not tell it, because those of an untraceable process, such as an
    agent, belong to root.
    """
    line = next(line for line in _read(pid, "status").splitlines() if line.startswith(b"Uid:"))
    return int(line.split()[2])


def _each() -> Iterator[Process]:
    for pid in os.listdir("/proc"):
        if not pid.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            before, _, after = _read(pid, "stat").rpartition(b")")
            name = before.partition(b"(")[2].decode(errors="replace")
            arguments = tuple(a for a in _read(pid, "cmdline").split(b"\0") if a)
            yield Process(int(pid), int(after.split()[1]), _uid(pid), name, arguments)


def processes() -> list[Process]:
    """Return all processes; a process that ends meanwhile is left out."""
    return list(_each())


def environment(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with; {} if it cannot be read."""
    with suppress(OSError):
        pairs = (entry.partition(b"=") for entry in _read(str(pid), "environ").split(b"\0"))
        return {name: value for name, _, value in pairs}
    return {}


def maps(pid: int, name: str) -> bool:
    """Return whether a process has a file of this name mapped.

    The result is True if the process has ended meanwhile, so that it is not reported.
    """
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as f:
            return any(f"/{name}" in line for line in f)
    except FileNotFoundError:
        return True


def sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process holds; an empty set if they cannot be read."""
    found: set[int] = set()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError, ValueError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
