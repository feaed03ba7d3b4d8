"""Worker processes that an agent's supervisor forks for it, to work on the tier.

The owner of an agent must not be able to trace the agent's memory (`privileges.close_to_owner`). The kernel lets the
owner trace any program that the owner's process executes. Workers therefore execute no program: the supervisor, which
has one thread, forks them. The agent asks over a dedicated socket, and receives a descriptor of the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

WORKERS_MAX = 64
_FDS_A_PACKET = 200  # the kernel takes 253
_FDS_MAX = 8192
_PACKET_BYTES = 8192
_ANSWER_S = 10.0  # time limit for the supervisor's answer
_TITLE = b"gemini_hpc.tier.worker"


class NoWorker(Exception):
    """A failure to start a process. The message is one sentence."""


class SupervisorChannel:
    """The agent's end of the socket to its supervisor."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        sock.settimeout(_ANSWER_S)

    def start(self, fds: dict[int, int]) -> int:
        """Have a worker forked (blocking, for 10 s at most). Return its pidfd.

        Args:
            fds: Descriptors for the worker: its number there, and the agent's number.

        Raises:
            NoWorker: No process was started.
        """
        numbers = list(fds)
        with self._lock:
            try:
                for at in range(0, max(1, len(numbers)), _FDS_A_PACKET):
                    part = numbers[at : at + _FDS_A_PACKET]
                    last = at + _FDS_A_PACKET >= len(numbers)
                    packet = json.dumps({"numbers": part, "last": last}).encode()
                    socket.send_fds(self._sock, [packet], [fds[number] for number in part])
                answer, got, _, _ = socket.recv_fds(self._sock, _PACKET_BYTES, 1)
            except OSError as error:
                # A late answer would be mistaken for the answer to the next request.
                self._sock.close()
                raise NoWorker(f"the agent's supervisor does not answer: {error.strerror or error}") from None
        if got:
            os.set_inheritable(got[0], False)
            return got[0]
        raise NoWorker(answer.decode(errors="replace")[:200] or "the agent's supervisor is gone")


class Workers:
    """The supervisor's end of the socket, and all workers of one agent."""

    def __init__(self, work: Callable[[int], int], fork: Callable[[], int] = os.fork) -> None:
        """Create the socket.

        Args:
            work: Runs in a worker with its descriptors in place. Receives the parent's pid, and returns the exit
                status.
            fork: Forks the process.
        """
        self.sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._work, self._start = work, fork
        self._pidfds: dict[int, int] = {}
        self._fds: dict[int, int] = {}

    def serve(self) -> bool:
        """Handle the packet that has arrived. Return False if the agent's end is closed."""
        try:
            data, got, flags, _ = socket.recv_fds(self.sock, _PACKET_BYTES, _FDS_A_PACKET)
        except OSError:
            return False
        if not data:
            return False
        try:
            asked = json.loads(data)
            self._fds |= dict(zip(map(int, asked["numbers"]), got, strict=True))
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(self._fds) > _FDS_MAX:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            for fd in {*got, *self._fds.values()}:
                os.close(fd)
            self._fds = {}
            return False
        if asked["last"]:
            self._fork()
        return True

    def _fork(self) -> None:
        fds, self._fds = self._fds, {}
        answer, pidfd, parent = b"", -1, os.getpid()
        try:
            if len(self._pidfds) >= WORKERS_MAX:
                raise OSError(f"{WORKERS_MAX} tier processes are already running")
            pid = self._start()
            if pid == 0:
                self._become(fds, parent)
            pidfd = self._pidfds[pid] = os.pidfd_open(pid)
            answer = b"started"
        except OSError as error:
            answer = f"could not start a tier process: {error.strerror or error}".encode()
        finally:
            for fd in fds.values():
                os.close(fd)
        with suppress(OSError):
            socket.send_fds(self.sock, [answer], [pidfd] if pidfd >= 0 else [])

    def _become(self, fds: dict[int, int], parent: int) -> None:
        status = 1
        try:
            _set_title()
            above = max(fds, default=2) + 1
            # First move all descriptors out of the way, then each to its number. No other descriptor stays open.
            high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in fds.items()}
            for number, fd in high.items():
                os.dup2(fd, number)
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 2)
            kept = sorted({0, 1, 2, *fds})
            for one, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(one + 1, following)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            status = self._work(parent)
        except BaseException:
            status = 1
        finally:
            os._exit(status)

    def list_pidfds(self) -> list[int]:
        """Return the pidfds of all workers. A pidfd is readable when its worker has ended."""
        return list(self._pidfds.values())

    def close_pidfd(self, pid: int) -> None:
        """Close the pidfd of a worker that has been reaped."""
        pidfd = self._pidfds.pop(pid, -1)
        if pidfd >= 0:
            os.close(pidfd)

    def close(self) -> None:
        """Kill all workers, because their agent has gone."""
        self.sock.close()
        for pidfd in self._pidfds.values():
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pidfds = {}
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


def _set_title() -> None:
    """Set the process title that `ps` shows, so that a worker does not look like another agent."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="ascii", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
        room = end - begin
        if room > len(_TITLE):
            ctypes.memmove(begin, _TITLE + b"\0" * (room - len(_TITLE)), room)


def run_tier_worker(parent: int) -> int:
    """Carry out one of the agent's orders and return the exit status. Its code is loaded only in the worker."""
    sys.argv = [_TITLE.decode(), str(parent)]
    sys.stdin = os.fdopen(0, closefd=False)  # without buffered input of the supervisor
    from gemini_hpc.tier import worker

    return worker.main()
