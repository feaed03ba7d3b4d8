"""Decoders that reject every malformed message with the same exception."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Decodes(Protocol[T_co]):
    def decode(self, buf: bytes | msgspec.Raw, /) -> T_co: ...


class Strict(Generic[T]):
    """A msgspec decoder that raises only `msgspec.MsgspecError`, for any input bytes."""

    def __init__(self, decoder: _Decodes[T]) -> None:
        self._decode = decoder.decode

    def decode(self, data: bytes | msgspec.Raw) -> T:
        """Return the message in `data`.

        Raises:
            msgspec.MsgspecError: The bytes are no valid message, not UTF-8, or nested too deeply.
        """
        try:
            return self._decode(data)
        except UnicodeDecodeError:
            raise msgspec.DecodeError("text that is not UTF-8") from None
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None
