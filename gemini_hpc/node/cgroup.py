"""The agents' cgroup: root's prolog makes it and puts the agent in, the agent reads what is left in it, root ends it.

Nothing here ever fails a prolog: an agent that cannot be moved stays in slurmd's cgroup, and minds that one's limit.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from dataclasses import dataclass

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.node import memory_cgroup
from gemini_hpc.node.memory_cgroup import Choice, Place, Step

BUSCTL = "/usr/bin/busctl"
SYSTEMD_BOOTED = "/run/systemd/system"
SYSTEMD_TIMEOUT_S = 3.0
_POLL_S = 0.01
_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """The cgroup of one job's agent; version 0: it has none of its own. directories: where the memory is counted,
    then those of v1's other hierarchies."""

    version: int = 0
    directories: tuple[str, ...] = ()


NO_GROUP = Group()


def place(pid: int | str = "self") -> Place | None:
    """The memory cgroup of a process, as seen from here."""
    try:
        found = memory_cgroup.place(_text(f"/proc/{pid}/cgroup"), _text("/proc/self/mountinfo"))
    except OSError:
        return None
    return (
        found
        if found is not None and _bytes(found.directory(), memory_cgroup.usage_file(found.version)) >= 0
        else None
    )


def lowest_limit(here: Place) -> tuple[int, str] | None:
    """Return (bytes, file that says so) of the lowest limit on the way up; None where there is none."""
    lowest: tuple[int, str] | None = None
    for directory in here.chain():
        path = f"{directory}/{memory_cgroup.limit_file(here.version)}"
        try:
            with open(path, encoding="ascii", errors="replace") as f:
                text = f.read(64).strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < memory_cgroup.UNLIMITED and (lowest is None or int(text) < lowest[0]):
            lowest = int(text), path
    return lowest


def _text(path: str) -> str:
    """Names of mount points, and of cgroups, are any bytes; users choose some."""
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        return f.read()


def cap_bytes(settings: Settings, total_bytes: int) -> int:
    """What the agents of a node may take together; total_bytes: the node's memory."""
    return settings.memory_cap_bytes or int(total_bytes * settings.memory_fraction)


def limit_bytes(settings: Settings, total_bytes: int) -> int:
    """The kernel's limit: the cap, and room for the agents' own processes."""
    return cap_bytes(settings, total_bytes) + memory_cgroup.AGENTS_ROOM_BYTES


def prepare(settings: Settings, total_bytes: int) -> Choice:
    """By root: choose, and make the cgroup where it is made of files."""
    here = place()
    choice = memory_cgroup.choose(here, settings.agent_cgroup, systemd=os.path.isdir(SYSTEMD_BOOTED))
    if here is None or choice.how not in ("v1", "v2"):
        return choice
    used = max(0, _bytes(choice.directory, memory_cgroup.usage_file(here.version)))
    problem = _take(memory_cgroup.preparation(here, choice, limit_bytes(settings, total_bytes), used))
    return Choice("stay", why=problem) if problem else choice


def _take(steps: list[Step]) -> str:
    """Why a step that is needed could not be done, or ""."""
    for step in steps:
        try:
            if step.text is None:
                with suppress(FileExistsError):
                    os.mkdir(step.path, 0o755)
            else:
                _write(step.path, step.text)
        except OSError as exc:
            if step.needed:
                return f"{step.path}: {exc.strerror}"
    return ""


def admit(choice: Choice, job: int, pid: int, limit_bytes: int) -> tuple[Group, str]:
    """By root: move a process of ours that will become the agent into the job's own cgroup; the cgroup, and what went
    wrong, or "". Bounded in time."""
    if choice.how == "stay":
        return NO_GROUP, choice.why
    if choice.how == "systemd":
        try:
            _ask_systemd(job, pid, limit_bytes)
        except OSError as exc:
            return NO_GROUP, f"systemd: {exc.strerror or exc}"
        there = place(pid)
        return (
            (Group(2, (there.directory(),)), "")
            if there is not None
            else (NO_GROUP, "the agent's scope is not visible")
        )
    here = place()
    assert here is not None
    directory = memory_cgroup.job_directory(choice, job)
    problem = _take(memory_cgroup.of_job(here, choice, job, limit_bytes)) or _enter(directory, pid)
    if problem:  # v2: processes of an older release in the cgroup itself; better with them than in slurmd's
        return NO_GROUP, _enter(choice.directory, pid) or f"the agent has no cgroup of its own: {problem}"
    return Group(here.version, (directory, *_beside(here, choice, job, pid))), ""


