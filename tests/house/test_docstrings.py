"""Docstrings need one reading: the first line says what a thing does or is, in short sentences (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PRODUCT = Path(__file__).resolve().parents[2] / "gemini_hpc"
ROOMS = sorted(p.name for p in PRODUCT.iterdir() if p.is_dir() and any(p.glob("*.py")))
MOST_WORDS = 30
# No first line begins with a relative clause, a bare preposition, a pronoun or an answer.
UNCLEAR = re.compile(
    r"(Whether|What|Who(m|se)?|Why|Where(ver)?|When(ever)?|How|Which|That|This|These|Those|Of|To|From|In|On|At|For|With"
    r"|Without|By|As|Under|Until|So|Its?|They|Ones?|If|None|True|False|Besides?|After|Before|Nothing|Nobody|Another|Not?"
    r"|Never|Because|Since|Like|Behind|Between|Within|Only|There|See|Same|Told|Called)\b"
)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield f"{path.relative_to(PRODUCT)}:{getattr(node, 'lineno', 1)}", text


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than MOST_WORDS words; lists, tables and blocks of arguments do not count."""
    found = []
    for paragraph in text.split("\n\n"):
        if re.match(r"\s*[-*|] ", paragraph) or re.search(r"^\s{4,}", paragraph, re.M):
            continue
        for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z`*(])", " ".join(paragraph.split())):
            if len(sentence.split()) > MOST_WORDS:
                found.append(sentence)
    return found


def faults(text: str) -> list[str]:
    """Return what a docstring has against the rules."""
    unclear = [f"begins with {first[0]!r}"] if (first := UNCLEAR.match(text)) else []
    return unclear + [f"{len(long.split())} words: {long}" for long in long_sentences(text)]


@pytest.mark.parametrize("room", [".", *ROOMS])
def test_docstrings_need_one_reading(room: str) -> None:
    paths = sorted(PRODUCT.glob("*.py") if room == "." else (PRODUCT / room).rglob("*.py"))
    found = [f"{at}: {fault}" for path in paths for at, text in docstrings(path) for fault in faults(text)]
    assert not found, "\n".join(found)


def known_names() -> set[str]:
    """Return the builtins, and each name that the product defines, imports or uses."""
    found = set(dir(builtins))
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.update((node.asname or node.name).split("."))
    return found


def raised(text: str) -> list[str]:
    """Return the exceptions that a docstring names under "Raises:"."""
    block = re.search(r"^Raises:\n((?:    .*\n?|\n)+)", text, re.M)
    return re.findall(r"^    [\w.]*?(\w+):", block[1], re.M) if block else []


def test_exceptions_in_docstrings_exist() -> None:
    known = known_names()
    wrong = [
        f"{at}: {name}"
        for path in sorted(PRODUCT.rglob("*.py"))
        for at, text in docstrings(path)
        for name in raised(text)
        if name not in known
    ]
    assert not wrong, "\n".join(wrong)
    assert raised("Return.\n\nRaises:\n    NoSuch: It is not there.\n    a.Other: Nor this.") == ["NoSuch", "Other"]


def listed_attributes(text: str) -> list[str]:
    """Return the names that a docstring lists under "Attributes:"."""
    block = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", text, re.M)
    return re.findall(r"^    (\w+):", block[1], re.M) if block else []


def test_attributes_in_docstrings_exist() -> None:
    """A class, or one that it inherits from, has each attribute that its docstring lists."""
    classes = [
        (f"{path.relative_to(PRODUCT)}:{node.lineno}", node)
        for path in sorted(PRODUCT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    by_name = {node.name: node for _, node in classes}

    def names(node: ast.ClassDef) -> set[str]:
        found: set[str] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(inner.name)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                found.add(inner.id)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                found.add(inner.attr)
        bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        return found.union(*(names(by_name[base]) for base in bases if base in by_name and base != node.name))

    wrong = [
        f"{at}: {node.name} has no {name}"
        for at, node in classes
        for name in listed_attributes(ast.get_docstring(node) or "")
        if name not in names(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_fault_is_found() -> None:
    assert faults("Whom an agent calls dead.") and faults("Of one rank.") and faults("Return " + "a word " * 16 + ".")
    assert not faults("Return the newest version.\n\nArgs:\n    name: " + "a word " * 20)
