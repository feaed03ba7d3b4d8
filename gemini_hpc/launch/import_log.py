"""A log of a rank's late imports, sent to its launcher.

A rank imports more after its script's first lines; torch does much of its importing at first use. The rank writes
each name into a pipe before Python looks for the module. The launcher imports the same modules once the rank has long
been at work, so that the next attempt finds them imported.
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
from gemini_hpc.launch.program import import_names

QUIET_S = 2.0  # seconds without a new name after which the rank is at work
MOST = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)
_PART_BYTES = 1 << 16


class ImportLog:
    """Both ends of the pipe of import names, one for all attempts."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""
        self._seen: set[str] = set()
        self._names: deque[str] = deque()
        self._heard_at = clock.monotonic()

    # ---- in the rank -------------------------------------------------------------------------------------

    def start_recording(self) -> None:
        """Start recording imports, in the rank's process."""
        os.close(self.fd)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Record a name for the launcher and find nothing; called by the import system.

        The name is lost if the pipe is full.
        """
        with suppress(OSError, UnicodeError):
            os.write(self._write, name.encode("ascii") + b"\n")

    # ---- in the launcher ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the available names from the pipe."""
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

    def compute_wait_s(self) -> float | None:
        """Return the seconds until there is a module to import, or None if there is none."""
        return max(0.0, self._heard_at + QUIET_S - clock.monotonic()) if self._names else None

    def import_next(self) -> None:
        """Import the next module that the rank has imported."""
        name = self._names.popleft()
        if name not in sys.modules and name != "__main__":
            import_names(name)
