"""What this rank shows of its progress: to its agent, in shared memory, once a second, and without being asked."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from gemini_hpc.wire import progress_page
from gemini_hpc.wire.progress_page import Progress

# Of the real-time signals one that debuggers, profilers and runtimes leave alone.
_STACK_SIGNAL = signal.SIGRTMIN + 12
_answering = threading.Lock()  # held by the page behind which this process's stacks come


class OwnProgress:
    """One rank's page. look: what it says, but for `beats` and `signal`; called from another thread than the
    training's, which may stand still. fd: of the page."""

    def __init__(self, look: Callable[[], Progress]) -> None:
        """Raises OSError."""
        self._look, self._beats, self._lock = look, 0, threading.Lock()
        self.fd = os.memfd_create("gemini:progress", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, progress_page.STACKS_AT)
        os.lseek(self.fd, 0, os.SEEK_END)
        self._signal = self._answer()
        self.beat()

    def _answer(self) -> int:
        """Have a signal answered with the main thread's Python stack, also while that thread is in C code for good.
        Where the program has use for the signal itself, there are no stacks."""
        if signal.getsignal(_STACK_SIGNAL) != signal.SIG_DFL or not _answering.acquire(blocking=False):
            return 0
        with suppress(ValueError, OSError, RuntimeError):
            faulthandler.register(_STACK_SIGNAL, self.fd, all_threads=False)
            return _STACK_SIGNAL
        _answering.release()
        return 0

    def beat(self) -> None:
        """Write the page. Never raises."""
        with suppress(Exception), self._lock:  # our own failure must not reach the training
            self._beats += 1
            told = self._look()._replace(beats=self._beats, signal=self._signal)
            os.pwrite(self.fd, progress_page.pack(told), 0)

    def close(self) -> None:
        """Nothing is shown any more."""
        with self._lock:
            if self._signal:
                faulthandler.unregister(self._signal)
                self._signal = 0
                _answering.release()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
