"""The settings in effect in slurmd's systemd unit, read from its files."""

from __future__ import annotations

import os

# Later directories win: the administrator's files override those of packages.
DIRECTORIES = ("/usr/lib/systemd/system", "/lib/systemd/system", "/run/systemd/system", "/etc/systemd/system")
_MAX_BYTES = 1 << 18


def files(unit: str, directories: tuple[str, ...] = DIRECTORIES) -> list[str]:
    """Return the unit's file and its drop-ins, in order of precedence, lowest first; [] if there is none."""
    main = [p for d in directories if os.path.isfile(p := os.path.join(d, unit))]
    if not main:
        return []
    dropins: dict[str, str] = {}
    for directory in directories:
        place = os.path.join(directory, f"{unit}.d")
        if os.path.isdir(place):
            dropins |= {name: os.path.join(place, name) for name in os.listdir(place) if name.endswith(".conf")}
    return [main[-1], *(dropins[name] for name in sorted(dropins))]


def setting(paths: list[str], section: str, key: str) -> tuple[str, str]:
    """Return (value, file) of the last assignment, empty if there is none. Raises OSError."""
    value, where = "", ""
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read(_MAX_BYTES)
        here = ""
        for line in map(str.strip, text.splitlines()):
            if line.startswith("[") and line.endswith("]"):
                here = line[1:-1]
            elif here == section and line.partition("=")[0].strip() == key and "=" in line:
                value, where = line.partition("=")[2].strip(), path
    return value, where
