"""Where an agent's memory is counted: what /proc says of memory cgroups, and the choice of one (requirement memory).

The prolog is a child of slurmd, and so would be the agent. slurmd's cgroup may be limited to MemSpecLimit: replicas
in it would get slurmd killed. So the agents of a node have a cgroup of their own, beside slurmd's, and in it one for
each job: what runs there is outside of Slurm's limits, so it has some of its own, and root can end it as a whole. A
job's limit is its share of the site's cap, that of all is the cap, both with room for each agent's own processes.
Which files that takes depends on cgroup v1, v2 and systemd; here is only the choosing.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_PATH = "/gemini-hpc"
NONE = "none"
_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
SLICE = "geminihpc.slice"  # systemd reads "-" in a slice's name as a level
# What the kernel's limit has above the cap for the processes of each agent, so that a reservation is refused by us,
# with numbers, before the kernel ends somebody. An agent takes 28 MiB, and 32 more while two of its workers save.
AGENT_ROOM_BYTES = 96 << 20
UNLIMITED = 1 << 60  # v1 writes a huge number for none
# All processes and threads of one job's agent: some 50 of the agent's, and its workers'.
TASKS_MAX = 512
_CONTROLLERS = ("memory", "cpu", "pids")  # of v2, one at a time: those that a kernel lacks are done without
_WEIGHT = "100"  # cpu.weight of v2, as has a group of which nobody says anything; shares of v1: 1024
_SHARES = "1024"
# null, zero, full, random, urandom, the controlling terminal: nothing that computes, stores or reaches a network.
_DEVICES = ("c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:0 rwm")
_OCTAL = re.compile(r"\\([0-7]{3})")
_SCOPE = re.compile(r"geminihpc-[0-9]+-[0-9]+\.scope")


@dataclass(frozen=True, slots=True)
class Place:
    """A process's memory cgroup. mount: where the hierarchy is mounted; path: from there, "/" is the top."""

    version: int
    mount: str
    path: str
    writable: bool

    def directory(self, path: str | None = None) -> str:
        """The directory of `path` (default: the process's own)."""
        below = (self.path if path is None else path).strip("/")
        return f"{self.mount}/{below}" if below else self.mount

    def chain(self) -> Iterator[str]:
        """The process's own directory and all above it: each may have a limit."""
        path = self.path
        while True:
            yield self.directory(path)
            if path == "/":
                return
            path = os.path.dirname(path)


