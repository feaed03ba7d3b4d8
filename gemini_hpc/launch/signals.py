"""Signals that a batch system or a person sends to a launcher: its rank gets each of them once.

Slurm sends a step's signals to all of its processes or, with `proctrack/cgroup`, to the first process of each task
alone, and that is the launcher. Nothing in the rank shows which of the two it was. A witness does: a child beside the
rank that waits for signals. What has reached the witness has reached the rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from typing import NoReturn

from gemini_hpc import clock

# What people and batch systems send.
SENT: tuple[signal.Signals, ...] = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# These ask a process to end. The others ask for something else, and most programs that get them go on.
ENDING = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
# What ends so soon after a signal has ended because of it.
HEEDED_S = 60.0
LATER_S = 1.0  # within which a signal to all processes of the step has reached the last of them
_PR_SET_PDEATHSIG = 1


def is_heeded(number: signal.Signals, status: int) -> bool:
    """Return whether an end, as an exit status, may be what a signal was sent for.

    A signal that asks for something else is not why another one has ended a process.
    """
    return number in ENDING or status <= 128 or status == 128 + number


class Witness:
    """A child that reports the signals that reach it, until this process ends."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._owner = os.getpid()
        self._got, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._seen: list[int] = []
        self._pid = os.fork()
        if self._pid == 0:
            self._watch(self._owner, told)
        os.close(told)

    @staticmethod
    def _watch(parent: int, told: int) -> NoReturn:
        """Be the child: it holds nothing of its parent's but the pipe."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for number in SENT:
                signal.signal(number, lambda number, _: os.write(told, bytes([number])))
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.closerange(3, told)
            os.closerange(told + 1, os.sysconf("SC_OPEN_MAX"))
            while os.getppid() == parent:
                signal.pause()
        finally:
            os._exit(0)

    def has_got(self, number: int) -> bool:
        """Return whether this signal has reached the child; each is reported once."""
        with suppress(BlockingIOError):
            self._seen += os.read(self._got, 256)
        if number not in self._seen:
            return False
        self._seen.remove(number)
        return True

    def close(self) -> None:
        """End the child; in a fork of this process only its descriptor is closed."""
        os.close(self._got)
        if os.getpid() == self._owner:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


class Signals:
    """The signals that a launcher gets, from `begin` on.

    last: the newest one and when it came, None before the first; asked: the newest that asks to end, likewise; fd:
    readable when one has come, -1 before `begin`.
    """

    def __init__(self) -> None:
        self.last: tuple[signal.Signals, float] | None = None
        self.asked: tuple[signal.Signals, float] | None = None
        self.fd = self._wake = -1
        self._due: list[tuple[int, float]] = []
        self._witness: Witness | None = None

    def begin(self) -> None:
        """Take the signals of this process from now on. Raises OSError."""
        self.fd, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._witness = Witness()
        for number in SENT:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        now = clock.monotonic()
        self.last = signal.Signals(number), now
        if number in ENDING:
            self.asked = self.last
        self._due.append((number, now + LATER_S))
        with suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def due_s(self) -> float | None:
        """Return the seconds until `pass_on` has something to do; None: nothing came."""
        if self.fd >= 0:
            with suppress(BlockingIOError):
                os.read(self.fd, 256)
        return max(0.0, self._due[0][1] - clock.monotonic()) if self._due else None

    def pass_on(self, pid: int) -> None:
        """Send the rank what has reached this process alone."""
        now = clock.monotonic()
        while self._due and self._due[0][1] <= now:
            number, _ = self._due.pop(0)
            if self._witness is None or not self._witness.has_got(number):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def asked_since(self, moment: float) -> bool:
        """Return whether one that asks to end has come since a moment of the monotonic clock."""
        return self.asked is not None and self.asked[1] >= moment

    def forget(self) -> None:
        """Pass nothing on of what has come: there is no rank."""
        self._due.clear()

    def end(self) -> None:
        """Ignore what comes now: the exit status is known, and an interpreter that ends has no handlers."""
        for number in SENT:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Have no part in it any more, in a fork of this process, too."""
        if self._witness is not None:
            os.close(self.fd)
            os.close(self._wake)
            self._witness.close()
