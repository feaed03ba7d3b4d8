"""A MUNGE that knows who may open what, who made it, and what was opened before; and a client to greet with it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini_hpc.wire import munge
from gemini_hpc.wire.handshake import Caller, HandshakeClient

ALICE, BOB, ROOT = 5001, 5002, 0


class FakeMunge:
    def __init__(self) -> None:
        self.me = ALICE
        self.down = False
        self._made: dict[bytes, tuple[bytes, int, int]] = {}
        self._opened: set[bytes] = set()

    @contextmanager
    def as_(self, uid: int) -> Iterator[None]:
        before, self.me = self.me, uid
        try:
            yield
        finally:
            self.me = before

    def encode(self, payload: bytes, *, for_uid: int) -> bytes:
        if self.down:
            raise munge.MungeError("Failed to access socket")
        credential = b"MUNGE:" + secrets.token_hex(8).encode() + b":"
        self._made[credential] = payload, self.me, for_uid
        return credential

    def decode(self, credential: bytes) -> tuple[bytes, int, int]:
        if self.down:
            raise munge.MungeError("Failed to access socket")
        if credential not in self._made:
            raise munge.MungeError("Invalid credential")
        payload, maker, for_uid = self._made[credential]
        if self.me not in (for_uid,):
            raise munge.MungeError("Unauthorized credential for client")
        if credential in self._opened:
            raise munge.MungeError("Replayed credential")
        self._opened.add(credential)
        return payload, maker, 0


def client(**changes: object) -> HandshakeClient:
    fields: dict[str, Any] = {"purpose": "link", "job": 7, "target": "n2", "server_uid": ALICE} | changes
    changed = {name: fields.pop(name) for name in Caller._fields if name in fields}
    return HandshakeClient(Caller("c", "n1", "i1", 1)._replace(**changed), **fields)
