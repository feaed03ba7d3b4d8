"""The field's laws, and that its tables are those of ISA-L."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.core import gf256

byte = st.integers(0, 255)


@given(byte, byte, byte)
def test_it_is_a_field(a: int, b: int, c: int) -> None:
    assert gf256.multiply(a, b) == gf256.multiply(b, a)
    assert gf256.multiply(a, gf256.multiply(b, c)) == gf256.multiply(gf256.multiply(a, b), c)
    assert gf256.multiply(a, b ^ c) == gf256.multiply(a, b) ^ gf256.multiply(a, c)
    assert gf256.multiply(a, 1) == a
    if a:
        assert gf256.multiply(a, gf256.invert(a)) == 1


def test_known_products() -> None:
    assert (gf256.multiply(2, 128), gf256.multiply(3, 7), gf256.invert(2)) == (0x1D, 9, 142)


def test_nothing_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        gf256.invert(0)
    with pytest.raises(ZeroDivisionError):
        gf256.solve([[1, 1], [1, 1]], 0)


def test_any_square_part_of_the_coefficients_has_an_inverse() -> None:
    """Of up to three rows and columns of all that can occur: so as many nodes may be lost as there are blocks."""
    assert all(gf256.compute_coefficient(0, column) == 1 for column in range(64))
    for size in (1, 2, 3):
        for rows in combinations(range(4), size):
            for columns in combinations(range(20), size):
                matrix = [[gf256.compute_coefficient(row, column) for column in columns] for row in rows]
                for wanted in range(size):
                    found = gf256.solve(matrix, wanted)
                    product = [0] * size
                    for weight, row in zip(found, matrix, strict=True):
                        product = [a ^ gf256.multiply(weight, b) for a, b in zip(product, row, strict=True)]
                    assert product == [int(column == wanted) for column in range(size)]
