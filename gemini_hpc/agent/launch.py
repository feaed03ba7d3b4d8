"""Starting the agent so that it outlives the prolog and has nothing of slurmd's but its parentage."""

from __future__ import annotations

import os
import signal
import stat
import sys

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
LOG_NAME = "agent.log"


class LaunchError(Exception):
    """The agent's process could not be made."""


def start(directory: str, job: int, uid: int, node: str) -> int:
    """Starts the agent as a daemon with the caller's uid; returns a pidfd of it.

    slurmd kills the prolog's process group when the prolog ends, and waits for its output to close: hence a
    session of its own and no inherited descriptor. Raises `LaunchError`.
    """
    argv = [sys.executable, "-I", "-m", "gemini_hpc.agent"]
    argv += ["--job", str(job), "--uid", str(uid), "--node", node, "--dir", directory]
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.setsid()
            agent = os.fork()
            if agent == 0:
                _become(argv, f"{directory}/{LOG_NAME}")
            os.write(writer, str(agent).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read(16)
    os.waitpid(between, 0)
    try:
        return os.pidfd_open(int(text))
    except (ValueError, OSError):
        raise LaunchError("its process ended at once") from None


def _become(argv: list[str], log_path: str) -> None:
    try:
        os.chdir("/")
        os.umask(0o077)
        null = os.open("/dev/null", os.O_RDWR)
        log = _open_log(log_path, null)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(argv[0], argv, ENVIRONMENT)
    except Exception as exc:
        os.write(2, f"gemini-hpc: agent could not be started: {exc}\n".encode())
    finally:
        os._exit(127)


def _open_log(path: str, null: int) -> int:
    """The log file, opened for appending; `null` where something else lies in its place."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        log = os.open(path, flags, 0o600)
    except OSError:
        return null
    if stat.S_ISREG(os.fstat(log).st_mode):
        os.set_blocking(log, True)
        return log
    return null
