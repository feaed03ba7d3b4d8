"""What this process has left on the machine: processes, replica memory, files, network, cgroups, clusters.

Other people and other pytest workers use the same machine. Ours is what descends from this process or carries `MARK`
in its environment, clusters that have our pid in their name, and what lies in our own directory for temporary files.
A network link, a cgroup without processes or /run/gemini-hpc is nobody's and counts too: no test makes one for long.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gemini_hpc.devcluster.layout import MARKER, ROOT
from gemini_hpc.devcluster.processes import identify

from . import Found

# In the environment of whatever this process starts; GEMINI_ and SLURM_ variables are taken away from trainers.
MARK = "TESTED_BY"
PID = os.getpid()
RUN_DIRECTORY = Path("/run/gemini-hpc")
CGROUPS = Path("/sys/fs/cgroup")
# What the site's own agents live below: it stays when the last of them is gone.
SITE_CGROUPS = {"gemini-hpc", "gemini-hpc.slice"}
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
# A development cluster's own: there as long as the cluster.
_OF_A_CLUSTER = "gemini-devcluster-"
_TEMPORARY = "gemini-tests-"

_started = 0
_scanned: tuple[int, Found] = (-1, {})
_kept: set[int | Path] = set()
_ours = {PID}


def begin() -> Path:
    """Called once, before the first test: marks what will be started; makes the directory for temporary files."""
    sys.addaudithook(_count)
    os.environ[MARK] = str(PID)
    usual = Path(os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()))  # tmp_path stays where it was
    for old in usual.glob(f"{_TEMPORARY}*"):
        if not Path("/proc", old.name.removeprefix(_TEMPORARY)).exists():
            shutil.rmtree(old, ignore_errors=True)
    own = usual / f"{_TEMPORARY}{PID}"
    own.mkdir(exist_ok=True)
    own.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    return own


def end() -> None:
    """Called once, after the last test."""
    own = Path(tempfile.gettempdir())
    if own.name == f"{_TEMPORARY}{PID}":
        tempfile.tempdir = None
        os.environ["TMPDIR"] = str(own.parent)
        shutil.rmtree(own, ignore_errors=True)


def keep(helper: int | Path) -> None:
    """A helper of the tests, process or file, that is to be there as long as this process."""
    _kept.add(helper)


def adopt(pid: int) -> None:
    """What another process (a worker that has ended) has started is ours too."""
    _ours.add(pid)


def ours(cluster: str) -> bool:
    """Whether a cluster is ours: the pid of the process that started it is in its name."""
    return not _ours.isdisjoint(map(int, re.findall(r"\d+", cluster)))


def strangers() -> list[str]:
    """Other people's clusters on this machine."""
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(ROOT) if not name.startswith(".") and not ours(name)]
    return []


def present() -> Found:
    """What of ours is there now. A few milliseconds, some ten if a process has been started since the last look."""
    found: Found = {}
    for part in (_scan(), _processes(), _memory(), _clusters(), _files(), _network(), _mounts(), _cgroups()):
        found.update(part)
    return found


