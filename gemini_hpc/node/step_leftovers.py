"""Removal of the files that a step of Slurm's PMIx plugin left on the disk of a node which lost power.

A step removes its socket and its directories at its end. A step of a lost node does not, and its files outlive the
reboot in slurmd's spool and in the temporary file system. The first step of the requeued job has the same name. So
Slurm cannot start it on that node ("Address already in use"), and the job fails although its state is safe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from gemini_hpc import clock, lines
from gemini_hpc.node import privileges, spawn
from gemini_hpc.node import slurm_conf as conf

REMOVAL_S = 5.0  # the job waits; its owner can fill these directories
_TMP = "/tmp"  # Slurm's default
_FAILED = 1


def remove(slurm_conf: str, node: str, job: int, uid: int) -> str:
    """Remove the sockets and directories of PMIx that earlier steps of a job left on this node.

    No step of the job may run here, as in the prolog.

    Args:
        slurm_conf: Path of slurm.conf, beside which mpi.conf lies; "" if not known.
        node: This node's name.
        job: The job's id.
        uid: The uid of the job's owner.

    Returns:
        Why something may be left; "" if nothing is.
    """
    if not slurm_conf:
        return ""
    try:
        spool, tmp = _find_directories(slurm_conf, node)
        deadline = clock.monotonic() + REMOVAL_S
        # one after the other, the spool first: users can obstruct only the work in the temporary file system
        left = [] if _is_removed(lambda: _find_in_spool(spool, job), deadline) else [f"{spool}/*pmix.{job}.*"]
        if not _is_removed(lambda: _find_in_tmp(tmp, job, uid), deadline):
            left.append(f"{tmp}/spmix_appdir_*{job}.*")
    except OSError as exc:
        return f"{exc.filename}: {exc.strerror}" if exc.filename else f"{exc.strerror}"
    return f"could not remove {', '.join(left)} within {REMOVAL_S:.0f} s" if left else ""


def _find_directories(slurm_conf: str, node: str) -> tuple[str, str]:
    """Return slurmd's spool and the temporary file system.

    Raises:
        OSError: A file could not be read.
    """
    values = conf.read_values(slurm_conf)
    mpi_conf = os.path.join(os.path.dirname(slurm_conf), "mpi.conf")
    if os.path.exists(mpi_conf):
        values |= conf.read_values(mpi_conf)
    tmp = values.get("pmixclitmpdirbase") or values.get("tmpfs", _TMP)
    return conf.find_spool(values, node), conf.expand(tmp, node)


def _is_removed(find: Callable[[], Iterator[str]], deadline: float) -> bool:
    """Find files and directories, remove them, and return whether none is left.

    A child does both, because a user's file system can make it hang. It keeps no output of slurmd's.
    """
    child = privileges.fork_as(None, lambda: _remove_all(list(find())), _FAILED, _report)
    return privileges.wait_for_child(child, deadline - clock.monotonic()) == 0


def _report(problem: str) -> None:
    lines.write_line(f"prolog: {problem}")


def _remove_all(paths: list[str]) -> int:
    if paths:
        os.dup2(1, 2)  # /dev/null: rm would wait for a reader of its complaints
        # rm follows no link, whatever the owner of the directories does meanwhile
        os.execvpe("rm", ["rm", "-rf", "--one-file-system", "--", *paths], spawn.ENVIRONMENT)
    return 0


def _find_in_spool(spool: str, job: int) -> Iterator[str]:
    for entry in _list_entries(spool):
        if re.fullmatch(rf"(stepd\.slurm\.)?pmix\.{job}\.[0-9]+", entry.name):
            yield entry.path


def _find_in_tmp(tmp: str, job: int, uid: int) -> Iterator[str]:
    for entry in _list_entries(tmp):
        if not re.fullmatch(rf"spmix_appdir_({uid}_)?{job}\.[0-9]+", entry.name):
            continue
        with suppress(OSError):  # anyone can write there, and remove or mount meanwhile
            if entry.stat(follow_symlinks=False).st_uid == uid:
                yield entry.path


def _list_entries(directory: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory, or none if it does not exist."""
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except FileNotFoundError:
        return
