"""Commands on the hosts of a cluster, as any of its users."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from gemini_hpc.devcluster import accounts
from gemini_hpc.devcluster.layout import INSIDE_PYTHON, MARKER, ClusterFiles
from gemini_hpc.devcluster.requirements import find_program

Command = tuple[list[str], dict[str, str]]  # argument vector and environment
Stream = int | IO[str] | IO[bytes] | None
# `_CLOCK`: a node has its own boot time, if the kernel has time namespaces. `_IN_DIRECTORY` uses sh instead
# of `env -C`, so that a command whose name contains "=" stays a command.
_CLOCK = ["-T"] if os.path.exists("/proc/self/ns/time") else []
_IN_DIRECTORY = 'cd -- "$0" && exec "$@"'


def build_search_path() -> str:
    """Return PATH inside, with Slurm's own directories added if they are unusual ones."""
    usual = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    slurm = [str(Path(find_program(name)).parent) for name in ("srun", "slurmd", "slurmctld")]
    return os.pathsep.join(dict.fromkeys([str(INSIDE_PYTHON.parent), *slurm, *usual]))


def build_environment(layout: ClusterFiles, user: str, home: Path) -> dict[str, str]:
    """Return a login's environment; no variable of the calling tool is passed on."""
    return {
        "PATH": build_search_path(),
        "HOME": str(home),
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(layout.slurm_conf),
        MARKER: layout.name,
    }


def build_command(
    layout: ClusterFiles,
    pid: int,
    argv: Sequence[str],
    *,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    configless: bool = False,
) -> Command:
    """Return argument vector and environment that run `argv` beside the process `pid`.

    Args:
        layout: The cluster's files.
        pid: A process on the host, by its pid on this machine.
        argv: The command.
        user: The user; None means root.
        env: Further variables.
        cwd: The directory; None means the user's home, or / if there is none (or for root).
        configless: The host has no slurm.conf; Slurm's commands find the copy that slurmd has fetched.
    """
    enter = [find_program("nsenter"), "-t", str(pid), "-n", "-m", "-u", "-i", "-p", *_CLOCK, "--"]
    account = accounts.find_account(layout, user or "root")
    if user is not None and account.uid != 0:
        enter += [find_program("setpriv"), f"--reuid={account.uid}", f"--regid={account.gid}", "--init-groups", "--"]
    if cwd is None:
        cwd = account.home if account.uid and account.home.is_dir() else "/"
    inside = ["/bin/sh", "-c", _IN_DIRECTORY, str(cwd), *argv]
    variables = build_environment(layout, account.name, account.home)
    if configless:
        del variables["SLURM_CONF"]
    return enter + inside, {**variables, **(env or {})}


class ClusterProcess(subprocess.Popen[str]):
    """A command on a host; signals go to the whole process group, to nsenter and the command."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process group, unless the command has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, sig)


def start_command(
    command: Command,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = subprocess.PIPE,
    stderr: Stream = subprocess.PIPE,
) -> ClusterProcess:
    """Start the command that `build_command` has prepared, in its own session."""
    argv, env = command
    return ClusterProcess(
        argv,
        env=env,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd="/",
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def complete(process: ClusterProcess, text: str | None, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Wait for a command; after `timeout_s` seconds kill its process group and raise TimeoutExpired."""
    try:
        stdout, stderr = process.communicate(text, timeout_s)
    except BaseException:
        # Also on Ctrl-C. The group's leader, nsenter, has not been waited for, so the number still means this
        # group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that has left the group may hold the pipes open forever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2.0)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout or "", stderr or "")
