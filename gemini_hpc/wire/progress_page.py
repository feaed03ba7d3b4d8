"""The progress page: shared memory that a training rank writes, once a second, and its agent reads.

It is the beginning of an anonymous file that the rank makes and hands over beside its `Hello`. Behind the page, on
demand, come the rank's Python stacks: where the rank has found a signal free for that (`signal`), its handler appends
the main thread's stack. The agent reads and never maps: whatever becomes of the file, a read fails at worst.
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
    """beats: one more each time it is written; version: completed `step()` calls; launched: collectives since then,
    of which `flying` are on the network; usual: launched in the iteration before; signal: asks for a stack, 0: there
    is none; collective: the name of the newest one."""

    beats: int = 0
    version: int = 0
    launched: int = 0
    flying: int = 0
    usual: int = 0
    signal: int = 0
    collective: str = ""


def pack(progress: Progress) -> bytes:
    """The page's beginning, as it is written."""
    numbers = [min(max(0, n), _MOST) for n in progress[:6]]
    return _PAGE.pack(MAGIC, *numbers, progress.collective.encode("ascii", "replace"))


def parse(data: bytes) -> Progress | None:
    """What a page says; None: it is none. All numbers are in bounds, and the name is printable."""
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
    """Whether this is an anonymous file in memory, which nobody has to wait for."""
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:
        return False


def read(fd: int) -> Progress | None:
    """What the page says now."""
    try:
        return parse(os.pread(fd, _PAGE.size, 0))
    except OSError:
        return None
