"""Descriptions of an exception that ends a script: its kind, its place in the user's code, its traceback."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import sysconfig
import traceback
from types import TracebackType
from typing import TextIO

from gemini_hpc import lines

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LAUNCHER = os.path.join(_OURS, "launch")
_STARTS = frozenset((runpy.__file__, "<frozen runpy>"))  # their frames lie between ours and the script's
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MEMORY = frozenset(("MemoryError", "OutOfMemoryError"))


def describe_error(error: BaseException) -> str:
    """Return the kind of an exception and its place in the user's code: "ValueError at train.py:12"."""
    kind = f"exit {error.code}" if isinstance(error, SystemExit) else type(error).__name__
    return f"{kind[:80]} at {_find_place(error)}"


def _find_place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)[:80]}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    others = [at for at in frames if not _is_below(at[0], _OURS) and at[0] not in _STARTS]
    own = [at for at in others if not at[0].startswith("<") and not any(_is_below(at[0], x) for x in _LIBRARIES)]
    path, line = (own or others or [*frames, ("?", 0)])[-1]
    return f"{os.path.basename(path)[:80]}:{line}"


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory + os.sep)


def is_memory_error(error: BaseException) -> bool:
    """Return whether memory ran out, the machine's or a device's."""
    return any(cls.__name__ in _MEMORY for cls in type(error).__mro__)


class _Kept(io.StringIO):
    """A buffer that keeps written text, except our own lines, which are printed at once."""

    def __init__(self, through: TextIO) -> None:
        super().__init__()
        self._through = through

    def write(self, text: str) -> int:
        if not text.startswith("gemini-hpc: "):
            return super().write(text)
        lines.put(self._through, text)
        return len(text)


def format_traceback(error: BaseException) -> str:
    """Return the text that `sys.excepthook` prints for an exception."""
    kept = _Kept(sys.stderr)
    with contextlib.redirect_stderr(kept):
        show(error)
    return kept.getvalue()


def show(error: BaseException) -> None:
    """Print an exception through `sys.excepthook`, without frames that are not its user's."""
    error.__traceback__ = _strip_own_frames(error.__traceback__)  # hooks read the traceback from there
    sys.excepthook(type(error), error, error.__traceback__)


def _strip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on, or None if the script could not even begin."""
    at, path = trace, ""
    while at is not None:
        path = at.tb_frame.f_code.co_filename
        if path not in _STARTS and not _is_below(path, _LAUNCHER):
            return at
        at = at.tb_next
    return None if path in _STARTS else trace
