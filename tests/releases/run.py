"""One run in a root: namespaces, a part of the machine's cgroups, and the end of both."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from . import machine
from .root import NAMESPACES

SCRIPT = Path(__file__).with_name("enter.sh")
_CGROUP = "gemini-releases-"
_CGROUPS_END_S = 10.0
# After Ctrl-C: pytest takes its clusters down; then everything is killed.
_INTERRUPTED_S = 60.0


def run(root: Path, checkout: Path, command: Sequence[str], binds: Sequence[Path] = (), *, stage: Path) -> int:
    """Run `command` in a throw-away copy of `root` with a copy of `checkout`; its exit status (128 + signal).

    binds: directories of this machine that the command sees at the same place, and may change. stage: an empty
    directory, made if need be, below which the run mounts what only it sees; several runs may share one.
    """
    python = machine.python(checkout)
    stage.mkdir(parents=True, exist_ok=True)
    shown = [word for directory in binds for word in ("--bind", str(directory))]
    argv = [*NAMESPACES, str(SCRIPT), str(root), str(stage), str(checkout), str(python), *shown, "--", *command]
    with _cgroups() as name:
        inside = {**os.environ, "GEMINI_RELEASES_CGROUP": name}
        process = subprocess.Popen(argv, env=inside)
        with _ended_by_signals(process):
            status = _wait(process)
    return status if status >= 0 else 128 - status


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has told the command, too.
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_INTERRUPTED_S)
        return 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()


@contextmanager
def _ended_by_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Of a tool that is told to end nothing is left: all of the run dies with `process`."""

    def end(number: int, frame: FrameType | None) -> None:
        process.kill()

    before = {sig: signal.signal(sig, end) for sig in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _hierarchies() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    fields = [(line.split()[4], line.partition(" - ")[2].split()[0]) for line in lines]
    return [Path(target) for target, kind in fields if kind in ("cgroup", "cgroup2")]


@contextmanager
def _cgroups() -> Iterator[str]:
    """The name of this run's part of each hierarchy: clusters of the same name elsewhere have other cgroups."""
    _sweep()
    name = f"{_CGROUP}{os.getpid()}"
    for top in _hierarchies():
        with contextlib.suppress(OSError):  # only read, or not for us: then the run sees the hierarchy as it is
            (top / name).mkdir()
            for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new cpuset of v1, which nobody can enter
                if (top / setting).exists() and not (top / name / setting).read_text().strip():
                    (top / name / setting).write_text((top / setting).read_text())
    try:
        yield name
    finally:
        _remove(name)


def _remove(name: str) -> None:
    deadline = time.monotonic() + _CGROUPS_END_S
    for top in _hierarchies():
        while (top / name).is_dir() and time.monotonic() < deadline:
            for directory, _, _ in os.walk(top / name, topdown=False):
                with contextlib.suppress(OSError):  # what the kernel is just ending is still in it
                    os.rmdir(directory)
            time.sleep(0.01)


def _sweep() -> None:
    """What runs that were killed have left: empty cgroups."""
    names = {path.name for top in _hierarchies() for path in top.glob(f"{_CGROUP}*")}
    for name in names:
        if not Path("/proc", name.removeprefix(_CGROUP)).exists():
            _remove(name)
