"""The choice of the memory cgroup for agents, from what /proc shows of memory cgroups (requirement memory).

The prolog is a child of slurmd, and without a move so is the agent. slurmd's cgroup may be limited to MemSpecLimit:
replicas in it would get slurmd killed. So the agents of a node have a cgroup of their own beside slurmd's. Each job
has one cgroup in it. Processes there are outside of Slurm's limits, so the cgroup has limits of its own, and root
can end it as a whole. A job's limit is its share of the site's cap; the limit of all agents is the cap. Both limits
add room for each agent's own processes. The files needed depend on cgroup v1, v2 and systemd. This module only
chooses; `cgroup` writes.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gemini_hpc.node.mounts import Mount, parse_mountinfo

DEFAULT_PATH = "/gemini-hpc"
NONE = "none"
_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
SLICE = "geminihpc.slice"  # systemd reads "-" in a slice's name as a level
# Room above the cap in the kernel's limit for each agent's own processes: the agent then refuses a reservation with
# numbers before the kernel kills a process. An agent takes 28 MiB, and 32 MiB more while two of its workers save.
AGENT_ROOM_BYTES = 96 << 20
UNLIMITED = 1 << 60  # v1 writes a huge number for "no limit"
# Most processes and threads of one job's agent: the agent has some 50, its workers have more.
TASKS_MAX = 512
_CONTROLLERS = ("memory", "cpu", "pids")  # of v2; enabled one at a time, because a kernel may lack some
_WEIGHT = "100"  # the default weight of a v2 cgroup; v1's default shares are 1024
_SHARES = "1024"
# null, zero, full, random, urandom, the controlling terminal: no device that computes, stores or reaches a network.
_DEVICES = ("c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:0 rwm")
_SCOPE = re.compile(r"geminihpc-[0-9]+-[0-9]+\.scope")


@dataclass(frozen=True, slots=True)
class Place:
    """The memory cgroup of a process.

    Attributes:
        version: Version of the cgroup hierarchy, 1 or 2.
        mount: Directory where the hierarchy is mounted.
        path: Path of the cgroup below the mount; "/" is the top.
        writable: Whether the mount is writable.
    """

    version: int
    mount: str
    path: str
    writable: bool

    def locate_directory(self, path: str | None = None) -> str:
        """Return the directory of `path` (default: the process's own)."""
        below = (self.path if path is None else path).strip("/")
        return f"{self.mount}/{below}" if below else self.mount

    def walk_up(self) -> Iterator[str]:
        """Yield the process's own directory and all above it, each of which may have a limit."""
        path = self.path
        while True:
            yield self.locate_directory(path)
            if path == "/":
                return
            path = os.path.dirname(path)


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of the agents' cgroup.

    Attributes:
        how: "v1" or "v2" (files below `directory`), "systemd" (a scope in `SLICE`), or "stay" (in slurmd's cgroup).
        directory: The agents' cgroup for "v1" and "v2".
        why: Reason for "stay"; empty if there is no cgroup to leave or the site has chosen it.
    """

    how: str
    directory: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class CgroupWrite:
    """A single write below a cgroup mount.

    Attributes:
        path: The file or directory.
        text: Text for the file; None makes the directory.
        needed: Whether a failure of this step counts.
    """

    path: str
    text: str | None = None
    needed: bool = True


def parse_place(cgroup: str, mountinfo: str) -> Place | None:
    """Return the memory cgroup in the texts of /proc/PID/cgroup and /proc/PID/mountinfo; None if none is visible."""
    for version, path in _parse_memory_paths(cgroup):
        mount = _find_mount(mountinfo, version)
        if mount is None:
            continue
        if mount.root not in ("/", path) and not path.startswith(mount.root + "/"):
            continue  # a container may mount only a part of the hierarchy, without this process's cgroup
        below = path if mount.root == "/" else path[len(mount.root) :] or "/"
        if ".." not in below.split("/"):
            return Place(version, mount.point, below, "ro" not in mount.options)
    return None


def _parse_memory_paths(cgroup: str) -> list[tuple[int, str]]:
    """Return (version, path) of v1's memory controller if it is in use, else of v2's hierarchy."""
    found: list[tuple[int, str]] = []
    for line in cgroup.splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if not path.startswith("/"):
            continue
        if "memory" in controllers.split(","):
            return [(1, path)]
        if line.startswith("0::"):
            found.append((2, path))
    return found


def _find_mount(mountinfo: str, version: int, controller: str = "memory") -> Mount | None:
    """Return the topmost mount of the hierarchy; for v1, of that controller."""
    found: Mount | None = None
    for mount in parse_mountinfo(mountinfo):
        wanted = mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and controller in mount.options
        # a later mount covers an earlier one on the same point
        if wanted and (found is None or mount.point == found.point):
            found = mount
    return found


def choose_cgroup(place: Place | None, setting: str, *, systemd: bool) -> Choice:
    """Choose the cgroup for the agents of this node.

    On v2 the whole tree belongs to systemd, so systemd makes the cgroup. On v1 systemd shares the tree.

    Args:
        place: The prolog's own place.
        setting: `agent_cgroup` of gemini.toml.
        systemd: Whether systemd runs this host.
    """
    if setting == NONE or place is None:
        missing = setting not in ("", NONE)
        return Choice("stay", why=f"agent_cgroup is {setting!r}, and no memory cgroup is visible here" * missing)
    if not setting and systemd and place.version == 2:
        return Choice("systemd")
    path = setting or DEFAULT_PATH
    if not path.startswith("/") or path.rstrip("/") != os.path.normpath(path) or path == "/":
        return Choice("stay", why=f"agent_cgroup is {setting!r}: wanted a path such as {DEFAULT_PATH!r}")
    path = os.path.normpath(path)
    if not place.writable:
        return Choice("stay", why=f"{place.mount} is mounted read-only")
    if place.path != "/" and f"{path}/".startswith(f"{place.path}/"):
        return Choice("stay", why=f"agent_cgroup {path} lies in slurmd's own cgroup {place.path}")
    return Choice(f"v{place.version}", place.locate_directory(path))


def plan_agents_cgroup(place: Place, choice: Choice, limit_bytes: int, used_bytes: int) -> list[CgroupWrite]:
    """Return the steps that make the agents' cgroup or update its limit.

    Args:
        place: The prolog's own place.
        choice: The chosen cgroup.
        limit_bytes: The limit of all agents together.
        used_bytes: Bytes in use in the cgroup now. The limit is never set below them: v2 kills where v1 refuses.
    """
    below = choice.directory[len(place.mount) :].strip("/").split("/")
    above = ["/".join([place.mount, *below[:n]]) for n in range(len(below))]
    steps = []
    for parent, name in zip(above, below, strict=True):
        # the controller may be on already; if it cannot be enabled, the limit's file is missing
        if place.version == 2:
            steps += [
                CgroupWrite(f"{parent}/cgroup.subtree_control", f"+{name}", needed=False) for name in _CONTROLLERS
            ]
        steps.append(CgroupWrite(f"{parent}/{name}"))
    swap = "memory.swap.max" if place.version == 2 else "memory.swappiness"
    steps.append(CgroupWrite(f"{choice.directory}/{swap}", "0", needed=False))
    if limit_bytes >= used_bytes:
        steps.append(CgroupWrite(f"{choice.directory}/{name_limit_file(place.version)}", str(limit_bytes)))
    return steps


def plan_job_cgroup(place: Place, choice: Choice, job: int, limit_bytes: int) -> list[CgroupWrite]:
    """Return the steps that make the memory cgroup of one job's agent, with `limit_bytes` as its limit."""
    directory = locate_job_directory(choice, job)
    if place.version == 1:
        return [
            CgroupWrite(directory),
            CgroupWrite(f"{directory}/memory.swappiness", "0", needed=False),
            # v1 refuses a limit below current use
            CgroupWrite(f"{directory}/memory.limit_in_bytes", str(limit_bytes), needed=False),
        ]
    control = f"{choice.directory}/cgroup.subtree_control"
    return [
        *(CgroupWrite(control, f"+{name}", needed=name == "memory") for name in _CONTROLLERS),
        CgroupWrite(directory),
        CgroupWrite(f"{directory}/memory.max", str(limit_bytes)),
        CgroupWrite(f"{directory}/memory.swap.max", "0", needed=False),
        CgroupWrite(f"{directory}/cpu.weight", _WEIGHT, needed=False),
        CgroupWrite(f"{directory}/pids.max", str(TASKS_MAX), needed=False),
    ]


def locate_job_directory(choice: Choice, job: int) -> str:
    """Return the directory where the memory of one job's agent is counted."""
    return f"{choice.directory}/{job}"


def plan_other_hierarchies(mountinfo: str, below: str, job: int) -> dict[str, list[CgroupWrite]]:
    """Return the steps that make the job's cgroups in v1's other mounted hierarchies, by directory.

    v1 has a hierarchy for each controller. `below` is the path of the agents' cgroup in each. A hierarchy that is
    not writable is left out.
    """
    settings = {
        "devices": [("devices.deny", "a"), *(("devices.allow", device) for device in _DEVICES)],
        "cpu": [("cpu.shares", _SHARES)],
        "pids": [("pids.max", str(TASKS_MAX))],
        "freezer": [],
    }
    made: dict[str, list[CgroupWrite]] = {}
    for controller, values in settings.items():
        mount = _find_mount(mountinfo, 1, controller)
        if mount is None or "ro" in mount.options:
            continue
        parts = [*below.strip("/").split("/"), str(job)]
        paths = ["/".join([mount.point, *parts[: n + 1]]) for n in range(len(parts))]
        steps = [CgroupWrite(path) for path in paths] if paths[-1] not in made else made[paths[-1]]
        made[paths[-1]] = [*steps, *(CgroupWrite(f"{paths[-1]}/{name}", text, needed=False) for name, text in values)]
    return made


def name_usage_file(version: int) -> str:
    """Return the name of the file with the current use of a cgroup in bytes."""
    return "memory.current" if version == 2 else "memory.usage_in_bytes"


def parse_limit(limit: str) -> int | None:
    """Return the limit in bytes in the text of a limit file; None for no limit."""
    text = limit.strip()
    return None if text == "max" or int(text) >= UNLIMITED else int(text)


def compute_free_bytes(version: int, limit: str, usage: str, stat: str) -> int | None:
    """Return the bytes that a cgroup can still take, from the texts of its files; None without a limit.

    Args:
        version: Version of the cgroup hierarchy.
        limit: Text of the limit file.
        usage: Text of the usage file.
        stat: Text of memory.stat. Cached file pages count as free.
    """
    most = parse_limit(limit)
    if most is None:
        return None
    return max(0, most - int(usage) + _sum_lines(version, stat, "active_file", "inactive_file"))


def count_held_bytes(version: int, stat: str) -> int:
    """Return the bytes of copies in a cgroup from its memory.stat: shared memory, which includes files of tmpfs."""
    return _sum_lines(version, stat, "shmem")


def _sum_lines(version: int, stat: str, *names: str) -> int:
    """Return the sum of lines of memory.stat; in v1, of those that include the cgroups below."""
    prefix = "" if version == 2 else "total_"
    wanted = {prefix + name for name in names}
    lines = (line.split() for line in stat.splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in wanted)


def names_job(name: str) -> bool:
    """Return whether a name in the agents' cgroup is one job's (see `locate_job_directory`, `build_scope_name`)."""
    return (name.isascii() and name.isdecimal()) or _SCOPE.fullmatch(name) is not None


def is_job_cgroup(place: Place, setting: str) -> bool:
    """Return whether a process is in the cgroup of one job's agent; `setting` is `agent_cgroup` of gemini.toml."""
    above, _, name = place.path.rpartition("/")
    scope = _SCOPE.fullmatch(name) is not None and above.endswith(f"/{SLICE}")
    return scope or (names_job(name) and above == os.path.normpath(setting or DEFAULT_PATH))


def name_limit_file(version: int) -> str:
    """Return the name of the file with a cgroup's limit."""
    return "memory.max" if version == 2 else "memory.limit_in_bytes"


def build_scope_name(job: int, pid: int) -> str:
    """Return systemd's name for the cgroup of one job's agent.

    The name contains a pid because the job's last scope may still exist.
    """
    return f"geminihpc-{job}-{pid}.scope"


def build_scope_call(busctl: str, job: int, pid: int, limit_bytes: int) -> list[str]:
    """Return the command by which systemd moves a process into a scope of its own, in a slice beside slurmd's.

    systemd removes an empty scope.
    """
    properties = [
        *("PIDs", "au", "1", str(pid)),
        *("Slice", "s", SLICE),
        *("MemoryMax", "t", str(limit_bytes)),
        *("MemorySwapMax", "t", "0"),
        *("CPUWeight", "t", _WEIGHT),
        *("TasksMax", "t", str(TASKS_MAX)),
        *("DevicePolicy", "s", "closed"),
    ]
    call = [build_scope_name(job, pid), "fail", "7", *properties, "0"]
    return [busctl, "--timeout=2", "call", *_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", *call]


def build_resize_call(busctl: str, scope: str, limit_bytes: int) -> list[str]:
    """Return the command by which systemd sets another limit for a scope."""
    call = [scope, "true", "1", "MemoryMax", "t", str(limit_bytes)]
    return [busctl, "--timeout=2", "call", *_MANAGER, "SetUnitProperties", "sba(sv)", *call]
