"""Options with a value for argparse, and their types: sizes, rates, counts and numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gemini_hpc.core.numbers import parse_number

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
REQUIRED: Any = object()  # in place of a default
# name, type, default, metavar and help of an option
Option = tuple[str, Callable[[str], Any], Any, str | None, str]
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _parse_amount(text: str, unit: str, scale: float = 1.0) -> float:
    """Parse a number with a decimal prefix; its unit may be omitted."""
    word = text.strip()
    if word.lower().endswith(unit.lower()):
        word = word[: -len(unit)]
    prefix = word[-1:].upper() if word[-1:].isalpha() else ""
    try:
        value = float(word[: len(word) - len(prefix)]) * _UNITS[prefix] * scale
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < 1e30:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no amount above 0, such as 400G{unit}")
    return value


def parse_size(text: str) -> float:
    """Parse a size in bytes."""
    return _parse_amount(text, "B")


def parse_rate(text: str) -> float:
    """Parse a rate given in bits per second; return bytes per second.

    A bare number is refused: users who write 100 mean Gbps.
    """
    if not text.strip()[-1:].isalpha():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} has no unit: give one, such as 100Gbps")
    return _parse_amount(text, "bps", 1 / 8)


def parse_span(text: str) -> float:
    """Parse a time span with its unit, such as 90m, 8h or 3d; return seconds."""
    seconds = _SPANS.get(text[-1:], 0) * parse_number(text[:-1])
    if not 0 < seconds < 1e10:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no time span, such as 90m, 8h or 3d")
    return float(seconds)


def build_count_parser(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if not least <= (count := parse_number(text, -1)) <= most:
            raise argparse.ArgumentTypeError(f"wanted a whole number from {least} to {most}, found {text[:40]!r}")
        return count

    return parse


parse_count = build_count_parser(0, 9_999_999_999)


def build_number_parser(least: float, most: float) -> Callable[[str], float]:
    """Return a parser for numbers from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"wanted a number from {least:g} to {most:,.10g}, found {text[:40]!r}")
        return value

    return parse


def add_values(parser: argparse._ActionsContainer, *options: Option) -> None:
    """Add options with a value to a parser, or to a group of it."""
    for name, parse, default, metavar, text in options:
        need: dict[str, Any] = {"required": True} if default is REQUIRED else {"default": default}
        parser.add_argument(name, type=parse, metavar=metavar, help=text, **need)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add the option of `plan` and `simulate` for the tier's rate."""
    text = "rate of the tier's storage, all nodes together, in bits/s (default: 20Gbps)"
    add_values(parser, ("--storage", parse_rate, 2.5e9, "RATE", text))
