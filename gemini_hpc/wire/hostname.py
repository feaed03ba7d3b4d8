"""Names of hosts that the resolver would take for numbers: a node called 0123 is not the address 0.0.0.83."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from contextlib import suppress

HOSTS = "/etc/hosts"
RESOLV = "/etc/resolv.conf"
_MAX_BYTES = 4 << 20
_NUMBERS = re.compile(r"[0-9A-Fa-fxX.]+")


def odd(name: str) -> bool:
    """Whether the resolver reads a number in this name where everybody else reads a name. Addresses are not odd."""
    if not _NUMBERS.fullmatch(name):
        return False
    with suppress(ValueError):
        ipaddress.IPv4Address(name)
        return False
    try:
        socket.inet_aton(name)
    except OSError:
        return False
    return True


def _words(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return [line.split("#", 1)[0].split() for line in f.read(_MAX_BYTES).splitlines()]
    except OSError:
        return []


def _addresses(name: str) -> list[str]:
    """From the hosts file, then from the resolver with the search domains: no longer a number with one behind it."""
    found = [words[0] for words in _words(HOSTS) if name in words[1:]]
    if found:
        return found
    domains = [d for words in _words(RESOLV) if words[:1] in (["search"], ["domain"]) for d in words[1:]]
    for full in [*(f"{name}.{domain.strip('.')}" for domain in domains), f"{name}."]:
        with suppress(OSError):
            return [str(entry[4][0]) for entry in socket.getaddrinfo(full, None, type=socket.SOCK_STREAM)]
    return []


def dialled(name: str) -> str:
    """What to dial for this name: the name, or its address where it is odd. Raises OSError where that has none."""
    if not odd(name):
        return name
    found = _addresses(name)
    if not found:
        raise OSError(f"host {name} has no address in {HOSTS}, nor below the search domains of {RESOLV}")
    return found[0]


async def dialled_beside(name: str) -> str:
    """The same on an event loop. Raises OSError."""
    return await asyncio.to_thread(dialled, name) if odd(name) else name
