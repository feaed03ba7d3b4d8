"""Becoming the job's owner, for good."""

from __future__ import annotations

import os
import pwd
import select
import signal
from collections.abc import Callable


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
    """Gives up root for `entry`'s uid, gid and groups in real, effective and saved form, and verifies it.

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
        return
    raise PrivilegeError(f"became uid {uid}, but could become root again")


def fork_as(
    entry: pwd.struct_passwd,
    work: Callable[[], int],
    failed: int,
    complain: Callable[[str], None],
    first: Callable[[int], None] = lambda _: None,
) -> int:
    """Runs `work` in a child that has become `entry`'s user; returns its pid, for `outcome`.

    The child's exit status is what `work` returns, or `failed`, after a word to `complain`, if it raises or the
    change of user fails. It begins when `first` has been called, here, with its pid.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = failed
        try:
            os.close(writer)
            os.read(reader, 1)  # ends when the other end is closed
            os.close(reader)
            drop_to(entry)
            status = work()
        except Exception as exc:
            complain(str(exc) if isinstance(exc, PrivilegeError) else f"{type(exc).__name__}: {exc}")
        finally:
            os._exit(status)
    os.close(reader)
    try:
        first(child)
    finally:
        os.close(writer)
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