def _beside(here: Place, choice: Choice, job: int, pid: int) -> list[str]:
    """Where else v1 has cgroups for it, entered."""
    if here.version != 1:
        return []
    mountinfo = _text("/proc/self/mountinfo")
    below = choice.directory[len(here.mount) :]
    found = memory_cgroup.beside(mountinfo, below, job)
    return [at for at, steps in found.items() if not _take(steps) and not _enter(at, pid)]


def _enter(directory: str, pid: int) -> str:
    try:
        _write(f"{directory}/cgroup.procs", str(pid))
    except OSError as exc:
        return f"{directory}: {exc.strerror}"
    return ""


def members(group: Group) -> list[int]:
    """Pids of the processes in it, as they are seen from here; none where it is gone."""
    try:
        return [int(line) for line in _read(f"{group.directories[0]}/cgroup.procs").split()]
    except (OSError, ValueError, IndexError):
        return []


def end(group: Group, timeout_s: float = _END_S) -> int:
    """By root: kill whatever is in it, all at once where the kernel can, and remove it; how many there were.
    Raises OSError where some are left after `timeout_s`: those hang in the kernel, and die when it lets go."""
    first = len(members(group))
    deadline = clock.monotonic() + timeout_s
    while inside := members(group):
        if clock.monotonic() > deadline:
            raise OSError(16, f"{len(inside)} processes in {group.directories[0]} do not end")
        kill(group, inside)
        clock.sleep(_POLL_S)
    for directory in group.directories:
        while clock.monotonic() < deadline:
            try:
                os.rmdir(directory)
                break
            except FileNotFoundError:
                break
            except OSError:  # a process that is just dying is still in it
                clock.sleep(_POLL_S)
    return first


def remove_empty(group: Group) -> bool:
    """By root: remove it if nobody is in it; whether nothing of it is left. A process that is just dying is in it."""
    for directory in group.directories:
        try:
            os.rmdir(directory)
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                return False
    return True


def kill(group: Group, inside: list[int]) -> None:
    """By root: every process that is in it. Nobody may fork meanwhile, and where there is a freezer all stand still
    until each has been told to die."""
    for directory in group.directories:
        with suppress(OSError):
            _write(f"{directory}/pids.max", "0")
    if group.version == 2:
        with suppress(OSError):  # Linux before 5.14 has no such file
            _write(f"{group.directories[0]}/cgroup.kill", "1")
            return
    _freeze(group, "FROZEN")
    try:
        for pid in inside:
            with suppress(OSError):
                process = os.pidfd_open(pid)
                try:
                    if pid in members(group):  # its number may have become another process's
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                finally:
                    os.close(process)
    finally:
        _freeze(group, "THAWED")


def _freeze(group: Group, state: str) -> None:
    """Of v1; v2 kills all at once."""
    for directory in group.directories if group.version == 1 else ():
        with suppress(OSError):
            _write(f"{directory}/freezer.state", state)


def _ask_systemd(job: int, pid: int, limit_bytes: int) -> None:
    import subprocess

    try:
        done = subprocess.run(
            memory_cgroup.scope_call(BUSCTL, job, pid, limit_bytes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=SYSTEMD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError("busctl did not answer in time") from None
    if done.returncode:
        raise OSError(f"busctl: {done.stderr.decode(errors='replace').strip()[:200]}")
    deadline = clock.monotonic() + SYSTEMD_TIMEOUT_S
    while True:  # the call only queues the move
        found = place(pid)
        if found is not None and found.path.endswith(memory_cgroup.scope_name(job, pid)):
            return
        if clock.monotonic() > deadline:
            raise OSError("systemd did not create the scope in time")
        clock.sleep(_POLL_S)


class Room:
    """What the cgroups of this process can still take."""

    def __init__(self) -> None:
        here = place()
        self.path = here.path if here is not None else ""
        self._version = here.version if here is not None else 0
        self._directories = list(here.chain()) if here is not None else []

    def left_bytes(self) -> int | None:
        """Bytes until the nearest limit, without what is kept for the agents' own processes; None: there is none."""
        found = [n for n in map(self._left, self._directories) if n is not None]
        return max(0, min(found) - memory_cgroup.AGENTS_ROOM_BYTES) if found else None

    def _left(self, directory: str) -> int | None:
        try:
            limit = _read(f"{directory}/{memory_cgroup.limit_file(self._version)}")
            usage = _read(f"{directory}/{memory_cgroup.usage_file(self._version)}")
            return memory_cgroup.left(self._version, limit, usage, _read(f"{directory}/memory.stat"))
        except (OSError, ValueError):  # the top has no limit in v2
            return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as f:
        return f.read()


def _bytes(directory: str, name: str) -> int:
    """-1 where there is no such file; at the top of v2 there is none, but the directory is."""
    try:
        return int(_read(f"{directory}/{name}"))
    except (OSError, ValueError):
        return 0 if os.path.exists(f"{directory}/cgroup.procs") else -1


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
