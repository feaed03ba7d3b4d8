"""What a rank imports after its script's first lines (torch does much of it at first use), told to its launcher.

The rank writes each name into a pipe before the module is looked for. The launcher imports the same when the rank has
long been at work, so that the next attempt finds it there.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

from gemini_hpc import clock
from gemini_hpc.launch.program import get

QUIET_S = 2.0  # without a further name: then the rank is at work
MOST = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)
_PART_BYTES = 1 << 16


class ImportLog:
    """Both ends: one for all attempts."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""
        self._seen: set[str] = set()
        self._names: deque[str] = deque()
        self._heard_at = clock.monotonic()

    # ---- the rank's --------------------------------------------------------------------------------------

    def record(self) -> None:
        """In the rank's process, from now on."""
        os.close(self.fd)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Called by the import system; finds nothing. A name is lost where the pipe is full."""
        with suppress(OSError, UnicodeError):
            os.write(self._write, name.encode("ascii") + b"\n")

    # ---- the launcher's ----------------------------------------------------------------------------------

    def read(self) -> None:
        """Take what names there are."""
        with suppress(BlockingIOError):
            while part := os.read(self.fd, _PART_BYTES):
                *lines, self._rest = (self._rest + part).split(b"\n")
                self._rest = self._rest[-_PART_BYTES:]
                for line in lines:
                    name = line.decode("ascii", "replace")
                    if name not in self._seen and len(self._seen) < MOST and _NAME.fullmatch(name):
                        self._seen.add(name)
                        self._names.append(name)
        self._heard_at = clock.monotonic()

    def due_s(self) -> float | None:
        """After how many seconds there is something to import; None: there is nothing."""
        return max(0.0, self._heard_at + QUIET_S - clock.monotonic()) if self._names else None

    def take_one(self) -> None:
        """Import the next module that the rank has imported."""
        name = self._names.popleft()
        if name not in sys.modules and name != "__main__":
            get(name)
