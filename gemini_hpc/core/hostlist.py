"""Slurm hostlist expressions: `n[1-3,7],gpu[001-002]x[1-2],login` to a list of hosts, and back.

The reading is that of `scontrol show hostnames`, without running Slurm, because the agent, the prolog and the
trainer may not call it. The text may come from a user's environment, so nothing is expanded before its size is
known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

MAX_TEXT_BYTES = 1 << 20  # longer than any list that slurmctld itself would send
MAX_BRACKETS = 8
MAX_DIGITS = 18

_PLAIN = re.compile(r"[A-Za-z0-9._-]*")
_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_INDEXED = re.compile(r"(.*?)([0-9]+)")
_COUNT = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")


def expand(text: str, limit: int = 65536) -> list[str]:
    """Return the hosts that a hostlist expression names, in its order, with repetitions.

    Several brackets multiply, the rightmost runs fastest. A lower bound with leading zeros pads its whole range. An
    empty text is an empty list.

    Raises:
        ValueError: The text is not a hostlist, or names more than `limit` hosts. The limit is checked before any
            host is built.
    """
    text = text.strip()
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"hostlist of {len(text)} characters: more than {MAX_TEXT_BYTES} are not accepted")
    hosts: list[str] = []
    if not text:
        return hosts
    for term in _split_terms(text):
        parts = list(_split_term(term))
        count = 1
        for part in parts:
            count *= sum(hi - lo + 1 for lo, hi, _ in part) if isinstance(part, list) else 1
            if len(hosts) + count > limit:
                raise ValueError(f"hostlist {_format_text(text)} names more than {limit} hosts")
        hosts.extend(map("".join, product(*(_expand_part(part) for part in parts))))
    return hosts


def compress(hosts: Iterable[str]) -> str:
    """Return a hostlist expression with `expand(compress(hosts)) == list(hosts)`.

    Order and repetitions are kept.

    Neighbours in the list that differ only in the number at their end share a bracket. Slurm's own reader does not
    accept a bracket with more text after it.

    Raises:
        ValueError: A hostlist cannot hold a name.
    """
    terms: list[str] = []
    prefix: str | None = None
    ranges: list[tuple[str, int, int]] = []  # text of the lower bound, lower, upper

    def flush() -> None:
        if prefix is not None:
            terms.append(prefix + _format_bracket(ranges))

    for host in hosts:
        if not host or not _PLAIN.fullmatch(host):
            raise ValueError(f"{_format_text(host)} is not a host name: letters, digits, '.', '_' and '-' only")
        match = _INDEXED.fullmatch(host)
        if match is None or len(match[2]) > MAX_DIGITS:
            flush()
            prefix, ranges = None, []
            terms.append(host)
            continue
        digits = match[2]
        number = int(digits)
        if prefix != match[1]:
            flush()
            prefix, ranges = match[1], []
        if ranges:
            text, low, high = ranges[-1]
            if number == high + 1 and f"{number:0{_find_width(text)}d}" == digits:
                ranges[-1] = (text, low, number)
                continue
        ranges.append((digits, number, number))
    flush()
    return ",".join(terms)


def find_count(text: str, index: int) -> int:
    """Return the number of the node at this index in Slurm's list of numbers, 0 if the list lacks the node.

    "2(x3),1" means 2 on each of the first three nodes, then 1.
    """
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if found is None or index < 0:
            return 0
        repeat = int(found[2] or 1)
        if index < repeat:
            return int(found[1])
        index -= repeat
    return 0


def _split_terms(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    start, inside = 0, False
    for position, char in enumerate(text):
        if char == "[":
            if inside:
                raise ValueError(f"hostlist {_format_text(text)}: '[' inside brackets")
            inside = True
        elif char == "]":
            if not inside:
                raise ValueError(f"hostlist {_format_text(text)}: ']' without '['")
            inside = False
        elif char == "," and not inside:
            yield _check_term(text[start:position], text)
            start = position + 1
    if inside:
        raise ValueError(f"hostlist {_format_text(text)}: '[' without ']'")
    yield _check_term(text[start:], text)


def _split_term(term: str) -> Iterator[str | list[tuple[int, int, int]]]:
    """Yield literal texts, and brackets as lists of (lower, upper, width)."""
    pieces = re.split(r"[\[\]]", term)
    if len(pieces) // 2 > MAX_BRACKETS:
        raise ValueError(f"hostlist {_format_text(term)}: more than {MAX_BRACKETS} brackets in one name")
    for index, piece in enumerate(pieces):
        if index % 2:
            yield [_parse_range(item, term) for item in piece.split(",")]
        elif _PLAIN.fullmatch(piece):
            yield piece
        else:
            raise ValueError(
                f"hostlist {_format_text(term)}: a host name holds letters, digits, '.', '_' and '-' only"
            )


def _parse_range(item: str, term: str) -> tuple[int, int, int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"hostlist {_format_text(term)}: {_format_text(item)} is not a number or a range of numbers")
    low, high = match[1], match[2] or match[1]
    if max(len(low), len(high)) > MAX_DIGITS:
        raise ValueError(f"hostlist {_format_text(term)}: a number has more than {MAX_DIGITS} digits")
    if int(high) < int(low):
        raise ValueError(f"hostlist {_format_text(term)}: the range {item} runs backwards")
    return int(low), int(high), _find_width(low)


def _find_width(digits: str) -> int:
    return len(digits) if digits.startswith("0") else 0


def _expand_part(part: str | list[tuple[int, int, int]]) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [f"{number:0{width}d}" for low, high, width in part for number in range(low, high + 1)]


def _format_bracket(ranges: list[tuple[str, int, int]]) -> str:
    if len(ranges) == 1 and ranges[0][1] == ranges[0][2]:
        return ranges[0][0]
    items = (text if low == high else f"{text}-{high:0{_find_width(text)}d}" for text, low, high in ranges)
    return f"[{','.join(items)}]"


def _check_term(term: str, text: str) -> str:
    if not term:
        raise ValueError(f"hostlist {_format_text(text)}: an empty name between commas")
    return term


def _format_text(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
