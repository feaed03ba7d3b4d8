"""Lines for the user, which end nothing: a disk may be full, a reader gone, stderr closed.

A line that cannot be written is lost. None is left in a buffer either: Python would try to write it at the end, and
turn a success into exit status 120.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import TextIO


def tell(text: str) -> None:
    """Write a line of ours to stderr. Raises nothing."""
    put(sys.stderr, f"gemini-hpc: {text}\n")


def put(stream: TextIO | None, text: str) -> None:
    """Write to a stream, in one piece, behind what is in its buffer. Raises nothing."""
    if stream is None:  # a process without one
        return
    with suppress(Exception):  # the stream may be of the user's own making
        if type(stream) is not io.TextIOWrapper:
            stream.write(text)
            stream.flush()
            return
        with suppress(OSError):
            stream.flush()
        _write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))


def settle() -> None:
    """Write out what the buffers of stdout and stderr hold, as far as that is possible. Raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def _write(fd: int, data: bytes) -> None:
    """Write, also where the script has given SIGPIPE its default effect."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        os.write(fd, data)
    except BrokenPipeError:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
