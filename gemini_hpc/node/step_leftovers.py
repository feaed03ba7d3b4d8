"""Removal of the files that a step of Slurm's PMIx plugin left on the disk of a node which lost power.

A step removes its socket and its directories at its end. A step of a lost node does not, and its files outlive the
reboot in slurmd's spool and in the temporary file system. The first step of the requeued job has the same name. So
Slurm cannot start it on that node ("Address already in use"), and the job fails although its state is safe.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

from gemini_hpc.node import slurm_conf as conf
from gemini_hpc.node import spawn

REMOVAL_S = 5.0  # the job waits; its owner can fill these directories
_TMP = "/tmp"  # Slurm's default


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
        found = list(_find_leftovers(slurm_conf, node, job, uid))
    except OSError as exc:
        return f"{exc.filename}: {exc.strerror}"
    if not found:
        return ""
    # rm follows no link, whatever the owner of the directories does meanwhile
    argv = ["rm", "-rf", "--one-file-system", "--", *found]
    process = subprocess.Popen(argv, env=spawn.ENVIRONMENT, stdin=subprocess.DEVNULL)
    try:
        process.wait(REMOVAL_S)
    except subprocess.TimeoutExpired:
        process.kill()
    left = [path for path in found if os.path.lexists(path)]
    return f"could not remove {', '.join(left)} within {REMOVAL_S:.0f} s" if left else ""


def _find_leftovers(slurm_conf: str, node: str, job: int, uid: int) -> Iterator[str]:
    """Yield the paths of sockets and directories that are left.

    Raises:
        OSError: A file or directory could not be read.
    """
    values = conf.read_values(slurm_conf)
    mpi_conf = os.path.join(os.path.dirname(slurm_conf), "mpi.conf")
    if os.path.exists(mpi_conf):
        values |= conf.read_values(mpi_conf)
    spool = conf.find_spool(values, node)
    tmp = values.get("pmixclitmpdirbase") or values.get("tmpfs", _TMP)
    for entry in _list_entries(spool):
        if re.fullmatch(rf"(stepd\.slurm\.)?pmix\.{job}\.[0-9]+", entry.name):
            yield entry.path
    for entry in _list_entries(tmp):  # anyone can write there
        named = re.fullmatch(rf"spmix_appdir_({uid}_)?{job}\.[0-9]+", entry.name)
        if named and entry.stat(follow_symlinks=False).st_uid == uid:
            yield entry.path


def _list_entries(directory: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory, or none if it does not exist."""
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except FileNotFoundError:
        return