@dataclass(frozen=True, slots=True)
class Choice:
    """how: "v1" or "v2" (files below `directory`), "systemd" (a scope in `SLICE`), "stay"; why: of staying, empty
    where there is nothing to leave or the site wants it so."""

    how: str
    directory: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do below a cgroup mount; text None: make the directory. A step that is not `needed` may fail."""

    path: str
    text: str | None = None
    needed: bool = True


def place(cgroup: str, mountinfo: str) -> Place | None:
    """From the texts of /proc/PID/cgroup and /proc/PID/mountinfo; None where no memory cgroup is visible."""
    for version, path in _memory_paths(cgroup):
        mount = _mount(mountinfo, version)
        if mount is None:
            continue
        point, root, writable = mount
        if root not in ("/", path) and not path.startswith(root + "/"):
            continue  # only a part of the hierarchy is mounted here (containers), and the process is not in it
        below = path if root == "/" else path[len(root) :] or "/"
        if ".." not in below.split("/"):
            return Place(version, point, below, writable)
    return None


def _memory_paths(cgroup: str) -> list[tuple[int, str]]:
    """v1's memory controller where it is in use, else v2's hierarchy."""
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


def _mount(mountinfo: str, version: int, controller: str = "memory") -> tuple[str, str, bool] | None:
    """(mount point, root within the hierarchy, writable) of the mount that is on top; v1: of that controller."""
    found: tuple[str, str, bool] | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, source = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(source) < 3:
            continue
        wanted = (
            source[0] == "cgroup2" if version == 2 else source[0] == "cgroup" and controller in source[2].split(",")
        )
        if wanted:
            point, root = _plain(fields[4]), _plain(fields[3])
            if found is None or point == found[0]:  # a later mount on the same point covers the earlier one
                writable = "ro" not in fields[5].split(",") and "ro" not in source[2].split(",")
                found = (point, root, writable)
    return found


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda m: chr(int(m[1], 8)), text)


def choose(here: Place | None, setting: str, *, systemd: bool) -> Choice:
    """Where the agents of this node go. here: the prolog's own place; setting: `agent_cgroup` of gemini.toml;
    systemd: whether it runs this host. On v2 all of the tree is systemd's, so it is asked; v1's it shares."""
    if setting == NONE or here is None:
        missing = setting not in ("", NONE)
        return Choice("stay", why=f"agent_cgroup is {setting!r}, and no memory cgroup is visible here" * missing)
    if not setting and systemd and here.version == 2:
        return Choice("systemd")
    path = setting or DEFAULT_PATH
    if not path.startswith("/") or path.rstrip("/") != os.path.normpath(path) or path == "/":
        return Choice("stay", why=f"agent_cgroup is {setting!r}: wanted a path such as {DEFAULT_PATH!r}")
    path = os.path.normpath(path)
    if not here.writable:
        return Choice("stay", why=f"{here.mount} is mounted read-only")
    if here.path != "/" and f"{path}/".startswith(f"{here.path}/"):
        return Choice("stay", why=f"agent_cgroup {path} lies in slurmd's own cgroup {here.path}")
    return Choice(f"v{here.version}", here.directory(path))


def preparation(here: Place, choice: Choice, limit_bytes: int, used_bytes: int) -> list[Step]:
    """What makes the agents' cgroup, or brings its limit up to date. used_bytes: taken in it now: the limit is never
    put below, for v2 kills where v1 refuses."""
    below = choice.directory[len(here.mount) :].strip("/").split("/")
    above = ["/".join([here.mount, *below[:n]]) for n in range(len(below))]
    steps = []
    for parent, name in zip(above, below, strict=True):
        if here.version == 2:  # perhaps on already; if it cannot be, the limit's file will be missing
            steps += [Step(f"{parent}/cgroup.subtree_control", f"+{name}", needed=False) for name in _CONTROLLERS]
        steps.append(Step(f"{parent}/{name}"))
    limit, swap = ("memory.limit_in_bytes", ("memory.swappiness", "0"))
    if here.version == 2:
        limit, swap = ("memory.max", ("memory.swap.max", "0"))
    steps.append(Step(f"{choice.directory}/{swap[0]}", swap[1], needed=False))
    if limit_bytes >= used_bytes:
        steps.append(Step(f"{choice.directory}/{limit}", str(limit_bytes)))
    return steps


def of_job(here: Place, choice: Choice, job: int, limit_bytes: int) -> list[Step]:
    """What makes the cgroup of one job's agent in that of all agents, the memory's; limit_bytes: of this one."""
    directory = job_directory(choice, job)
    if here.version == 1:
        return [
            Step(directory),
            Step(f"{directory}/memory.swappiness", "0", needed=False),
            Step(f"{directory}/memory.limit_in_bytes", str(limit_bytes), needed=False),  # refused below what is taken
        ]
    control = f"{choice.directory}/cgroup.subtree_control"
    return [
        *(Step(control, f"+{name}", needed=name == "memory") for name in _CONTROLLERS),
        Step(directory),
        Step(f"{directory}/memory.max", str(limit_bytes)),
        Step(f"{directory}/memory.swap.max", "0", needed=False),
        Step(f"{directory}/cpu.weight", _WEIGHT, needed=False),
        Step(f"{directory}/pids.max", str(TASKS_MAX), needed=False),
    ]


def job_directory(choice: Choice, job: int) -> str:
    """Where the memory of one job's agent is counted."""
    return f"{choice.directory}/{job}"


