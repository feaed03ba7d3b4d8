"""Becoming the job's owner, for good, as a process that the owner cannot trace."""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
import sys
import syslog
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from gemini_hpc import lines

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 3, 4, 38


KILLED_S = 0.3
HANGS = -256  # the outcome of a child that not even SIGKILL has ended in that time
_SAID_BYTES = 4096


class PrivilegeError(Exception):
    """The process could not become, or not be proved to be, the job's owner."""


def owner(uid: int) -> pwd.struct_passwd:
    """The passwd entry of a job's owner: its gid and groups come from here, never from Slurm's environment
    (CVE-2018-10995). Raises `PrivilegeError` for a uid that this node does not know."""
    try:
        return pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        raise PrivilegeError(f"uid {uid} is not known on this node; add the user or check the name service") from None


def drop_to(entry: pwd.struct_passwd) -> None:
    """Gives up root for `entry`'s uid, gid and groups in real, effective and saved form, and verifies it; the process
    is shut then (`shut`), until it executes something.

    Raises `PrivilegeError`; the caller must not go on then (CVE-2019-19728 is a daemon that did).
    """
    uid, gid = entry.pw_uid, entry.pw_gid
    try:
        os.initgroups(entry.pw_name, gid)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as exc:
        raise PrivilegeError(f"could not become uid {uid}: {exc.strerror}") from None
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise PrivilegeError(f"asked to become uid {uid} gid {gid}, found {os.getresuid()} {os.getresgid()}")
    if uid == 0:
        return
    try:
        os.setresuid(0, 0, 0)
    except PermissionError:
        shut()
        return
    raise PrivilegeError(f"became uid {uid}, but could become root again")


def shut() -> None:
    """Keep this process, and what it forks, out of its owner's reach: not to be traced, its memory and descriptors
    not to be read through /proc, no core file, and nothing that it executes gains rights. Its owner can still stop
    and end it. Raises `PrivilegeError` where the kernel does not do so."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or traceable():
        raise PrivilegeError(
            f"could not close this process to its owner's other processes: {os.strerror(ctypes.get_errno())}"
        )


def traceable() -> bool:
    """Whether other processes of this one's owner may trace it."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


@dataclass(frozen=True, slots=True)
class Child:
    """One of `fork_as`. said: where its stderr can be read."""

    pid: int
    said: int


def fork_as(
    entry: pwd.struct_passwd,
    work: Callable[[], int],
    failed: int,
    complain: Callable[[str], None],
    keep: Collection[int] = (),
) -> Child:
    """Runs `work` in a child that has become `entry`'s user; for `outcome`.

    The child's exit status is what `work` returns, or `failed`, after a word to `complain`, if it raises or the
    change of user fails. Of root's descriptors it has `keep` only: a user's file system can make it hang for ever,
    with whatever lock or output of slurmd's it holds.
    """
    said, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = failed
        try:
            _leave(says, keep)
            drop_to(entry)
            status = work()
        except Exception as exc:
            complain(str(exc) if isinstance(exc, PrivilegeError) else f"{type(exc).__name__}: {exc}")
        finally:
            os._exit(status)
    os.close(says)
    return Child(pid, said)


def _leave(says: int, keep: Collection[int]) -> None:
    syslog.closelog()
    null = os.open(os.devnull, os.O_RDWR)
    for number, fd in ((0, null), (1, null), (2, says)):
        os.dup2(fd, number)
    kept = sorted({2, *keep})
    for one, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(one + 1, following)


def outcome(child: Child, timeout_s: float) -> int:
    """Exit status of a child, negative if a signal ended it; what it has said goes to stderr. The child is its user's
    to stop, to kill, or to let hang in a file system of theirs: root waits for at most `timeout_s`, kills it, and
    waits `KILLED_S` more. `HANGS`: it is there still."""
    process = os.pidfd_open(child.pid)
    try:
        if not select.select([process], [], [], max(0.0, timeout_s))[0]:
            os.kill(child.pid, signal.SIGKILL)
            if not select.select([process], [], [], KILLED_S)[0]:
                return HANGS
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    finally:
        os.close(process)
        os.set_blocking(child.said, False)
        with suppress(OSError):  # nothing said
            lines.put(sys.stderr, os.read(child.said, _SAID_BYTES).decode(errors="replace"))
        os.close(child.said)
