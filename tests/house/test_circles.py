"""No circle of files: what a file imports, directly or through others, does not import it. Imports for types alone,
and those inside functions, count: who reads a file of a circle has to read them all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gemini_hpc

PACKAGE = Path(gemini_hpc.__file__).parent
Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, ast.Module]:
    """All of a package, by name without the package's."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imported(name: str, tree: ast.Module, package: str) -> Iterator[str]:
    """What a module of this name imports of the package: modules, and what is taken from them."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [package, *name.split(".")][: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        yield from (found.removeprefix(f"{package}.") for found in names if found.startswith(f"{package}."))


def graph(trees: dict[str, ast.Module], package: str) -> Graph:
    """Of each module those that it imports. The package's own and those of its folders, which every import of
    something in them runs, do not count."""
    found: Graph = {name: set() for name in trees}
    for name, tree in trees.items():
        for wanted in imported(name, tree, package):
            module = wanted if wanted in trees else wanted.rpartition(".")[0]
            if module in trees and module != name:
                found[name].add(module)
    return found


def circles(edges: Graph) -> set[frozenset[str]]:
    """The largest sets of modules each of which reaches all others."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            new = edges[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    reach = {name: reached(name) for name in edges}
    return {frozenset(b for b in reach[a] if a in reach[b]) for a in edges if a in reach[a]}


@cache
def ours() -> Graph:
    """The package's."""
    return graph(modules(PACKAGE), "gemini_hpc")


def test_no_circle_of_files() -> None:
    assert [sorted(circle) for circle in circles(ours())] == []


def test_no_part_of_an_agent_takes_the_whole() -> None:
    assert {name for name, wanted in ours().items() if "agent.daemon" in wanted} == {"agent.__main__"}


def test_a_circle_is_found() -> None:
    sources = {
        "a": "if TYPE_CHECKING:\n    from p.b import B\n",
        "b": "def f() -> None:\n    from p import c\n",
        "c": "import p.a\nfrom p.d import x\n",
        "d": "import os\n",
        "e.f": "from .g import x\n",
        "e.g": "from . import f\n",
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e.f": {"e.g"}, "e.g": {"e.f"}}
    assert graph(trees, "p") == edges
    assert circles(edges) == {frozenset("abc"), frozenset({"e.f", "e.g"})}
