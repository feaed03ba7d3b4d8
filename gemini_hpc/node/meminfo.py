"""The node's memory as the kernel reports it."""

from __future__ import annotations


def read_meminfo() -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes."""
    table: dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as f:
        for line in f:
            key, _, rest = line.partition(":")
            table[key] = int(rest.split()[0]) * 1024
    return table
