"""The promises that `make test` shows, from the markers: `python -m tests.promises` writes docs/dev/promises.md."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import parts

PAGE = parts.TESTS.parent / "docs" / "dev" / "promises.md"
HEAD = """# The promises, and the test that shows each

`make test` runs the quick tests and those below. Each shows one promise of the [README](../../README.md). The marker
`witness` at the test makes its line: `python -m tests.promises` writes this page.
"""
SECTIONS = {True: "On a real cluster", False: "Without a cluster"}


class Marked(NamedTuple):
    """A test, or one case of it, that has a marker with words."""

    file: str
    test: str
    words: tuple[str, ...]
    is_cluster: bool


def marked(name: str) -> list[Marked]:
    """Return the uses of a marker in all test files, in the order of the files."""
    return [found for file in parts.files() for found in _in_file(file, name)]


def _in_file(file: str, name: str) -> Iterator[Marked]:
    text = (parts.TESTS / file).read_text()
    if f"mark.{name}(" not in text:
        return
    tree = ast.parse(text)
    every = any(isinstance(n, ast.Assign) and "mark.cluster" in ast.unparse(n) for n in tree.body)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_cluster = every or any("mark.cluster" in ast.unparse(d) for d in node.decorator_list)
            for call in (n for d in node.decorator_list for n in ast.walk(d)):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"pytest.mark.{name}":
                    yield Marked(file, node.name, tuple(str(ast.literal_eval(a)) for a in call.args), is_cluster)


def _wrap(item: str) -> str:
    return textwrap.fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def page() -> str:
    """Return the text of docs/dev/promises.md."""
    rows = sorted((m.words[0], f"{m.file}::{m.test}", m.is_cluster) for m in marked("witness"))
    text = HEAD
    for is_cluster, heading in SECTIONS.items():
        text += f"\n## {heading}\n\n"
        text += "".join(_wrap(f"- {what}: `{test}`") for what, test, real in rows if real == is_cluster)
    return text


if __name__ == "__main__":
    Path(PAGE).write_text(page())
