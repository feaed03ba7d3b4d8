"""The agents' cgroups as files: root's prolog makes them, an agent reads its remaining room, root ends them.

No failure here fails a prolog. An agent that cannot be moved stays in slurmd's cgroup and respects the limit of
that cgroup.
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
from gemini_hpc.node.meminfo import read_meminfo
from gemini_hpc.node.memory_cgroup import CgroupWrite, Choice, Place

BUSCTL = "/usr/bin/busctl"
SYSTEMD_BOOTED = "/run/systemd/system"
SYSTEMD_TIMEOUT_S = 3.0  # systemd may hang, and a prolog waits for it
_POLL_S = 0.01  # pause between two reads of the list of members
_END_S = 2.0  # a process that SIGKILL has not ended by then hangs in the kernel


@dataclass(frozen=True, slots=True)
class AgentCgroup:
    """The cgroup of one job's agent.

    Attributes:
        version: Version of the cgroup hierarchy, 1 or 2. 0 means that the agent has no cgroup of its own.
        directories: First the directory where the memory is counted, then those of v1's other hierarchies.
    """

    version: int = 0
    directories: tuple[str, ...] = ()


NO_GROUP = AgentCgroup()


def find_place(pid: int | str = "self") -> Place | None:
    """Return the memory cgroup of a process as this process sees it, or None if none is visible."""
    try:
        found = memory_cgroup.parse_place(_read_text(f"/proc/{pid}/cgroup"), _read_text("/proc/self/mountinfo"))
    except OSError:
        return None
    if found is None or _read_number(found.locate_directory(), memory_cgroup.name_usage_file(found.version)) < 0:
        return None
    return found


def find_lowest_limit(place: Place) -> tuple[int, str] | None:
    """Return (bytes, file with that limit) of the lowest limit from here up to the top, or None without a limit."""
    found: list[tuple[int, str]] = []
    for directory in place.walk_up():
        path = f"{directory}/{memory_cgroup.name_limit_file(place.version)}"
        with suppress(OSError, ValueError):
            if (limit := memory_cgroup.parse_limit(_read(path))) is not None:
                found.append((limit, path))
    return min(found, key=lambda each: each[0], default=None)


def _read_text(path: str) -> str:
    """Read a file of any bytes: users choose some names of mount points and cgroups."""
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        return f.read()


def compute_cap_bytes(settings: Settings, total_bytes: int) -> int:
    """Return the memory that all agents of a node may use together; `total_bytes` is the node's memory."""
    return settings.memory_cap_bytes or int(total_bytes * settings.memory_fraction)


def prepare(settings: Settings, total_bytes: int, agents: int) -> Choice:
    """Choose the agents' cgroup and, on v1 or a file-based v2, create it. Requires root.

    Args:
        settings: The site's settings.
        total_bytes: The node's memory.
        agents: Number of agents that get room for their own processes on top of the cap. Root counts them and sets
            the limit while it keeps every other prolog out.
    """
    place = find_place()
    choice = memory_cgroup.choose_cgroup(place, settings.agent_cgroup, systemd=os.path.isdir(SYSTEMD_BOOTED))
    if place is None or choice.how not in ("v1", "v2"):
        return choice
    used = max(0, _read_number(choice.directory, memory_cgroup.name_usage_file(place.version)))
    limit_bytes = compute_cap_bytes(settings, total_bytes) + agents * memory_cgroup.AGENT_ROOM_BYTES
    problem = _apply_steps(memory_cgroup.plan_agents_cgroup(place, choice, limit_bytes, used))
    return Choice("stay", why=problem) if problem else choice


def find_shortage(choice: Choice, settings: Settings) -> str:
    """Return why one more agent would take memory from others, perhaps from the training; "" if there is room."""
    place, needed = find_place(), memory_cgroup.AGENT_ROOM_BYTES
    free = read_meminfo()["MemAvailable"] - settings.memory_floor_bytes
    if free < needed:
        floor = _format_mib(settings.memory_floor_bytes)
        room = f"{_format_mib(free)} are free above the floor of {floor}"
        return f"no memory for its agent: it needs {_format_mib(needed)}, {room}"
    if place is None:
        return ""
    at = {"stay": place.path, "systemd": f"/{memory_cgroup.SLICE}"}.get(choice.how)
    for directory in replace(place, path=at or choice.directory.removeprefix(place.mount)).walk_up():
        free_here = _read_free_bytes(place.version, directory)
        if free_here is not None and free_here < needed:
            room = f"{directory} has {_format_mib(free_here)} left"
            return f"no memory for its agent: it needs {_format_mib(needed)}, {room}"
    return ""


