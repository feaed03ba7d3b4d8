"""The agents' cgroup: root's prolog makes it and puts the agent in, the agent reads what is left in it, root ends it.

Nothing here ever fails a prolog: an agent that cannot be moved stays in slurmd's cgroup, and minds that one's limit.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, replace

from gemini_hpc import clock
from gemini_hpc.config import Settings
from gemini_hpc.node import memory_cgroup
from gemini_hpc.node.meminfo import meminfo
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


def prepare(settings: Settings, total_bytes: int, agents: int) -> Choice:
    """Choose the agents' cgroup, and make it where it is made of files. By root.

    agents: how many have room in it beside the cap; root counts them and sets the limit while no other prolog does.
    """
    here = place()
    choice = memory_cgroup.choose(here, settings.agent_cgroup, systemd=os.path.isdir(SYSTEMD_BOOTED))
    if here is None or choice.how not in ("v1", "v2"):
        return choice
    used = max(0, _bytes(choice.directory, memory_cgroup.usage_file(here.version)))
    limit_bytes = cap_bytes(settings, total_bytes) + agents * memory_cgroup.AGENT_ROOM_BYTES
    problem = _take(memory_cgroup.preparation(here, choice, limit_bytes, used))
    return Choice("stay", why=problem) if problem else choice


def no_room(choice: Choice, settings: Settings) -> str:
    """Return why one more agent would take memory of others, perhaps of the training; "" where it would not."""
    here, needed = place(), memory_cgroup.AGENT_ROOM_BYTES
    free = meminfo()["MemAvailable"] - settings.memory_floor_bytes
    if free < needed:
        floor = _mib(settings.memory_floor_bytes)
        return f"no memory for its agent: it needs {_mib(needed)}, {_mib(free)} are free above the floor of {floor}"
    if here is None:
        return ""
    at = {"stay": here.path, "systemd": f"/{memory_cgroup.SLICE}"}.get(choice.how)
    for directory in replace(here, path=at or choice.directory.removeprefix(here.mount)).chain():
        free_here = _left(here.version, directory)
        if free_here is not None and free_here < needed:
            return f"no memory for its agent: it needs {_mib(needed)}, {directory} has {_mib(free_here)} left"
    return ""


def resize(group: Group, limit_bytes: int) -> str:
    """Set another limit for the cgroup of a running agent, never below what is taken; return what failed, or "".

    By root.
    """
    if not group.version:
        return ""
    directory, name = group.directories[0], memory_cgroup.limit_file(group.version)
    used = _bytes(directory, memory_cgroup.usage_file(group.version))
    if not 0 <= used <= limit_bytes:  # -1: it is gone, with its agent
        return ""
    try:
        if _read(f"{directory}/{name}").strip() == str(limit_bytes):
            return ""
        if directory.endswith(".scope"):
            _ask(memory_cgroup.resize_call(BUSCTL, os.path.basename(directory), limit_bytes))
        else:
            _write(f"{directory}/{name}", str(limit_bytes))
    except OSError as exc:
        return f"{directory}: its limit could not be set: {exc.strerror or exc}"
    return ""


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


def held_bytes(group: Group) -> int:
    """Return the bytes of copies in it; 0 where that cannot be known."""
    try:
        return memory_cgroup.held(group.version, _read(f"{group.directories[0]}/memory.stat"))
    except (OSError, ValueError, IndexError):
        return 0


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
    _ask(memory_cgroup.scope_call(BUSCTL, job, pid, limit_bytes))
    deadline = clock.monotonic() + SYSTEMD_TIMEOUT_S
    while True:  # the call only queues the move
        found = place(pid)
        if found is not None and found.path.endswith(memory_cgroup.scope_name(job, pid)):
            return
        if clock.monotonic() > deadline:
            raise OSError("systemd did not create the scope in time")
        clock.sleep(_POLL_S)


def _ask(call: list[str]) -> None:
    """Run a call of busctl's; bounded in time. Raises `OSError`."""
    import subprocess

    try:
        done = subprocess.run(
            call,
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


class Room:
    """The room for copies in the cgroups of this process."""

    def __init__(self, settings: Settings) -> None:
        here = place()
        self.path = here.path if here is not None else ""
        self._settings = settings
        self._version = here.version if here is not None else 0
        self._directories = list(here.chain()) if here is not None else []
        self._ours = 2 if here is not None and memory_cgroup.is_a_jobs(here, settings.agent_cgroup) else 0

    def share_bytes(self) -> int | None:
        """Return what root has set as this job's share of the cap; None where the job has no cgroup of its own."""
        if not self._ours:
            return None
        try:
            most = memory_cgroup.bound(self._limit(self._directories[0]))
        except (OSError, ValueError):
            return None
        return None if most is None else max(0, most - memory_cgroup.AGENT_ROOM_BYTES)

    def left_bytes(self) -> tuple[int, str] | None:
        """Return the bytes until the nearest limit, without what is kept for the agents' own processes, and whose
        they are; None: there is no limit."""
        found = [
            each for at, directory in enumerate(self._directories) if (each := self._left(at, directory)) is not None
        ]
        return min(found, default=None)

    def _left(self, at: int, directory: str) -> tuple[int, str] | None:
        """Return the bytes left in one cgroup above this process, and whose room that is; None without a limit.

        What agents take for themselves comes from their own room, as far as that goes.
        """
        free = _left(self._version, directory)
        if at >= self._ours:
            return None if free is None else (max(0, free - memory_cgroup.AGENT_ROOM_BYTES), "")
        try:
            held = memory_cgroup.held(self._version, _read(f"{directory}/memory.stat"))
            if at == 0:
                most, whose = self.share_bytes(), "this job"
            else:
                most, whose = self._cap_bytes(), "all agents of this node"
                rooms = memory_cgroup.AGENT_ROOM_BYTES * sum(map(memory_cgroup.names_job, os.listdir(directory)))
                limit = memory_cgroup.bound(self._limit(directory))
                most = most if limit is None else min(most, limit - rooms)
        except (OSError, ValueError):
            return None
        bounds = [each for each in (None if most is None else most - held, free) if each is not None]
        return (max(0, min(bounds)), whose) if bounds else None

    def _cap_bytes(self) -> int:
        return cap_bytes(self._settings, meminfo()["MemTotal"])

    def _limit(self, directory: str) -> str:
        return _read(f"{directory}/{memory_cgroup.limit_file(self._version)}")


def _left(version: int, directory: str) -> int | None:
    """Return what a cgroup can still take; None: it has no limit, as the top of v2."""
    try:
        limit = _read(f"{directory}/{memory_cgroup.limit_file(version)}")
        usage = _read(f"{directory}/{memory_cgroup.usage_file(version)}")
        return memory_cgroup.left(version, limit, usage, _read(f"{directory}/memory.stat"))
    except (OSError, ValueError):
        return None


def _mib(n: int) -> str:
    return f"{n / (1 << 20):,.0f} MiB"


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
