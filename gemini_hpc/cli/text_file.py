"""Reading of text files that a command line names."""

from __future__ import annotations

import os
import stat

from gemini_hpc.cli.job_id import UserError


def read_lines(path: str, most_bytes: int = 64 << 20) -> list[str]:
    """Return the lines of a regular file. Raises `UserError`, which names the file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path}: not a regular file")
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path!r}: no name of a file") from None
    if len(data) > most_bytes:
        raise UserError(f"{path}: more than {most_bytes >> 20} MiB")
    try:
        return data.decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: line {line}: not UTF-8 text") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, so that a pipe without a writer is refused instead of waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