def resize(group: AgentCgroup, limit_bytes: int) -> str:
    """Set a new limit for the cgroup of a running agent, never below its current use. Requires root.

    Return the error, or "".
    """
    if not group.version:
        return ""
    directory, name = group.directories[0], memory_cgroup.name_limit_file(group.version)
    used = _read_number(directory, memory_cgroup.name_usage_file(group.version))
    if not 0 <= used <= limit_bytes:  # -1: the cgroup is gone, with its agent
        return ""
    try:
        if _read(f"{directory}/{name}").strip() == str(limit_bytes):
            return ""
        if directory.endswith(".scope"):
            _run_busctl(memory_cgroup.build_resize_call(BUSCTL, os.path.basename(directory), limit_bytes))
        else:
            _write(f"{directory}/{name}", str(limit_bytes))
    except OSError as exc:
        return f"{directory}: its limit could not be set: {exc.strerror or exc}"
    return ""


def _apply_steps(steps: list[CgroupWrite]) -> str:
    """Carry out the steps. Return why a needed step failed, or ""."""
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


def admit(choice: Choice, job: int, pid: int, limit_bytes: int) -> tuple[AgentCgroup, str]:
    """Move the process that becomes the agent into the job's own cgroup. Requires root; bounded in time.

    Return the cgroup, and the error or "".
    """
    if choice.how == "stay":
        return NO_GROUP, choice.why
    if choice.how == "systemd":
        try:
            _ask_systemd(job, pid, limit_bytes)
        except OSError as exc:
            return NO_GROUP, f"systemd: {exc.strerror or exc}"
        scope = find_place(pid)
        if scope is None:
            return NO_GROUP, "the agent's scope is not visible"
        return AgentCgroup(2, (scope.locate_directory(),)), ""
    place = find_place()
    if place is None:  # it was visible when the choice was made
        return NO_GROUP, "no memory cgroup is visible any more"
    directory = memory_cgroup.locate_job_directory(choice, job)
    problem = _apply_steps(memory_cgroup.plan_job_cgroup(place, choice, job, limit_bytes)) or _enter(directory, pid)
    # v2: the parent cgroup holds processes of an older release. Sharing with them is better than staying in
    # slurmd's.
    if problem:
        return NO_GROUP, _enter(choice.directory, pid) or f"the agent has no cgroup of its own: {problem}"
    return AgentCgroup(place.version, (directory, *_enter_other_hierarchies(place, choice, job, pid))), ""


def _enter_other_hierarchies(place: Place, choice: Choice, job: int, pid: int) -> list[str]:
    """Enter the process into cgroups of v1's other hierarchies. Return the directories entered."""
    if place.version != 1:
        return []
    mountinfo = _read_text("/proc/self/mountinfo")
    below = choice.directory[len(place.mount) :]
    found = memory_cgroup.plan_other_hierarchies(mountinfo, below, job)
    return [at for at, steps in found.items() if not _apply_steps(steps) and not _enter(at, pid)]


def _enter(directory: str, pid: int) -> str:
    try:
        _write(f"{directory}/cgroup.procs", str(pid))
    except OSError as exc:
        return f"{directory}: {exc.strerror}"
    return ""


def list_members(group: AgentCgroup) -> list[int]:
    """Return the pids of the processes in the cgroup as this process sees them; none if the cgroup is gone."""
    try:
        return [int(line) for line in _read(f"{group.directories[0]}/cgroup.procs").split()]
    except (OSError, ValueError, IndexError):
        return []


def read_held_bytes(group: AgentCgroup) -> int:
    """Return the bytes of copies in the cgroup; 0 if they cannot be read."""
    try:
        return memory_cgroup.count_held_bytes(group.version, _read(f"{group.directories[0]}/memory.stat"))
    except (OSError, ValueError, IndexError):
        return 0


def end(group: AgentCgroup, timeout_s: float = _END_S) -> int:
    """Kill all processes in the cgroup, at once where the kernel can, and remove it. Requires root.

    Return the number of processes that it contained.

    Raises:
        OSError: Some processes are left after `timeout_s`. They hang in the kernel and die when it releases them.
    """
    first = len(list_members(group))
    deadline = clock.monotonic() + timeout_s
    while inside := list_members(group):
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
            except OSError:  # a dying process still counts as a member
                clock.sleep(_POLL_S)
    return first


def remove_empty(group: AgentCgroup) -> bool:
    """Remove the cgroup if it is empty. Return whether nothing of it is left. Requires root.

    A dying process still counts as a member.
    """
    for directory in group.directories:
        try:
            os.rmdir(directory)
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
                return False
    return True


