"""Becoming the job's owner, for good, as a process that the owner cannot trace."""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
from collections.abc import Callable

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 3, 4, 38


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
        raise PrivilegeError(f"could not be shut: {os.strerror(ctypes.get_errno())}")


def traceable() -> bool:
    """Whether other processes of this one's owner may trace it."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


def fork_as(
    entry: pwd.struct_passwd,
    work: Callable[[], int],
    failed: int,
    complain: Callable[[str], None],
) -> int:
    """Runs `work` in a child that has become `entry`'s user; returns its pid, for `outcome`.

    The child's exit status is what `work` returns, or `failed`, after a word to `complain`, if it raises or the
    change of user fails.
    """
    child = os.fork()
    if child == 0:
        status = failed
        try:
            drop_to(entry)
            status = work()
        except Exception as exc:
            complain(str(exc) if isinstance(exc, PrivilegeError) else f"{type(exc).__name__}: {exc}")
        finally:
            os._exit(status)
    return child


def outcome(child: int, timeout_s: float) -> int:
    """Exit status of a child of `fork_as`, negative if a signal ended it. The child is its user's to stop or kill,
    so root waits for at most `timeout_s` and then kills it."""
    process = os.pidfd_open(child)
    try:
        if not select.select([process], [], [], max(0.0, timeout_s))[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(process)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