def shmem_bytes() -> int:
    """Shared memory (memfd and tmpfs) of the whole machine."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Shmem"].split()[0]) * 1024


def _count(event: str, _arguments: object) -> None:
    global _started  # noqa: PLW0603
    if event in _STARTS:
        _started += 1


def _text(pid: int) -> str:
    with suppress(OSError):
        return (
            (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    return ""


def _test(environment: bytes) -> str:
    started_in = re.search(rb"(?:^|\0)PYTEST_CURRENT_TEST=([^\0]*)", environment)
    return f" (started in {started_in[1].decode(errors='replace')})" if started_in else ""


def _scan() -> Found:
    """Processes with our mark, and clusters of ours that have processes, wherever these have gone."""
    global _scanned  # noqa: PLW0603
    if _scanned[0] == _started:
        return _scanned[1]
    started, found = _started, Found()
    mark, cluster = re.compile(rb"(?:^|\0)%s=(\d+)(?:\0|$)" % MARK.encode()), MARKER.encode() + b"="
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in _kept:
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
        except OSError:
            continue
        marked = mark.search(environment)
        if marked and int(marked[1]) in _ours and (process := identify(int(entry))):
            found[process] = f"process {entry}: {_text(process.pid)}{_test(environment)}"
        elif cluster in environment:
            name = environment.partition(cluster)[2].partition(b"\0")[0].decode(errors="replace")
            if ours(name) and identify(int(entry)):
                found["cluster", name] = f"cluster {name}: process {entry}: {_text(int(entry))}"
    _scanned = (started, found)
    return found


def rescan() -> None:
    """Let the next look read every process again: one of those that it found may have ended."""
    global _scanned  # noqa: PLW0603
    if _scanned[1]:
        _scanned = (-1, {})


def _descendants(pid: int) -> Iterator[int]:
    children: list[int] = []
    with suppress(OSError):  # it has just ended; what it has left then belongs to init
        for task in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    for child in children:
        yield child
        yield from _descendants(child)


def _processes() -> Found:
    """Children and theirs, whatever their environment. Those in a cluster are the cluster's."""
    found: Found = {}
    host = os.readlink("/proc/self/ns/pid")
    for pid in _descendants(PID):
        with suppress(OSError):
            if pid not in _kept and os.readlink(f"/proc/{pid}/ns/pid") == host and (process := identify(pid)):
                found[process] = f"process {pid}: {_text(pid)}"
    return found


def _memory() -> Found:
    """Replica memory that this process itself holds, by descriptor or mapping."""
    inodes: set[int] = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:gemini" in os.readlink(f"/proc/self/fd/{fd}"):
                inodes.add(os.stat(int(fd)).st_ino)
    maps = Path("/proc/self/maps").read_bytes()
    inodes.update(int(line.split()[4]) for line in maps.splitlines() if b"memfd:gemini" in line)
    if inodes:
        gc.collect()  # what only a cycle holds is not leaked
    return {("memfd", inode): f"memfd {inode}: memory of the tests' own process" for inode in inodes}


def _clusters() -> Found:
    try:
        names = {name.removeprefix(".").removesuffix(".lock") for name in os.listdir(ROOT)}
    except FileNotFoundError:
        return {}
    return {("cluster", name): f"cluster {name}: {ROOT / name}" for name in names if ours(name)}


def _files() -> Found:
    own = Path(tempfile.gettempdir())
    paths = [own / name for name in os.listdir(own) if not name.startswith("torchinductor_")]
    paths = [path for path in paths if path not in _kept]
    paths += [Path("/dev/shm", name) for name in os.listdir("/dev/shm") if "gemini" in name]
    paths += [Path("/var/lib", name) for name in os.listdir("/var/lib") if name.startswith("gemini-") and ours(name)]
    paths += [path for path in (RUN_DIRECTORY,) if path.exists()]
    return {("file", path): f"file {path}" for path in paths}


def _network() -> Found:
    found: Found = {("link", name): f"network link {name}" for name in os.listdir("/sys/class/net")}
    with suppress(FileNotFoundError):
        found |= {("netns", name): f"network namespace {name}" for name in os.listdir("/run/netns")}
    return found


def _mounts() -> Found:
    found: Found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _, _, _, path = line.split()[:5]
        if "gemini" in path or "pytest-" in path:
            found["mount", number, path] = f"mount {path}"
    return found


def _cgroups() -> Found:
    """cgroups of agents in which no process is left."""
    found: Found = {}
    for directory, below, _ in os.walk(CGROUPS):
        above, name = directory.split("/")[-2:]
        if name not in SITE_CGROUPS and ("gemini" in name or above in SITE_CGROUPS):
            below.clear()
            if name.startswith(_OF_A_CLUSTER):
                cluster = name.removeprefix(_OF_A_CLUSTER)
                if ours(cluster):
                    found["cluster", cluster] = f"cluster {cluster}: cgroup {directory}"
            elif not _populated(Path(directory)):
                found["cgroup", directory] = f"cgroup {directory}"
    return found


def _populated(cgroup: Path) -> bool:
    return any(charged(directory) for directory, _, _ in os.walk(cgroup))


def charged(cgroup: str) -> list[str]:
    """Pids of the processes in a cgroup itself; none where it is gone, as others' may be at any moment."""
    with suppress(OSError):
        return Path(cgroup, "cgroup.procs").read_text().split()
    return []
