"""The start of agent and reaper as daemons that outlive prolog and epilog.

They keep no resource of slurmd's, but remain its descendants.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable

from gemini_hpc.node import privileges

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
LOG_NAME = "agent.log"
HANDED = 3


class LaunchError(Exception):
    """An error for an agent whose process could not be made."""


class NoRoomError(LaunchError):
    """An error for a node without memory for another agent now; the installation is not at fault."""


def start_agent(
    directory: str,
    job: int,
    uid: int,
    node: str,
    share: tuple[int, str],
    first: Callable[[int], None],
    keys: bytes = b"",
) -> int:
    """Start the agent as a daemon and return its pidfd. Requires root.

    The agent's program is executed as root and becomes the owner (`drop_privileges`) before anything else. So its
    owner cannot trace it.

    Args:
        directory: The job's directory.
        job: The job's id.
        uid: The uid of the job's owner.
        node: This node's name.
        share: The job's share of the node's cap, in bytes and in words.
        first: Called with the pid before the program is executed.
        keys: Packed keys of the agent (`wire.site_key`); b"": the site has MUNGE.

    Raises:
        LaunchError: The process could not be made.
    """
    argv = [sys.executable, "-I", "-m", "gemini_hpc.agent"]
    argv += ["--job", str(job), "--uid", str(uid), "--node", node, "--dir", directory]
    argv += ["--share-bytes", str(share[0]), "--share", share[1]]
    if not keys:
        return start_daemon(argv, first)
    reader, writer = os.pipe()
    try:
        os.write(writer, keys)  # fits into the pipe, which nobody else can open
        os.close(writer)
        return start_daemon([*argv, "--keys"], first, reader)
    finally:
        os.close(reader)


def start_daemon(argv: list[str], first: Callable[[int], None], handed: int = -1) -> int:
    """Execute a daemon after `first` has been called with its pid. Return its pidfd. Requires root.

    slurmd kills the script's process group when the script ends, and waits for its output to close. So the daemon
    has a session of its own and no inherited descriptor but `handed`, as `HANDED`.

    Raises:
        LaunchError: The process ended at once.
    """
    reader, writer = os.pipe()
    held, go = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.close(go)
            os.setsid()
            agent = os.fork()
            if agent == 0:
                _exec_daemon(argv, held, handed)
            os.write(writer, str(agent).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.close(held)
    try:
        text = os.read(reader, 16)
        os.waitpid(between, 0)
        try:
            process = os.pidfd_open(int(text))
        except (ValueError, OSError):
            raise LaunchError("its process ended at once") from None
        first(int(text))
        os.write(go, b"!")
        return process
    finally:
        os.close(reader)
        os.close(go)


def _exec_daemon(argv: list[str], held: int, handed: int) -> None:
    try:
        if os.read(held, 1) != b"!":
            return  # the prolog has ended before it released this process
        os.chdir("/")
        os.umask(0o077)
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        if handed >= 0:
            os.dup2(handed, HANDED)
            os.set_inheritable(HANDED, True)
        os.closerange(3 if handed < 0 else HANDED + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(argv[0], argv, ENVIRONMENT)
    finally:
        os._exit(127)


def drop_privileges(uid: int, directory: str) -> None:
    """Become the owner for good in the executed program, and direct output to the job's log.

    The process is closed to the owner's other processes.

    Raises:
        PrivilegeError: The process could not become the owner.
    """
    if os.geteuid() == 0:
        privileges.drop_to(privileges.find_owner(uid))
        redirect_output(f"{directory}/{LOG_NAME}")
    if os.geteuid() != uid:
        raise privileges.PrivilegeError(f"wanted uid {uid}, running as {os.geteuid()}")
    os.umask(0o077)


def redirect_output(path: str) -> None:
    """Append standard output and error to the log; leave them unchanged if the path is not a regular file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        log = os.open(path, flags, 0o600)
    except OSError:
        return
    if stat.S_ISREG(os.fstat(log).st_mode):
        os.set_blocking(log, True)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.close(log)
