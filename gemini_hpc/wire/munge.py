"""MUNGE credentials through libmunge (ctypes: no maintained Python binding has a suitable licence)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_OPT_TTL = 4
_OPT_ENCODE_TIME = 6
_OPT_UID_RESTRICTION = 9
_SUCCESS = 0
TTL_S = 60  # a credential is used at once, but the clocks of two hosts may differ by as much
MAX_CREDENTIAL_BYTES = 64 * 1024


class MungeError(Exception):
    """A failure to make or open a credential, with libmunge's message."""


@cache
def _load_library() -> Any:
    try:
        lib = ctypes.CDLL("libmunge.so.2")
    except OSError as exc:
        raise MungeError(f"libmunge.so.2 cannot be loaded ({exc}); install the package libmunge2") from None
    lib.munge_ctx_create.restype = ctypes.c_void_p
    lib.munge_ctx_create.argtypes = []
    lib.munge_ctx_destroy.restype = None
    lib.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    lib.munge_ctx_set.restype = ctypes.c_int
    lib.munge_ctx_get.restype = ctypes.c_int
    lib.munge_ctx_strerror.restype = ctypes.c_char_p
    lib.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    lib.munge_strerror.restype = ctypes.c_char_p
    lib.munge_strerror.argtypes = [ctypes.c_int]
    lib.munge_encode.restype = ctypes.c_int
    lib.munge_encode.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    lib.munge_decode.restype = ctypes.c_int
    lib.munge_decode.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
    ]
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None
    return lib, libc


def encode(payload: bytes, *, for_uid: int) -> bytes:
    """Return a credential of this process that only `for_uid` can open.

    Raises:
        MungeError: MUNGE issues no credential.
    """
    lib, libc = _load_library()
    context = ctypes.c_void_p(lib.munge_ctx_create())
    try:
        lib.munge_ctx_set(context, _OPT_TTL, ctypes.c_int(TTL_S))
        lib.munge_ctx_set(context, _OPT_UID_RESTRICTION, ctypes.c_uint32(for_uid))
        credential = ctypes.c_void_p()
        code = lib.munge_encode(ctypes.byref(credential), context, payload, len(payload))
        if code != _SUCCESS or not credential.value:
            detail = lib.munge_ctx_strerror(context) or lib.munge_strerror(code)
            raise MungeError(detail.decode(errors="replace"))
        try:
            return ctypes.string_at(credential.value)
        finally:
            libc.free(credential)
    finally:
        lib.munge_ctx_destroy(context)


def decode(credential: bytes) -> tuple[bytes, int, int]:
    """Return payload, maker's uid and Unix time of a fresh credential; a second decode of the same one fails.

    The time is in whole seconds, by the clock of the maker's host.

    Raises:
        MungeError: The credential is not valid, not fresh, or this uid may not open it.
    """
    if not credential or len(credential) > MAX_CREDENTIAL_BYTES or b"\0" in credential:
        raise MungeError("malformed credential")
    lib, libc = _load_library()
    payload, length = ctypes.c_void_p(), ctypes.c_int()
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    context, made = ctypes.c_void_p(lib.munge_ctx_create()), ctypes.c_long()
    code = lib.munge_decode(
        credential, context, ctypes.byref(payload), ctypes.byref(length), ctypes.byref(uid), ctypes.byref(gid)
    )
    try:
        if code != _SUCCESS:
            raise MungeError(lib.munge_strerror(code).decode(errors="replace"))
        lib.munge_ctx_get(context, _OPT_ENCODE_TIME, ctypes.byref(made))
        data = ctypes.string_at(payload.value or 0, length.value) if payload.value else b""
        return data, int(uid.value), int(made.value)
    finally:
        lib.munge_ctx_destroy(context)
        if payload.value:
            libc.free(payload)
