"""Function names: a verb and its object, or a statement that is true or false."""

from __future__ import annotations

import ast
import logging
import mmap
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemini_hpc

_PACKAGE = Path(gemini_hpc.__file__).parent
# the verbs of this project; a name with another verb adds it there
_VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
# the first word of a conversion, a callback or an entry point
_IDIOMS = frozenset({"from", "to", "as", "on", "main"})
# auxiliaries that begin a statement; each other one is a verb in the third person: "holds_lock"
_AUXILIARIES = frozenset(
    {"is", "are", "was", "were", "has", "have", "had", "can", "may", "must", "should", "will", "does"}
)
# interfaces whose names are kept where a class stands for them
_INTERFACES = (time, socket.socket, mmap.mmap, logging.Formatter, logging.Handler)
_FRAMEWORK_NAMES = frozenset({"state_dict", "load_state_dict", "_init_training_state"})  # torch, Hugging Face


def _functions() -> Iterator[tuple[str, str, bool]]:
    """Yield the place, the name and "returns a boolean" of each function of the product that is no property."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            if "property" in decorators or ".setter" in decorators or node.name.startswith("__") or node.name == "_":
                continue
            returns = ast.unparse(node.returns) if node.returns else ""
            place = f"{path.relative_to(_PACKAGE.parent)}:{node.lineno}"
            yield place, node.name, returns == "bool" or returns.startswith(("TypeGuard", "TypeIs"))


def _is_statement(word: str) -> bool:
    """Return whether a first word begins a statement: an auxiliary, or a verb in the third person."""
    stems = {word[:-1], word[:-2], word[:-3] + "y"}
    return word in _AUXILIARIES or (word.endswith("s") and bool(stems & _VERBS))


def name_problem(name: str, *, returns_boolean: bool) -> str:
    """Return what is wrong with a function's name, or nothing."""
    if name in _FRAMEWORK_NAMES or any(hasattr(interface, name) for interface in _INTERFACES):
        return ""
    first = name.strip("_").split("_")[0]
    if first in _VERBS | _IDIOMS:
        return ""
    if returns_boolean:
        return "" if _is_statement(first) else "is no statement"
    return "does not begin with a verb"


def test_functions_are_verbs_with_objects_or_statements() -> None:
    wrong = [
        f"{place}: {name} {problem}"
        for place, name, returns_boolean in _functions()
        if (problem := name_problem(name, returns_boolean=returns_boolean))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "returns_boolean", "is_wrong"),
    [
        ("record_seal", False, False),
        ("_beside", False, True),
        ("sealed", False, True),
        ("is_sealed", True, False),
        ("_holds_lock", True, False),
        ("sealed", True, True),
        ("is_sealed", False, True),
        ("on_death", False, False),
    ],
)
def test_a_name_is_judged_by_its_first_word(name: str, returns_boolean: bool, is_wrong: bool) -> None:
    assert bool(name_problem(name, returns_boolean=returns_boolean)) == is_wrong
