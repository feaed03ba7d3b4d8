"""Frames on a TCP connection: a 4-byte length, a 16-byte MAC (once a session exists) and the payload.

The MAC covers a counter, so dropped, repeated, reordered or reflected frames are detected.
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
    """A frame that is too long, truncated or not authentic; the connection is closed and that is all."""


def pack_bare(payload: bytes) -> bytes:
    """Return a frame without MAC (handshake only)."""
    return _LENGTH.pack(len(payload)) + payload


def parse_length(head: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the length announced by the first 4 bytes.

    Raises:
        FrameError: The length is above `limit`.
    """
    n = int(_LENGTH.unpack(head)[0])
    if n > limit:
        raise FrameError(f"frame of {n} bytes, at most {limit} are taken")
    return n


class Sealer:
    """A direction of a session, which adds MACs to frames or checks them."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def _compute_mac(self, payload: bytes) -> bytes:
        mac = hashlib.blake2b(_COUNTER.pack(self._count), key=self._key, digest_size=MAC_BYTES)
        mac.update(payload)
        self._count += 1
        return mac.digest()

    def seal(self, payload: bytes) -> bytes:
        """Return the whole frame for `payload`.

        Raises:
            FrameError: Payload and MAC are longer than `MAX_FRAME_BYTES`.
        """
        if len(payload) + MAC_BYTES > MAX_FRAME_BYTES:
            raise FrameError(f"message of {len(payload)} bytes is too long for one frame")
        return _LENGTH.pack(len(payload) + MAC_BYTES) + self._compute_mac(payload) + payload

    def open(self, body: bytes) -> bytes:
        """Return the payload of a received body (MAC and payload).

        Raises:
            FrameError: The MAC is missing or wrong.
        """
        if len(body) < MAC_BYTES:
            raise FrameError("frame without MAC")
        if not hmac.compare_digest(self._compute_mac(body[MAC_BYTES:]), body[:MAC_BYTES]):
            raise FrameError("frame is not authentic")
        return body[MAC_BYTES:]


def read_exact(sock: socket.socket, n: int) -> bytes:
    """Read exactly n bytes from a blocking socket.

    Raises:
        FrameError: The connection ended early.
        OSError: The read timed out or failed.
    """
    parts = bytearray()
    while len(parts) < n:
        piece = sock.recv(min(n - len(parts), 1 << 20))
        if not piece:
            raise FrameError("connection closed in mid-frame")
        parts += piece
    return bytes(parts)


def read_bare(sock: socket.socket, limit: int) -> bytes:
    """Read one frame without MAC from a blocking socket."""
    return read_exact(sock, parse_length(read_exact(sock, LENGTH_BYTES), limit))
