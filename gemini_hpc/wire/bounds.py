"""Decoders that refuse everything that is no message in one way."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Decodes(Protocol[T_co]):
    def decode(self, buf: bytes | msgspec.Raw, /) -> T_co: ...


class Strict(Generic[T]):
    """A msgspec decoder that raises `msgspec.MsgspecError`, and nothing else, on whatever bytes it is given."""

    def __init__(self, decoder: _Decodes[T]) -> None:
        self._decode = decoder.decode

    def decode(self, data: bytes | msgspec.Raw) -> T:
        """The message in `data`. Raises `msgspec.MsgspecError`."""
        try:
            return self._decode(data)
        except UnicodeDecodeError:
            raise msgspec.DecodeError("text that is not UTF-8") from None
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None
