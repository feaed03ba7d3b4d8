"""Checks of this node's agents in root's ledger: foreign processes in their cgroups, room in their directories."""

from __future__ import annotations

import os

from gemini_hpc.doctor.check import ON_NODE, Check
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, ok, some, warning, wrong
from gemini_hpc.node import cgroup, ledger, mounts

_OURS = (b"gemini_hpc.agent", b"gemini_hpc.tier.worker", b"gemini_hpc.node.reaper")
_FULL = 0.9


def strangers(facts: HostFacts) -> Outcome:
    """Check that the agents' cgroups, which lie outside of Slurm's, hold only processes that root started there."""
    facts.need_root("which processes are in the agents' cgroups")
    run_dir = facts.settings.run_dir
    if not os.path.isdir(ledger.place(run_dir)):
        return ok(f"{ledger.place(run_dir)} does not exist yet")
    try:
        with ledger.opened(run_dir) as entries:
            known = list(entries)
    except OSError as exc:
        raise Unavailable(f"{ledger.place(run_dir)}: {exc.strerror or exc}") from None
    processes, told = {p.pid: p for p in facts.processes}, []
    for entry in known:
        for pid in cgroup.members(entry.group):
            process = processes.get(pid)
            if process is not None and not any(word in process.arguments for word in _OURS):
                told.append(f"pid {pid} ({process.name[:32]!r}, uid {process.uid}) in {entry.group.directories[0]}")
    if told:
        return wrong(
            f"foreign processes in the agents' cgroups, outside Slurm's limits: {some(told)}",
            "agents and their workers only",
            "look at the process and at its owner; the reaper kills it with the agent when the job is over",
        )
    return ok(f"{len(known)} jobs have agents here, with nobody else in their cgroups")


def room(facts: HostFacts) -> Outcome:
    """Check that the directories are not full of bytes or files, which would leave jobs without protection."""
    run_dir = facts.settings.run_dir
    told, seen = [], 0
    try:
        names = [name for name in os.listdir(run_dir) if name.isascii() and name.isdecimal()]
        for path in (run_dir, *(f"{run_dir}/{name}" for name in names)):
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mount = mounts.own(fd)
                if mount is None or (path != run_dir and not mount.ours):
                    continue  # a plain directory, or a user's own file system, which may not answer
                seen += 1
                found = os.fstatvfs(fd)
                told += [
                    f"{path} has {left:,} of {total:,} {what} left"
                    for what, left, total in (
                        ("files", found.f_favail, found.f_files),
                        ("blocks", found.f_bavail, found.f_blocks),
                    )
                    if total and left < (1 - _FULL) * total
                ]
            finally:
                os.close(fd)
    except FileNotFoundError:
        return ok(f"{run_dir} does not exist yet, or has just changed")
    except OSError as exc:
        raise Unavailable(f"{run_dir}: {exc.strerror}") from None
    if told:
        fix = "a job's own directory: its owner fills it, only that job suffers; run directory: see what lies in it"
        return warning(some(told), "room for sockets, maps and logs", fix)
    return ok(f"{seen} file systems of gemini-hpc at {run_dir}, none of them nearly full")


CHECKS = (
    Check("agents.strangers", "least rights", ON_NODE, strangers),
    Check("agents.room", "full directories", ON_NODE, room),
)
