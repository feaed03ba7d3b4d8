"""The progress page that this rank writes to shared memory once a second for its agent, unasked."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from gemini_hpc.wire import progress_page
from gemini_hpc.wire.progress_page import Progress

# A real-time signal that debuggers, profilers and runtimes do not use.
_STACK_SIGNAL = signal.SIGRTMIN + 12
_answering = threading.Lock()  # held by the page whose file receives this process's stacks


class OwnProgress:
    """A rank's progress page.

    Attributes:
        fd: Descriptor of the page.
    """

    def __init__(self, read_progress: Callable[[], Progress]) -> None:
        """Create the page and write it once.

        Args:
            read_progress: Returns the page's content except `beats` and `signal`. Called from another thread than the
                training's, which may hang.

        Raises:
            OSError: The memory for the page could not be made.
        """
        self._read_progress, self._beats, self._lock = read_progress, 0, threading.Lock()
        self._reported = Progress()
        self.fd = os.memfd_create("gemini:progress", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, progress_page.STACKS_AT)
        os.lseek(self.fd, 0, os.SEEK_END)
        self._signal = self._register_signal()
        self.beat()

    def _register_signal(self) -> int:
        """Register a signal that writes the main thread's Python stack; return its number, or 0 for none.

        The signal works even if that thread never returns from C code. If the program uses the signal itself, no
        stacks are available.
        """
        if signal.getsignal(_STACK_SIGNAL) != signal.SIG_DFL or not _answering.acquire(blocking=False):
            return 0
        with suppress(ValueError, OSError, RuntimeError):
            faulthandler.register(_STACK_SIGNAL, self.fd, all_threads=False)
            return _STACK_SIGNAL
        _answering.release()
        return 0

    def beat(self) -> None:
        """Write the page. Never raises."""
        with suppress(Exception), self._lock:  # a failure of ours must not reach the training
            self._beats += 1
            self._reported = self._read_progress()._replace(beats=self._beats, signal=self._signal)
            os.pwrite(self.fd, progress_page.pack(self._reported), 0)

    def count_step(self, version: int) -> None:
        """Write the number of the step that the training's thread has just completed. Never raises."""
        with suppress(Exception), self._lock:
            self._reported = self._reported._replace(version=version, launched=0)
            os.pwrite(self.fd, progress_page.pack(self._reported), 0)

    def close(self) -> None:
        """Unregister the signal and close the page."""
        with self._lock:
            if self._signal:
                faulthandler.unregister(self._signal)
                self._signal = 0
                _answering.release()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
