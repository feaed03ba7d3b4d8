"""Frames on a TCP connection: 4 bytes length, then (once there is a session) 16 bytes MAC, then the payload.

The MAC covers a counter, so that frames cannot be dropped, repeated, reordered or sent back unnoticed.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct

MAX_FRAME_BYTES = 16 << 20
MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
LENGTH_BYTES = _LENGTH.size


class FrameError(Exception):
    """A frame that is too long, cut short or not authentic: the connection is closed, nothing else happens."""


def bare(payload: bytes) -> bytes:
    """A frame without MAC (handshake only)."""
    return _LENGTH.pack(len(payload)) + payload


def length_of(head: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Length announced by the first 4 bytes. Raises `FrameError` above `limit`."""
    n = int(_LENGTH.unpack(head)[0])
    if n > limit:
        raise FrameError(f"frame of {n} bytes, at most {limit} are taken")
    return n


class Sealer:
    """One direction of a session: adds MACs, or checks them."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def _mac(self, payload: bytes) -> bytes:
        mac = hashlib.blake2b(_COUNTER.pack(self._count), key=self._key, digest_size=MAC_BYTES)
        mac.update(payload)
        self._count += 1
        return mac.digest()

    def seal(self, payload: bytes) -> bytes:
        """The whole frame for `payload`. Raises `FrameError` for more than `MAX_FRAME_BYTES`."""
        if len(payload) + MAC_BYTES > MAX_FRAME_BYTES:
            raise FrameError(f"message of {len(payload)} bytes is too long for one frame")
        return _LENGTH.pack(len(payload) + MAC_BYTES) + self._mac(payload) + payload

    def open(self, body: bytes) -> bytes:
        """The payload of a received body (MAC and payload). Raises `FrameError`."""
        if len(body) < MAC_BYTES:
            raise FrameError("frame without MAC")
        if not hmac.compare_digest(self._mac(body[MAC_BYTES:]), body[:MAC_BYTES]):
            raise FrameError("frame is not authentic")
        return body[MAC_BYTES:]


def read_exact(sock: socket.socket, n: int) -> bytes:
    """n bytes from a blocking socket. Raises `FrameError` at end of file, OSError on time-out."""
    parts = bytearray()
    while len(parts) < n:
        piece = sock.recv(min(n - len(parts), 1 << 20))
        if not piece:
            raise FrameError("connection closed in mid-frame")
        parts += piece
    return bytes(parts)


def read_bare(sock: socket.socket, limit: int) -> bytes:
    """One frame without MAC from a blocking socket."""
    return read_exact(sock, length_of(read_exact(sock, LENGTH_BYTES), limit))
