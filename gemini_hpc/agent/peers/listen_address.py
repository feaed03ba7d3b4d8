"""The address that an agent listens on."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def find_interface_address(interface: str) -> tuple[str, str]:
    """Return the (IPv4 address, name) of a network interface.

    Return ("", "") without an interface, or if it has no address.
    """
    if not interface:
        return "", ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            raw = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return "", ""
    return socket.inet_ntoa(raw[20:24]), interface
