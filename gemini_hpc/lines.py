"""Output lines for the user, whose failure ends nothing: the disk may be full, or stderr closed.

A line that cannot be written is lost. It must not stay in a buffer either: Python would try to write it at
the end, and turn a success into exit status 120.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import TextIO


def replace_unprintable(text: str) -> str:
    """Return text with a question mark in place of each control character and line break.

    The text of users and agents appears in logs and on an administrator's terminal.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def write_line(text: str) -> None:
    """Write a line of gemini-hpc to stderr. Raises nothing."""
    put(sys.stderr, f"gemini-hpc: {text}\n")


def put(stream: TextIO | None, text: str) -> None:
    """Write to a stream, in one piece, after the contents of its buffer. Raises nothing."""
    if stream is None:  # the process has no such stream
        return
    with suppress(Exception):  # the stream may be an object of the user's own
        if type(stream) is not io.TextIOWrapper:
            stream.write(text)
            stream.flush()
            return
        with suppress(OSError):
            stream.flush()
        _write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))


def flush_streams() -> None:
    """Flush stdout and stderr as far as possible. Raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def _write(fd: int, data: bytes) -> None:
    """Write data, and survive a closed pipe even if the script has given SIGPIPE its default effect."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        os.write(fd, data)
    except BrokenPipeError:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
