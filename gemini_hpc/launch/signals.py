"""Signals that a batch system or a person sends to a launcher; its rank gets each of them once.

Slurm sends a step's signals to all of its processes. With `proctrack/cgroup` Slurm sends them only to the first
process of each task, the launcher. Nothing in the rank shows which of the two happened. A witness does: a child
beside the rank that waits for signals. A signal that reached the witness has reached the rank.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
from contextlib import suppress
from typing import NamedTuple, NoReturn

from gemini_hpc import clock

# Signals that people and batch systems send.
SENT: tuple[signal.Signals, ...] = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Signals that ask a process to end. Most programs continue after the others, which ask for something else.
ENDING = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
# A process that ends this soon (seconds) after a signal has ended because of it.
SIGNAL_EFFECT_S = 60.0
LATER_S = 1.0  # by then a signal to all processes of the step has reached the last one
SOON_S = 0.2  # the same on a quiet node
_PR_SET_PDEATHSIG = 1


def explains_status(number: signal.Signals, status: int) -> bool:
    """Return whether an exit status may be the effect of a signal.

    A signal that asks for something else does not explain an end by another signal.
    """
    return number in ENDING or status <= 128 or status == 128 + number


class Witness:
    """A child that reports the signals that reach it, until this process ends."""

    def __init__(self) -> None:
        """Fork the child.

        Raises:
            OSError: The fork or the pipe failed.
        """
        self._owner = os.getpid()
        self._got, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._seen: list[int] = []
        self._waited: list[int] = []  # signals found waiting for the child, which it has not reported yet
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SENT)  # an early signal would end the child
        self._pid = os.fork()
        if self._pid == 0:
            self._watch(self._owner, write_end, blocked)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(write_end)

    @staticmethod
    def _watch(parent: int, write_end: int, blocked: set[int]) -> NoReturn:
        """Run as the child, which keeps no descriptor of its parent except the pipe."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            for number in SENT:
                signal.signal(number, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.closerange(3, write_end)
            os.closerange(write_end + 1, os.sysconf("SC_OPEN_MAX"))
            while os.getppid() == parent:
                signal.pause()
        finally:
            os._exit(0)

    def has_got(self, number: int) -> bool:
        """Return whether this signal has reached the child; each signal is reported once.

        On a busy node the child may not have run since: then the signal waits for it in the kernel.
        """
        waits = self._is_pending(number)  # before the pipe is read: afterwards the child may have handled it
        with suppress(BlockingIOError):
            self._seen += os.read(self._got, 256)
        for late in [late for late in self._waited if late in self._seen]:
            self._waited.remove(late)
            self._seen.remove(late)
        if number in self._seen:
            self._seen.remove(number)
            return True
        if waits and number not in self._waited:
            self._waited.append(number)
            return True
        return False

    def _is_pending(self, number: int) -> bool:
        try:
            with open(f"/proc/{self._pid}/status", encoding="ascii", errors="replace") as file:
                masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
        except OSError:
            return False
        return any(mask >> (number - 1) & 1 for mask in masks)

    def close(self) -> None:
        """End the child; a fork of this process only closes its descriptor."""
        os.close(self._got)
        if os.getpid() == self._owner:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


class _Arrived(NamedTuple):
    """A signal of the launcher: when it arrived, and when it is passed on at the latest (monotonic seconds)."""

    number: int
    at: float
    due: float


class Signals:
    """The signals that a launcher receives after `install_handlers`.

    Attributes:
        last: Newest signal and its time (monotonic seconds); None: none yet.
        asked: Newest signal that asks to end, likewise.
        fd: Readable if a signal has arrived; -1 before `install_handlers`.
    """

    def __init__(self) -> None:
        self.last: tuple[signal.Signals, float] | None = None
        self.asked: tuple[signal.Signals, float] | None = None
        self.fd = self._wake = -1
        self._due: list[_Arrived] = []
        self._reached: dict[int, float] = {}  # when the newest of each kind arrived that went to all processes
        self._witness: Witness | None = None

    def install_handlers(self) -> None:
        """Handle the signals of this process from now on.

        Raises:
            OSError: The pipe or the witness could not be made.
        """
        self.fd, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._witness = Witness()
        # Python runs a handler only after a wait that a signal may have come just too early to interrupt.
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in SENT:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = clock.monotonic()
        self.last = signal.Signals(number), now
        if number in ENDING:
            self.asked = self.last
        self._due.append(_Arrived(number, now, now + LATER_S))

    def compute_wait_s(self) -> float | None:
        """Return the seconds until `pass_on` has a signal to send, or None if none arrived."""
        if self.fd >= 0:
            with suppress(BlockingIOError):
                os.read(self.fd, 256)
        return max(0.0, self._due[0].due - clock.monotonic()) if self._due else None

    def hurry(self) -> None:
        """Pass the signals on within `SOON_S`: the job waits for the step's end."""
        soon = clock.monotonic() + SOON_S
        self._due = [arrived._replace(due=min(arrived.due, soon)) for arrived in self._due]

    def pass_on(self, pid: int) -> None:
        """Send the rank each signal that has reached this process but not the rank."""
        now = clock.monotonic()
        while self._due and self._due[0].due <= now:
            number, at, _ = self._due.pop(0)
            if not self._has_reached_rank(number, at):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _has_reached_rank(self, number: int, at: float) -> bool:
        """Return whether a signal went to all processes of the step.

        The kernel merges a signal with one of its kind that still waits: the witness then reports two as one.
        """
        if self._witness is None:
            return False
        if self._witness.has_got(number):
            self._reached[number] = at
            return True
        return at - self._reached.get(number, -math.inf) < LATER_S

    def was_asked_since(self, moment: float) -> bool:
        """Return whether a signal that asks to end arrived since this moment (monotonic seconds)."""
        return self.asked is not None and self.asked[1] >= moment

    def forget(self) -> None:
        """Drop the received signals, because there is no rank to send them to."""
        self._due.clear()

    def end(self) -> None:
        """Ignore signals from now on.

        The exit status is known, and an interpreter that ends has no handlers.
        """
        for number in SENT:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Close descriptors and the witness; also called in a fork of this process."""
        if self._witness is not None:
            signal.set_wakeup_fd(-1)
            os.close(self.fd)
            os.close(self._wake)
            self._witness.close()
