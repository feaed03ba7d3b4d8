"""Reader of slurm.conf and its like for root's programs on a node, which call no Slurm command."""

from __future__ import annotations

import os
import stat

from gemini_hpc.core import conf_text

MAX_BYTES = 8 << 20
MAX_FILES = 32
_SPOOL = "/var/spool/slurmd"  # Slurm's default


def read_text(path: str) -> str:
    """Return the text of a file of Slurm with included files in their places.

    Raises:
        OSError: A file could not be read.
    """
    text: list[str] = []
    _add_lines(text, path, [path])
    return "\n".join(text)


def _add_lines(text: list[str], path: str, seen: list[str]) -> None:
    for _, line in conf_text.split_lines(_read_file(path)):
        word, _, name = line.partition(" ")
        if word.lower() != "include":
            text.append(line)
            continue
        below = os.path.join(os.path.dirname(path), name.strip())
        if below not in seen and len(seen) < MAX_FILES:
            seen.append(below)
            _add_lines(text, below, seen)


def _read_file(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(22, "not a file", path)
        return file.read(MAX_BYTES).decode(errors="replace")


def read_values(path: str) -> dict[str, str]:
    """Return the last value of each key of one of Slurm's files; keys are lower-cased.

    Raises:
        OSError: A file could not be read.
    """
    lines = conf_text.split_lines(read_text(path))
    return dict(conf_text.split_pair(word) for _, line in lines for word in line.split() if "=" in word)


def find_spool(values: dict[str, str], node: str) -> str:
    """Return the directory of slurmd's spool on a node, by the values of slurm.conf."""
    host = os.uname().nodename.split(".")[0]
    return values.get("slurmdspooldir", _SPOOL).replace("%n", node).replace("%h", host)