def kill(group: AgentCgroup, inside: list[int]) -> None:
    """Kill every process in the cgroup. Requires root.

    No process may fork meanwhile. Where there is a freezer, all processes are frozen until each has its SIGKILL.
    """
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
                    if pid in list_members(group):  # the kernel may have given the pid to another process
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                finally:
                    os.close(process)
    finally:
        _freeze(group, "THAWED")


def _freeze(group: AgentCgroup, state: str) -> None:
    """Set the freezer state of a v1 cgroup. v2 kills all processes at once and needs no freezer."""
    for directory in group.directories if group.version == 1 else ():
        with suppress(OSError):
            _write(f"{directory}/freezer.state", state)


def _ask_systemd(job: int, pid: int, limit_bytes: int) -> None:
    _run_busctl(memory_cgroup.build_scope_call(BUSCTL, job, pid, limit_bytes))
    deadline = clock.monotonic() + SYSTEMD_TIMEOUT_S
    while True:  # the busctl call only queues the move
        found = find_place(pid)
        if found is not None and found.path.endswith(memory_cgroup.build_scope_name(job, pid)):
            return
        if clock.monotonic() > deadline:
            raise OSError("systemd did not create the scope in time")
        clock.sleep(_POLL_S)


def _run_busctl(call: list[str]) -> None:
    """Run a busctl command, bounded in time.

    Raises:
        OSError: The command failed or did not end in time.
    """
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
        place = find_place()
        self.path = place.path if place is not None else ""
        self._settings = settings
        self._version = place.version if place is not None else 0
        self._directories = list(place.walk_up()) if place is not None else []
        self._ours = 2 if place is not None and memory_cgroup.is_job_cgroup(place, settings.agent_cgroup) else 0

    def read_share_bytes(self) -> int | None:
        """Return this job's share of the cap as root has set it; None if the job has no cgroup of its own."""
        if not self._ours:
            return None
        try:
            most = memory_cgroup.parse_limit(self._read_limit(self._directories[0]))
        except (OSError, ValueError):
            return None
        return None if most is None else max(0, most - memory_cgroup.AGENT_ROOM_BYTES)

    def count_free_bytes(self) -> tuple[int, str] | None:
        """Return (bytes left until the nearest limit, name of that room), or None without a limit.

        The bytes exclude the room that is kept for the agents' own processes.
        """
        found = [
            free
            for at, directory in enumerate(self._directories)
            if (free := self._count_free_bytes_at(at, directory)) is not None
        ]
        return min(found, default=None)

    def _count_free_bytes_at(self, depth: int, directory: str) -> tuple[int, str] | None:
        """Return (bytes left, name of that room) for one cgroup above this process, or None without a limit.

        An agent's own processes use their reserved room first, as far as it goes.
        """
        free = _read_free_bytes(self._version, directory)
        if depth >= self._ours:
            return None if free is None else (max(0, free - memory_cgroup.AGENT_ROOM_BYTES), "")
        try:
            held = memory_cgroup.count_held_bytes(self._version, _read(f"{directory}/memory.stat"))
            if depth == 0:
                most, whose = self.read_share_bytes(), "this job"
            else:
                most, whose = self._compute_cap_bytes(), "all agents of this node"
                rooms = memory_cgroup.AGENT_ROOM_BYTES * sum(map(memory_cgroup.names_job, os.listdir(directory)))
                limit = memory_cgroup.parse_limit(self._read_limit(directory))
                most = most if limit is None else min(most, limit - rooms)
        except (OSError, ValueError):
            return None
        bounds = [bound for bound in (None if most is None else most - held, free) if bound is not None]
        return (max(0, min(bounds)), whose) if bounds else None

    def _compute_cap_bytes(self) -> int:
        return compute_cap_bytes(self._settings, read_meminfo()["MemTotal"])

    def _read_limit(self, directory: str) -> str:
        return _read(f"{directory}/{memory_cgroup.name_limit_file(self._version)}")


def _read_free_bytes(version: int, directory: str) -> int | None:
    """Return the bytes that a cgroup can still take; None if it has no limit, as the top of v2."""
    try:
        limit = _read(f"{directory}/{memory_cgroup.name_limit_file(version)}")
        usage = _read(f"{directory}/{memory_cgroup.name_usage_file(version)}")
        return memory_cgroup.compute_free_bytes(version, limit, usage, _read(f"{directory}/memory.stat"))
    except (OSError, ValueError):
        return None


def _format_mib(n: int) -> str:
    return f"{n / (1 << 20):,.0f} MiB"


def _read(path: str) -> str:
    with open(path, encoding="ascii") as f:
        return f.read()


def _read_number(directory: str, name: str) -> int:
    """Return the number in a cgroup's file; -1 if the file is missing, 0 at the top of v2, which has no such file."""
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
