"""Element types of captured tensors, by torch's names, for places without torch such as agents and files."""

from __future__ import annotations

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{sign}int{bits}": 1 for bits in range(1, 8) for sign in ("", "u")},
}


def get_item_bytes(name: str) -> int:
    """Return the number of bytes of an element.

    Raises:
        ValueError: The name is unknown.
    """
    try:
        return ITEM_BYTES[name]
    except KeyError:
        raise ValueError(f"manifest: unknown dtype {name[:40]!r}") from None
