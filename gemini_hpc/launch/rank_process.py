"""The process of one rank in one attempt: forked from the launcher, killed with all its descendants."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gemini_hpc import clock, lines
from gemini_hpc.client import mistake
from gemini_hpc.core.communication_error import is_communication_error
from gemini_hpc.core.culprits import Cause
from gemini_hpc.core.device_error import is_device_error
from gemini_hpc.launch.signals import SENT

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_S = 10.0  # a rank that SIGKILL has not ended by then hangs in the kernel
_NOTE_BYTES = 1 << 16


class _Note:
    """A rank's note for its launcher, in shared memory.

    [0] is the cause plus 1, [1] is whether memory ran out. Words and a traceback follow, each preceded by its length.
    """

    _WORDS_AT, _TEXT_AT = 2, 1024

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _NOTE_BYTES)

    def write(self, cause: Cause, error: BaseException) -> None:
        """Write an exception's evidence; the cause comes last, because it marks the note as complete."""
        self._map[1] = mistake.is_memory_error(error)
        self._put(self._WORDS_AT, mistake.describe_error(error), self._TEXT_AT)
        self._map[0] = 1 + cause

    def leave(self, text: str) -> None:
        """Write a traceback, shortened to its beginning and end if too long."""
        most = _NOTE_BYTES // 4
        short = text if len(text) <= most // 2 else f"{text[: most // 4]}\n[...]\n{text[-most // 4 :]}"
        self._put(self._TEXT_AT, short, _NOTE_BYTES)

    def _put(self, offset: int, text: str, end: int) -> None:
        data = text.encode("utf-8", "replace")[: end - offset - 4]
        self._map[offset + 4 : offset + 4 + len(data)] = data
        self._map[offset : offset + 4] = len(data).to_bytes(4, "little")

    def _get(self, offset: int, end: int) -> str:
        length = int.from_bytes(self._map[offset : offset + 4], "little")
        return self._map[offset + 4 : min(offset + 4 + length, end)].decode("utf-8", "replace")

    @property
    def cause(self) -> Cause | None:
        """Return the cause that an exception shows, or None without one."""
        code = self._map[0]
        return Cause(code - 1) if 0 < code <= len(Cause) else None

    @property
    def is_memory(self) -> bool:
        """Return whether memory ran out."""
        return bool(self._map[1])

    @property
    def words(self) -> str:
        """Return kind and place of the exception."""
        return self._get(self._WORDS_AT, self._TEXT_AT)

    @property
    def text(self) -> str:
        """Return the exception's traceback."""
        return self._get(self._TEXT_AT, _NOTE_BYTES)


_notes: dict[int, _Note] = {}  # in a rank's process: its note, by process id


class Forked(Exception):
    """An exception raised in the new process, which leaves the launcher's frames and becomes the rank."""


def adopt_orphans() -> None:
    """Make this process the parent of a dead rank's children (such as data loader workers)."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _call_prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class RankProcess:
    """A rank's process."""

    def __init__(self, env: Mapping[str, str], command: Sequence[str] = ()) -> None:
        """Fork the rank.

        Args:
            env: Variables to set in the rank.
            command: Command to execute instead of continuing in the fork, if that is not possible.

        Raises:
            OSError: The fork failed.
            Forked: Raised in the new process.
        """
        self._others = frozenset(_list_children())
        self.note = _Note()
        lines.flush_streams()
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _notes[os.getpid()] = self.note
            self._prepare_child(launcher, env, command)
        self.fd = os.pidfd_open(self.pid)
        self.status: int | None = None
        self.killed = False  # the launcher has killed it

    @staticmethod
    def _prepare_child(launcher: int, env: Mapping[str, str], command: Sequence[str]) -> None:
        """Prepare the new process: it ends with its launcher and handles signals by default."""
        _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
        for number in SENT:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.environ.update(env)
        if not command:
            raise Forked
        try:
            os.execv(command[0], list(command))
        except OSError as error:
            lines.write_line(f"launch: {command[0]}: {error.strerror}")
        os._exit(127)

    def has_ended(self) -> bool:
        """Return whether the process has ended; `status` is then its exit status as a shell reports it."""
        if self.status is None:
            pid, word = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(word)
                self.status = code if code >= 0 else 128 - code
                os.close(self.fd)
        return self.status is not None

    @property
    def raised(self) -> Cause | None:
        """Return the cause shown by an exception that passes through the rank or has ended it.

        The cause is known before the process ends.
        """
        return self.note.cause

    @property
    def cause(self) -> Cause | None:
        """Return the cause of the end, unless the launcher killed the process; None without a failure."""
        if not self.status or self.raised is not None:
            return self.raised
        number = self.status - 128
        if number in SENT:
            return Cause.CONSEQUENCE
        if number == signal.SIGABRT:
            return Cause.ABORTED
        return Cause.CRASHED if number > 0 else Cause.RAISED

    def kill(self) -> None:
        """Kill the process and all its descendants, and wait up to 10 s until none is left."""
        deadline = clock.monotonic() + _KILL_S
        self.killed = self.killed or not self.has_ended()
        while clock.monotonic() < deadline:
            self.has_ended()
            left = [pid for pid in _list_children() if pid not in self._others]
            if not left:
                return
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                if pid != self.pid:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            clock.sleep(0.002)


def note_error(error: BaseException) -> None:
    """Record in the rank that this exception ends the script.

    The note is written at once, because a handler of the exception may wait and be killed meanwhile.
    """
    note = _notes.get(os.getpid())  # processes forked by the rank have no note
    if note is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        cause = Cause.DEVICE if is_device_error(error) else Cause.RAISED
        note.write(Cause.CONSEQUENCE if is_communication_error(error) else cause, error)


def leave_traceback(error: BaseException) -> None:
    """Write the traceback to the rank's note for the launcher, or print it here without a launcher."""
    note = _notes.get(os.getpid())
    if note is None:
        mistake.show(error)
    else:
        note.leave(mistake.format_traceback(error))


def _list_children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return found
