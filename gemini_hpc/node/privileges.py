"""The change from root to another user for good: to a job's owner in a process that the owner cannot trace."""

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


KILLED_S = 0.3  # a child that SIGKILL has not ended by then hangs in the kernel
HANGS = -256  # outcome of a child that survives even SIGKILL for `KILLED_S`
_SAID_BYTES = 4096


class PrivilegeError(Exception):
    """An error for a process that could not become the job's owner, or could not prove it."""


def find_owner(uid: int) -> pwd.struct_passwd:
    """Return the passwd entry of a job's owner.

    The gid and groups come from here, never from Slurm's environment (CVE-2018-10995).

    Raises:
        PrivilegeError: The uid is not known on this node.
    """
    try:
        return pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        raise PrivilegeError(f"uid {uid} is not known on this node; add the user or check the name service") from None


def become_user(entry: pwd.struct_passwd) -> None:
    """Change from root to `entry`'s uid, gid and groups (real, effective and saved), and verify the change.

    Raises:
        PrivilegeError: The change failed. The caller must not go on (CVE-2019-19728 is a daemon that did).
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
        return
    raise PrivilegeError(f"became uid {uid}, but could become root again")


def drop_to(entry: pwd.struct_passwd) -> None:
    """Become a job's owner, and close this process to the owner until it executes a program (`close_to_owner`).

    Raises:
        PrivilegeError: As for `become_user`, or the process could not be closed.
    """
    become_user(entry)
    if entry.pw_uid:
        close_to_owner()


def close_to_owner() -> None:
    """Close this process and its forks to its owner's other processes.

    Nobody can trace it or read its memory and descriptors through /proc. It leaves no core file, and programs that
    it executes gain no rights. Its owner can still stop and end it.

    Raises:
        PrivilegeError: The kernel does not close the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or is_traceable():
        raise PrivilegeError(
            f"could not close this process to its owner's other processes: {os.strerror(ctypes.get_errno())}"
        )


def is_traceable() -> bool:
    """Return whether other processes of this one's owner may trace it."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


@dataclass(frozen=True, slots=True)
class Child:
    """A child that `fork_as` made.

    Attributes:
        pid: The pid of the child.
        said: Descriptor from which the child's stderr can be read.
    """

    pid: int
    said: int


def fork_as(
    entry: pwd.struct_passwd | None,
    work: Callable[[], int],
    failed: int,
    complain: Callable[[str], None],
    keep: Collection[int] = (),
) -> Child:
    """Run `work` in a child that has become `entry`'s user. Pass the child to `wait_for_child`.

    The child inherits only the descriptors `keep` from root: a user's file system can make the child hang forever,
    with any lock or output of slurmd's that it holds.

    Args:
        entry: The user that the child becomes; None: it stays root.
        work: Function to run in the child; its result is the exit status.
        failed: Exit status if `work` raises or the change of user fails.
        complain: Called in the child with the error in those cases.
        keep: Descriptors that the child keeps.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = failed
        try:
            _close_descriptors(write_end, keep)
            if entry is not None:
                drop_to(entry)
            status = work()
        except Exception as exc:
            complain(str(exc) if isinstance(exc, PrivilegeError) else f"{type(exc).__name__}: {exc}")
        finally:
            os._exit(status)
    os.close(write_end)
    return Child(pid, read_end)


def _close_descriptors(says: int, keep: Collection[int]) -> None:
    syslog.closelog()
    null = os.open(os.devnull, os.O_RDWR)
    for number, fd in ((0, null), (1, null), (2, says)):
        os.dup2(fd, number)
    kept = sorted({2, *keep})
    for one, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(one + 1, following)


def wait_for_child(child: Child, timeout_s: float) -> int:
    """Return the exit status of a child; negative if a signal ended it, `HANGS` if it is still there.

    The child's stderr is copied to this process's. The child's user can stop it, kill it, or make it hang in a file
    system of their own. So root waits at most `timeout_s`, kills the child, and waits `KILLED_S` more.
    """
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
        with suppress(OSError):  # the child has written nothing
            lines.put(sys.stderr, os.read(child.said, _SAID_BYTES).decode(errors="replace"))
        os.close(child.said)
