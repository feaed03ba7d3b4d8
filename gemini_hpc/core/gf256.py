"""Arithmetic of the field with 256 elements in which Reed-Solomon parity is computed, byte by byte.

Addition is exclusive or. The polynomial is 0x11d, as in ISA-L and most others, so a library can do the bulk of the
work. The functions are pure and meant for single bytes, not for buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

_POLYNOMIAL = 0x11D


def _build_tables() -> tuple[list[int], list[int]]:
    exp, log, value = [0] * 510, [0] * 256, 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return exp, log


_EXP, _LOG = _build_tables()


def multiply(a: int, b: int) -> int:
    """Return a * b."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def invert(a: int) -> int:
    """Return 1 / a.

    Raises:
        ZeroDivisionError: `a` is 0.
    """
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    return _EXP[255 - _LOG[a]]


def build_table(a: int) -> bytes:
    """Return a times each byte, for `bytes.translate`."""
    return bytes(multiply(a, b) for b in range(256))


def compute_coefficient(row: int, column: int) -> int:
    """Return an element of a Cauchy matrix whose columns are scaled so that row 0 is all ones.

    Every square submatrix has an inverse, so as many unknown columns can be solved as there are known rows. `row` is
    0 to 31, `column` is 0 to 223.
    """
    return multiply(column ^ 255, invert(column ^ (255 - row)))


def solve(matrix: Sequence[Sequence[int]], wanted: int) -> list[int]:
    """Return row `wanted` of the inverse of a square matrix.

    Raises:
        ZeroDivisionError: The matrix has no inverse.
    """
    size = len(matrix)
    # solve w * A = e for the row w, hence transposed
    rows = [[matrix[r][c] for r in range(size)] + [int(c == wanted)] for c in range(size)]
    for at in range(size):
        found = next((r for r in range(at, size) if rows[r][at]), None)
        if found is None:
            raise ZeroDivisionError("the matrix has no inverse")
        rows[at], rows[found] = rows[found], rows[at]
        scale = invert(rows[at][at])
        rows[at] = [multiply(scale, value) for value in rows[at]]
        for other in range(size):
            if other != at and (times := rows[other][at]):
                rows[other] = [a ^ multiply(times, b) for a, b in zip(rows[other], rows[at], strict=True)]
    return [row[size] for row in rows]
