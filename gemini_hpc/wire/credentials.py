"""Credentials: a payload with its maker's uid and time, which only the named receiver takes.

Each connection begins with one credential each way (`handshake`). A process uses one scheme from its start (`use`):

- `Munge`: munged vouches for the maker, and encrypts the payload.
- `keyed`: the ends share a key: a job's own, or one that follows from root's key of the site.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import Protocol

from gemini_hpc.wire import munge

TTL_S = munge.TTL_S  # the same for all three ways of authentication
_PEER = struct.Struct("3i")  # pid, uid, gid


class CredentialError(Exception):
    """A failure to make or open a credential; its text names the scheme and is one line."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The content of a valid credential.

    Attributes:
        uid: Uid of the maker.
        made_s: Unix time at which the credential was made, by the clock of the maker's host.
        subject: Key of the scheme that holds the credential together, by its name; b"" with MUNGE.
        secret: Secret of both ends for the session's keys; b"" with MUNGE, which encrypts the payload.
    """

    payload: bytes
    uid: int
    made_s: int
    subject: bytes = b""
    secret: bytes = field(default=b"", repr=False)


class Scheme(Protocol):
    """A way to make and open credentials.

    Attributes:
        name: Value of the setting `auth`, for messages.
    """

    name: str

    def encode(self, payload: bytes, *, for_uid: int, job: int, answers: Opened | None) -> bytes:
        """Return a credential, as the function `encode` describes."""

    def decode(self, credential: bytes) -> Opened:
        """Return the content of a credential, as the function `decode` describes."""


class Munge:
    """The credentials of munged."""

    name = "munge"

    def encode(self, payload: bytes, *, for_uid: int, job: int, answers: Opened | None) -> bytes:
        """Return a credential that only `for_uid` can open. Raises `CredentialError`."""
        try:
            return munge.encode(payload, for_uid=for_uid)
        except munge.MungeError as exc:
            raise CredentialError(f"MUNGE: {exc}") from None

    def decode(self, credential: bytes) -> Opened:
        """Return the content of a fresh credential, once. Raises `CredentialError`."""
        try:
            return Opened(*munge.decode(credential))
        except munge.MungeError as exc:
            raise CredentialError(f"MUNGE: {exc}") from None


_used: Scheme = Munge()


def use(scheme: Scheme) -> Scheme:
    """Make and open this process's credentials by the scheme from here on; return the scheme before."""
    global _used
    before, _used = _used, scheme
    return before


def get_scheme() -> Scheme:
    """Return the scheme of this process."""
    return _used


def encode(payload: bytes, *, for_uid: int, job: int = 0, answers: Opened | None = None) -> bytes:
    """Return a credential of this process.

    Args:
        payload: Content.
        for_uid: Uid of the process that may open the credential.
        job: Job that the receiver serves; 0: none.
        answers: Credential of the other end that this one answers; None: this one begins.

    Raises:
        CredentialError: The scheme issues no credential.
    """
    return _used.encode(payload, for_uid=for_uid, job=job, answers=answers)


def decode(credential: bytes) -> Opened:
    """Return the content of a credential.

    Raises:
        CredentialError: The credential is not valid, not fresh, was opened before, or is not for this process.
    """
    return _used.decode(credential)


def read_peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end of a Unix socket, by the kernel."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid
