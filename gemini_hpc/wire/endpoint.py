"""Where a connection ends: the listener's address and port, as both ends see them.

Ports above 1023 are anybody's, so a stranger on a host can listen where one of ours should, and pass every byte on to
where that one really is. Each end tells the other, under MUNGE's cover, which endpoint it means; through a relay the
two differ. Address translation between agents, controllers and their callers makes them differ too.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def dialled(sock: socket.socket) -> str:
    """The endpoint at the other end of a connection that was made from here; "" where the kernel has none."""
    with suppress(OSError):
        return _shown(sock.getpeername())
    return ""


def listening(sock: socket.socket) -> str:
    """The endpoint at this end of a connection that was taken here; "" where the kernel has none."""
    with suppress(OSError):
        return _shown(sock.getsockname())
    return ""


def _shown(name: object) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])  # a scope is each host's own number
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"[{address}]:{name[1]}" if address.version == 6 else f"{address}:{name[1]}"


def mismatch(meant: str, found: str) -> str:
    """Why a connection that was meant for one endpoint and came to another is refused; "" where nothing is wrong, or
    an end of an older release does not say."""
    if not meant or not found or meant == found:
        return ""
    return f"dialled at {meant}, listening at {found}: somebody in between relays this connection"
