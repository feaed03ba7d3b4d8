"""A job's share of this node, read in root's prolog: slurmd reports the job's part, slurm.conf the whole."""

from __future__ import annotations

import os
import stat

from gemini_hpc.core import conf_text, node_share
from gemini_hpc.core.node_share import Share

MAX_BYTES = 8 << 20
MAX_FILES = 32


def compute_share(slurm_conf: str, node: str, nodelist: str, cpus: str, gpus: str) -> Share:
    """Return a job's share of the node; the whole node if the share cannot be known.

    Args:
        slurm_conf: Path of slurm.conf.
        node: See `core.node_share.compute_share`.
        nodelist: See `core.node_share.compute_share`.
        cpus: See `core.node_share.compute_share`.
        gpus: See `core.node_share.compute_share`.

    Raises:
        OSError: A file could not be read.
    """
    if not cpus or not slurm_conf:
        return node_share.WHOLE
    return node_share.compute_share(node_share.parse_shape(read_conf(slurm_conf), node), node, nodelist, cpus, gpus)


def read_conf(path: str) -> str:
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
