"""Processes identified by pid and start time, so that a recycled pid is never mistaken for the old process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gemini_hpc.devcluster.layout import load_record

PROC = Path("/proc")


class ProcessId(msgspec.Struct, frozen=True):
    """A process as the host sees it.

    `start` is field 22 of /proc/PID/stat, in clock ticks since boot.
    """

    pid: int
    start: int


def identify(pid: int) -> ProcessId | None:
    """Return the process that has `pid` now, None if there is none, or only a zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def is_alive(process: ProcessId) -> bool:
    """Return whether a process is alive."""
    return identify(process.pid) == process


def load_living(path: Path) -> ProcessId | None:
    """Return the process recorded in a file, None if the file is missing or incomplete, or the process has ended."""
    process = load_record(path, ProcessId)
    return process if process is not None and is_alive(process) else None


def end(process: ProcessId, sig: signal.Signals | None = signal.SIGKILL, wait_s: float = 10.0) -> bool:
    """Send `sig`, if any, and wait until the process is gone; return False if it is still there after `wait_s`."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return True
    try:
        # Checked after the pidfd was opened: from here on the descriptor cannot mean another process.
        if not is_alive(process):
            return True
        if sig is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, sig)
        return bool(select.select([fd], [], [], wait_s)[0])
    finally:
        os.close(fd)


def find_by_environment(*settings: str) -> Iterator[ProcessId]:
    """Yield all processes whose environment at start had every one of `settings` ("NAME=value")."""
    wanted = {setting.encode() for setting in settings}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted <= set(environment.split(b"\0")) and (found := identify(int(entry.name))):
            yield found


def read_namespace(pid: int | str, kind: str) -> str:
    """Return the identity of a process's namespace, such as "net:[4026531840]"; "" if the process is gone."""
    try:
        return os.readlink(PROC / str(pid) / "ns" / kind)
    except OSError:
        return ""


def find_in_namespace(pid_namespace: str, inner_pid: int) -> ProcessId | None:
    """Return the process that has the pid `inner_pid` within a pid namespace."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or read_namespace(entry.name, "pid") != pid_namespace:
            continue
        try:
            status = (entry / "status").read_text()
        except OSError:
            continue
        names = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        if names and int(names[-1]) == inner_pid:
            return identify(int(entry.name))
    return None
