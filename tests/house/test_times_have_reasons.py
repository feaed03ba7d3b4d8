"""A constant that stands for a time has its reason beside it: at the end of its line, or in a comment above."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemini_hpc

_PACKAGE = Path(gemini_hpc.__file__).parent
_TIME = re.compile(r"_?[A-Z][A-Z0-9_]*(?<!_PER)_(S|MS|NS)")


def _names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id


def unexplained_times(text: str) -> list[str]:
    """Return the constants of a module that stand for a time and have no comment beside or above them."""
    lines = text.splitlines()
    found = []
    for statement in ast.parse(text).body:
        assert statement.end_lineno is not None
        times = [name for name in _names(statement) if _TIME.fullmatch(name)]
        own = lines[statement.lineno - 1 : statement.end_lineno]
        above = lines[statement.lineno - 2] if statement.lineno > 1 else ""
        if times and not any("# " in line for line in own) and not above.startswith("#"):
            found += times
    return found


def test_times_have_reasons() -> None:
    wrong = [
        f"{path.relative_to(_PACKAGE.parent)}: {name}"
        for path in sorted(_PACKAGE.rglob("*.py"))
        for name in unexplained_times(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("WAIT_S = 5.0\n", ["WAIT_S"]),
        ("WAIT_S = 5.0  # longer than a boot\n", []),
        ("# longer than a boot\nWAIT_S = 5.0\n", []),
        ("_WAIT_S, _COUNT = 5.0, 3\n", ["_WAIT_S"]),
        ("COUNT = 5\n", []),
    ],
)
def test_a_time_without_a_comment_is_found(text: str, found: list[str]) -> None:
    assert unexplained_times(text) == found