def beside(mountinfo: str, below: str, job: int) -> dict[str, list[Step]]:
    """v1 has a hierarchy for each controller: by directory, what makes the job's cgroups in those that are mounted.
    below: path of the agents' cgroup in each. A hierarchy that cannot be written to is left out."""
    settings = {
        "devices": [("devices.deny", "a"), *(("devices.allow", device) for device in _DEVICES)],
        "cpu": [("cpu.shares", _SHARES)],
        "pids": [("pids.max", str(TASKS_MAX))],
        "freezer": [],
    }
    made: dict[str, list[Step]] = {}
    for controller, values in settings.items():
        mount = _mount(mountinfo, 1, controller)
        if mount is None or not mount[2]:
            continue
        parts = [*below.strip("/").split("/"), str(job)]
        each = ["/".join([mount[0], *parts[: n + 1]]) for n in range(len(parts))]
        steps = [Step(path) for path in each] if each[-1] not in made else made[each[-1]]
        made[each[-1]] = [*steps, *(Step(f"{each[-1]}/{name}", text, needed=False) for name, text in values)]
    return made


def usage_file(version: int) -> str:
    """Name of the file with the bytes that a cgroup takes now."""
    return "memory.current" if version == 2 else "memory.usage_in_bytes"


def bound(limit: str) -> int | None:
    """Return the limit in bytes that the text of its file means; None: there is none."""
    text = limit.strip()
    return None if text == "max" or int(text) >= UNLIMITED else int(text)


def left(version: int, limit: str, usage: str, stat: str) -> int | None:
    """Bytes that a cgroup can still take, from its files (limit, usage, memory.stat); None: it has no limit. What is
    cached of files counts as free."""
    most = bound(limit)
    if most is None:
        return None
    return max(0, most - int(usage) + _sum(version, stat, "active_file", "inactive_file"))


def held(version: int, stat: str) -> int:
    """Return the bytes of copies in a cgroup, from its memory.stat: shared memory, with the files of tmpfs."""
    return _sum(version, stat, "shmem")


def _sum(version: int, stat: str, *names: str) -> int:
    """Sum lines of memory.stat; in v1 those that count what is below, too."""
    prefix = "" if version == 2 else "total_"
    wanted = {prefix + name for name in names}
    lines = (line.split() for line in stat.splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in wanted)


def names_job(name: str) -> bool:
    """Return whether a cgroup in that of all agents is one job's, by its name: see `job_directory`, `scope_name`."""
    return (name.isascii() and name.isdecimal()) or _SCOPE.fullmatch(name) is not None


def is_a_jobs(here: Place, setting: str) -> bool:
    """Return whether a process is in the cgroup of one job's agent; setting: `agent_cgroup` of gemini.toml."""
    above, _, name = here.path.rpartition("/")
    scope = _SCOPE.fullmatch(name) is not None and above.endswith(f"/{SLICE}")
    return scope or (names_job(name) and above == os.path.normpath(setting or DEFAULT_PATH))


def limit_file(version: int) -> str:
    """Name of the file with a cgroup's limit."""
    return "memory.max" if version == 2 else "memory.limit_in_bytes"


def scope_name(job: int, pid: int) -> str:
    """systemd's name for the cgroup of one job's agent; a pid in it, for the last one may not be gone yet."""
    return f"geminihpc-{job}-{pid}.scope"


def scope_call(busctl: str, job: int, pid: int, limit_bytes: int) -> list[str]:
    """The command that has systemd move a process into a scope of its own, in a slice beside slurmd's. systemd
    removes a scope that is empty."""
    properties = [
        *("PIDs", "au", "1", str(pid)),
        *("Slice", "s", SLICE),
        *("MemoryMax", "t", str(limit_bytes)),
        *("MemorySwapMax", "t", "0"),
        *("CPUWeight", "t", _WEIGHT),
        *("TasksMax", "t", str(TASKS_MAX)),
        *("DevicePolicy", "s", "closed"),
    ]
    call = [scope_name(job, pid), "fail", "7", *properties, "0"]
    return [busctl, "--timeout=2", "call", *_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", *call]


def resize_call(busctl: str, scope: str, limit_bytes: int) -> list[str]:
    """Return the command that has systemd set another limit for a scope."""
    call = [scope, "true", "1", "MemoryMax", "t", str(limit_bytes)]
    return [busctl, "--timeout=2", "call", *_MANAGER, "SetUnitProperties", "sba(sv)", *call]
