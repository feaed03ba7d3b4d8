"""Process 1 of a pid namespace: the controller host's, and within it each node's.

The file is run by path (`python -I -S init.py CLUSTER HOST FD`), so it imports no other part of the package.
FD is one end of a SOCK_SEQPACKET pair, and the cluster tool holds the other. Dialogue:

    tool -> init   the specification, JSON: {"record": PATH or null, "booted": does the host's uptime begin now,
                   "mounts": [[kind, ...], ...]}
    init -> tool   "ready" (the kernel adds our pid as the tool sees it), or "error: ..."
    tool -> init   "commit": the cluster is complete and outlives the tool

End of file before "commit" means that the tool was killed halfway. The init exits then, and the kernel ends
every process in its namespaces.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x20000000, 0x40000000, 0x00000080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process, or its future children, into new namespaces."""
    if _libc.unshare(flags):
        error = ctypes.get_errno()
        raise OSError(error, f"the kernel refuses new namespaces: {os.strerror(error)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system. Raises OSError with the target in its text."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None):
        error = ctypes.get_errno()
        raise OSError(error, f"mount {kind or source} on {target}: {os.strerror(error)}")


def reset_uptime() -> None:
    """Start the host's uptime at zero in a time namespace; without such namespaces it is the machine's."""
    if not os.path.exists("/proc/self/timens_offsets"):
        return
    unshare(CLONE_NEWTIME)
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write(f"boottime -{int(time.clock_gettime(time.CLOCK_BOOTTIME))} 0")


def apply(step: list[Any]) -> None:
    """Carry out one step of the specification.

    The steps are: proc | tmpfs TARGET MODE | run TARGET OPTIONS | bind SOURCE TARGET READONLY | mkdir PATH
    MODE.
    """
    match step:
        case ["proc"]:
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        case ["tmpfs", target, mode]:
            mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode:o}")
        case ["run", target, options]:
            mount("gemini-hpc", target, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        case ["bind", source, target, readonly]:
            mount(source, target, "", MS_BIND | MS_REC)
            if readonly:
                mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY)
        case ["mkdir", path, mode]:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
        case _:
            raise ValueError(f"unknown step {step}")


def write_record(path: str) -> None:
    """Record our pid as the host sees it, since /proc is still the host's at this point."""
    pid = os.readlink("/proc/self")
    with open("/proc/self/stat") as stat:
        start = stat.read().rpartition(")")[2].split()[19]
    with open(path + ".new", "w") as record:
        record.write(f'{{"pid":{pid},"start":{start}}}\n')
    os.rename(path + ".new", path)


def reap() -> None:
    """Reap all ended children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def serve(channel: socket.socket) -> NoReturn:
    """Wait for "commit", then reap children forever; exit if the tool ends before."""
    while True:
        readable, _, _ = select.select([channel], [], [], 0.2)
        reap()
        if readable:
            if channel.recv(64) != b"commit":
                os._exit(1)
            break
    channel.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        reap()
        signal.sigwait({signal.SIGCHLD})


def main() -> None:
    """Make the namespaces and mounts of a host, and become its init."""
    host, channel = sys.argv[2], socket.socket(fileno=int(sys.argv[3]))
    spec = json.loads(channel.recv(1 << 16) or "null")
    if spec is None:
        return
    try:
        if spec["booted"]:
            reset_uptime()
        unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
        if os.fork():
            # The parent exits on purpose: the new init becomes the child of the enclosing init, not of the
            # tool.
            os._exit(0)
        if spec["record"]:
            write_record(spec["record"])
        os.setsid()
        mount("", "/", "", MS_REC | MS_PRIVATE)
        socket.sethostname(host)
        for step in spec["mounts"]:
            apply(step)
        channel.send(b"ready")
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        channel.send(f"error: {text}".encode())
        os._exit(1)
    serve(channel)


if __name__ == "__main__":
    main()
