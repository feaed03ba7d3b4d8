"""The release that a SPANK plugin was built for, read from its file without loading it.

Loading the plugin would run its code. Slurm does not load a plugin of another release. It writes that to a
log and continues without the plugin.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gemini_hpc.doctor.configuration import SlurmRelease

SYMBOL = b"plugin_version"
_MAX_BYTES = 64 << 20
_MAX_HEADERS = 4096
_MAX_SYMBOLS = 1 << 20
_DYNSYM = 11
_LOAD = 1


class ElfError(ValueError):
    """The error that a file is not a readable plugin."""


@dataclass(frozen=True, slots=True)
class _ElfLayout:
    """The byte order and word size of a file."""

    order: str
    wide: bool

    def unpack(self, fmt: str, data: bytes, at: int) -> tuple[int, ...]:
        return struct.unpack_from(self.order + fmt, data, at)


def read_release(path: str) -> SlurmRelease:
    """Return the release in `plugin_version`. Raises `ElfError` and OSError."""
    with open(path, "rb") as f:
        data = f.read(_MAX_BYTES)
    try:
        return _find_release(data)
    except (struct.error, IndexError, OverflowError):
        raise ElfError("the file is cut short or damaged") from None


def _find_release(data: bytes) -> SlurmRelease:
    if data[:4] != b"\x7fELF" or data[4] not in (1, 2) or data[5] not in (1, 2):
        raise ElfError("not a shared object")
    layout = _ElfLayout("<" if data[5] == 1 else ">", data[4] == 2)
    if not layout.wide:
        raise ElfError("a 32-bit object: Slurm's are 64-bit")
    phoff, shoff = layout.unpack("QQ", data, 32)
    _, phentsize, phnum, shentsize, shnum = layout.unpack("5H", data, 52)
    if max(phnum, shnum) > _MAX_HEADERS:
        raise ElfError("too many headers")
    sections = [layout.unpack("IIQQQQIIQQ", data, shoff + i * shentsize) for i in range(shnum)]
    for section in sections:
        kind, offset, size, link, entry = section[1], section[4], section[5], section[6], section[9]
        if kind != _DYNSYM or entry < 24:
            continue
        names = sections[link][4]
        for i in range(min(size // entry, _MAX_SYMBOLS)):
            name, _, _, _, value, _ = layout.unpack("IBBHQQ", data, offset + i * entry)
            if data[names + name : names + name + len(SYMBOL) + 1] == SYMBOL + b"\0":
                return _read_release_at(layout, data, value, [(phoff + k * phentsize) for k in range(phnum)])
    raise ElfError("no plugin_version in the file: not a plugin of Slurm")


def _read_release_at(layout: _ElfLayout, data: bytes, address: int, headers: list[int]) -> SlurmRelease:
    for at in headers:
        kind, _, offset, start, _, size = layout.unpack("IIQQQQ", data, at)
        if kind == _LOAD and start <= address < start + size:
            (number,) = layout.unpack("I", data, offset + address - start)
            return SlurmRelease(number >> 16 & 0xFF, number >> 8 & 0xFF, number & 0xFF)
    raise ElfError("plugin_version is not in the file")
