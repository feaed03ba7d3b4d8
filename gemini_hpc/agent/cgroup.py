"""The agents' cgroup: root's prolog makes it and puts the agent in, the agent reads what is left in it (SITE 15).

Nothing here ever fails a prolog: an agent that cannot be moved stays in slurmd's cgroup, and minds that one's limit.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from gemini_hpc.config import Settings
from gemini_hpc.core import cgroup
from gemini_hpc.core.cgroup import Choice, Place

BUSCTL = "/usr/bin/busctl"
SYSTEMD_BOOTED = "/run/systemd/system"
SYSTEMD_TIMEOUT_S = 3.0
_POLL_S = 0.01


def place(pid: int | str = "self") -> Place | None:
    """The memory cgroup of a process, as seen from here."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as own, open("/proc/self/mountinfo") as mounts:
            found = cgroup.place(own.read(), mounts.read())
    except (OSError, UnicodeDecodeError):
        return None
    return found if found is not None and _bytes(found.directory(), cgroup.usage_file(found.version)) >= 0 else None


def cap_bytes(settings: Settings, total_bytes: int) -> int:
    """What the agents of a node may take together; total_bytes: the node's memory."""
    return settings.memory_cap_bytes or int(total_bytes * settings.memory_fraction)


def limit_bytes(settings: Settings, total_bytes: int) -> int:
    """The kernel's limit: the cap, and room for the agents' own processes."""
    return cap_bytes(settings, total_bytes) + cgroup.AGENTS_ROOM_BYTES


def prepare(settings: Settings, total_bytes: int) -> Choice:
    """By root: choose, and make the cgroup where it is made of files."""
    here = place()
    choice = cgroup.choose(here, settings.agent_cgroup, systemd=os.path.isdir(SYSTEMD_BOOTED))
    if here is None or choice.how not in ("v1", "v2"):
        return choice
    used = max(0, _bytes(choice.directory, cgroup.usage_file(here.version)))
    for step in cgroup.preparation(here, choice, limit_bytes(settings, total_bytes), used):
        try:
            if step.text is None:
                with suppress(FileExistsError):
                    os.mkdir(step.path, 0o755)
            else:
                _write(step.path, step.text)
        except OSError as exc:
            if step.needed:
                return Choice("stay", why=f"{step.path}: {exc.strerror}")
    return choice


def admit(choice: Choice, job: int, pid: int, limit_bytes: int) -> str:
    """By root: move a process of ours that will become the agent; what went wrong, or "". Bounded in time."""
    if choice.how == "stay":
        return choice.why
    try:
        if choice.how == "systemd":
            _ask_systemd(job, pid, limit_bytes)
        else:
            _write(f"{choice.directory}/cgroup.procs", str(pid))
    except OSError as exc:
        return f"{choice.directory or 'systemd'}: {exc.strerror or exc}"
    return ""


def _ask_systemd(job: int, pid: int, limit_bytes: int) -> None:
    import subprocess

    try:
        done = subprocess.run(
            cgroup.scope_call(BUSCTL, job, pid, limit_bytes),
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
    deadline = time.monotonic() + SYSTEMD_TIMEOUT_S
    while True:  # the call only queues the move
        found = place(pid)
        if found is not None and found.path.endswith(cgroup.scope_name(job, pid)):
            return
        if time.monotonic() > deadline:
            raise OSError("the scope was not made in time")
        time.sleep(_POLL_S)


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
        return max(0, min(found) - cgroup.AGENTS_ROOM_BYTES) if found else None

    def _left(self, directory: str) -> int | None:
        try:
            limit = _read(f"{directory}/{cgroup.limit_file(self._version)}")
            usage = _read(f"{directory}/{cgroup.usage_file(self._version)}")
            return cgroup.left(self._version, limit, usage, _read(f"{directory}/memory.stat"))
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
