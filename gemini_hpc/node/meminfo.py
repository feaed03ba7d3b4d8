"""The node's memory, as the kernel tells it."""

from __future__ import annotations


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    table: dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as f:
        for line in f:
            key, _, rest = line.partition(":")
            table[key] = int(rest.split()[0]) * 1024
    return table
