"""The progress page: shared memory that a training rank writes once a second and its agent reads.

The page is the beginning of an anonymous file that the rank makes and hands over with its `Hello`. The rank's Python
stacks follow the page on demand. If the rank has found a free signal (`signal`), its handler appends the main
thread's stack. The agent reads and never maps the file: whatever happens to it, a read at worst fails.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import NamedTuple

MAGIC = b"GEMPROG1"
STACKS_AT = 4096
_F_GET_SEALS = 1034
_PAGE = struct.Struct("<8s6Q32s")
_MOST = (1 << 40) - 1


class Progress(NamedTuple):
    """The content of a progress page.

    Attributes:
        beats: Number of times the page was written.
        version: Completed `step()` calls.
        launched: Collectives launched since then.
        flying: Launched collectives that are on the network.
        usual: Collectives launched in the previous iteration.
        signal: Signal number that requests a stack; 0: none.
        collective: Name of the newest collective.
    """

    beats: int = 0
    version: int = 0
    launched: int = 0
    flying: int = 0
    usual: int = 0
    signal: int = 0
    collective: str = ""


def pack(progress: Progress) -> bytes:
    """Return the beginning of the page in the form in which it is written."""
    numbers = [min(max(0, n), _MOST) for n in progress[:6]]
    return _PAGE.pack(MAGIC, *numbers, progress.collective.encode("ascii", "replace"))


def parse(data: bytes) -> Progress | None:
    """Return the content of a page, or None if the bytes are no page.

    All numbers are in bounds, and the name is printable.
    """
    if len(data) != _PAGE.size:
        return None
    magic, *numbers, name = _PAGE.unpack(data)
    if magic != MAGIC or max(numbers) > _MOST:
        return None
    text = name.rstrip(b"\0").decode("ascii", "replace")
    beats, version, launched, flying, usual, signal = numbers
    plain = "".join(c for c in text if c.isascii() and (c.isalnum() or c in "_.:-"))
    return Progress(beats, version, launched, flying, usual, signal, plain)


def is_page(fd: int) -> bool:
    """Return whether the descriptor is an anonymous memory file, so that reads never block."""
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:
        return False


def read(fd: int) -> Progress | None:
    """Return the current content of the page, or None if it cannot be read."""
    try:
        return parse(os.pread(fd, _PAGE.size, 0))
    except OSError:
        return None
