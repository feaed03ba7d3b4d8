"""Host names that the resolver mistakes for numbers: a node named 0123 is not the address 0.0.0.83."""

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


def is_numeric_hostname(name: str) -> bool:
    """Return whether the resolver reads this host name as a number. Dotted addresses are not odd."""
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


def _read_words(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return [line.split("#", 1)[0].split() for line in f.read(_MAX_BYTES).splitlines()]
    except OSError:
        return []


def _find_addresses(name: str) -> list[str]:
    """Return addresses of a name from the hosts file, else from the resolver with each search domain.

    A name with a domain appended is no longer read as a number.
    """
    found = [words[0] for words in _read_words(HOSTS) if name in words[1:]]
    if found:
        return found
    domains = [d for words in _read_words(RESOLV) if words[:1] in (["search"], ["domain"]) for d in words[1:]]
    for full in [*(f"{name}.{domain.strip('.')}" for domain in domains), f"{name}."]:
        with suppress(OSError):
            return [str(entry[4][0]) for entry in socket.getaddrinfo(full, None, type=socket.SOCK_STREAM)]
    return []


def resolve_hostname(name: str) -> str:
    """Return what to dial for this name: the name itself, or its address if the name is odd.

    Raises:
        OSError: An odd name has no address.
    """
    if not is_numeric_hostname(name):
        return name
    found = _find_addresses(name)
    if not found:
        raise OSError(f"host {name} has no address in {HOSTS}, nor below the search domains of {RESOLV}")
    return found[0]


async def resolve_in_thread(name: str) -> str:
    """Return the result of `resolve_hostname` without blocking the event loop.

    Raises:
        OSError: An odd name has no address.
    """
    return await asyncio.to_thread(resolve_hostname, name) if is_numeric_hostname(name) else name
