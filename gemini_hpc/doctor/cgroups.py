"""The memory limit of a process's cgroup, the lowest on the way up; of both versions."""

from __future__ import annotations

from gemini_hpc.node.memory_cgroup import Place, limit_file

_NO_LIMIT = 1 << 60  # v1 writes a huge number for none


def limit(here: Place) -> tuple[int, str] | None:
    """(bytes, file that says so) of the lowest limit; None where there is none."""
    lowest: tuple[int, str] | None = None
    for directory in here.chain():
        path = f"{directory}/{limit_file(here.version)}"
        try:
            with open(path, encoding="ascii", errors="replace") as f:
                text = f.read(64).strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT and (lowest is None or int(text) < lowest[0]):
            lowest = int(text), path
    return lowest
