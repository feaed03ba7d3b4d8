"""Endpoints of a connection: the listener's address and port, as both ends see them.

Any user can listen on a port above 1023. A stranger could therefore listen where an agent should, and relay every
byte to the real agent. Each end reports, protected by MUNGE, which endpoint it means; with a relay the two differ.
Address translation between agents, controllers and their callers makes the two differ as well.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def read_remote(sock: socket.socket) -> str:
    """Return the remote endpoint of an outgoing connection, or "" if the kernel reports none."""
    with suppress(OSError):
        return _format_address(sock.getpeername())
    return ""


def read_local(sock: socket.socket) -> str:
    """Return the local endpoint of an accepted connection, or "" if the kernel reports none."""
    with suppress(OSError):
        return _format_address(sock.getsockname())
    return ""


def _format_address(name: object) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])  # drop the scope: its number is local to each host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"[{address}]:{name[1]}" if address.version == 6 else f"{address}:{name[1]}"


def find_mismatch(meant: str, found: str) -> str:
    """Return why a connection is refused that was meant for one endpoint and reached another.

    Returns "" if both agree, or if an end of an older release reports no endpoint.
    """
    if not meant or not found or meant == found:
        return ""
    return f"dialled at {meant}, listening at {found}: somebody in between relays this connection"
