"""How the package's files stand to each other: no circle of imports, none upwards, one clock.

Imports for types alone, and those inside functions, count: who reads a file of a circle has to read them all. Nobody
but `clock` reads the system's time, so that a simulation can replace it. Each file is parsed once for all of this.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gemini_hpc

PACKAGE = Path(gemini_hpc.__file__).parent
Graph = dict[str, set[str]]
# From the ground up; each is a list of rooms.
FLOORS: list[list[str]] = tomllib.loads(Path(__file__).with_name("floors.toml").read_text())["floors"]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
TELLS_TIME = {"monotonic", "monotonic_ns", "time", "time_ns", "sleep"}
STREAMS = {"sys.stdout", "sys.stderr"}
MENTIONS_TIME = re.compile(r"\btime\s*\.|\bfrom\s+time\b")  # others need no look


@cache
def sources() -> dict[str, str]:
    """Return the text of each module, by its name without the package's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@cache
def ours() -> Graph:
    """Return the package's imports."""
    return graph(sources(), "gemini_hpc")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node: imports are in no expression."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


def imported(name: str, text: str, package: str) -> Iterator[str]:
    """Yield what a module of this name imports of the package: modules, and what is taken from them."""
    for node in statements(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [package, *name.split(".")][: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        yield from (found.removeprefix(f"{package}.") for found in names if found.startswith(f"{package}."))


def graph(texts: dict[str, str], package: str) -> Graph:
    """Return the modules that each one imports. The package's own and those of its folders, which every import of
    something in them runs, do not count."""
    found: Graph = {name: set() for name in texts}
    for name, text in texts.items():
        for wanted in imported(name, text, package):
            module = wanted if wanted in texts else wanted.rpartition(".")[0]
            if module in texts and module != name:
                found[name].add(module)
    return found


def circles(edges: Graph) -> set[frozenset[str]]:
    """Return the largest sets of modules each of which reaches all others."""

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


def room(module: str) -> str:
    """Return the room that a module is in: the longest name of one that it begins with."""
    found = [name for name in HEIGHT if name and (module == name or module.startswith(f"{name}."))]
    return max(found, key=len, default="")


def upwards(edges: Graph) -> list[str]:
    """Return imports of what is neither below nor in the same room. Anybody may ask the package for its version."""
    return [
        f"{name} imports {wanted}"
        for name, imported in sorted(edges.items())
        for wanted in sorted(imported - {""})
        if room(name) != room(wanted) and HEIGHT[room(wanted)] >= HEIGHT[room(name)]
    ]


def clock_reads(source: str) -> list[int]:
    """Return the lines on which the system's clock is read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and node.attr in TELLS_TIME:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if name.name in TELLS_TIME]
    return found


def speaks(source: str) -> list[int]:
    """Return the lines in which a source text writes to stdout or stderr itself, or prints."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "print" or called.rpartition(".")[0] in STREAMS:
                found.append(node.lineno)
    return found


def test_a_line_that_cannot_be_written_ends_nothing() -> None:
    """What runs in a user's job, or as root, speaks through `lines`."""
    rooms = ("client", "train", "mpi", "integrations", "launch", "node", "wire", "tier", "cli.run")
    inside = {name: text for name, text in sources().items() if name.startswith(rooms)}
    assert {name: found for name, text in inside.items() if (found := speaks(text))} == {}
    assert speaks("print(1)\nsys.stderr.flush()\nsys.stdout.write('')\nlines.put(sys.stderr, '')") == [1, 2, 3]


def test_no_circle_of_files() -> None:
    assert [sorted(circle) for circle in circles(ours())] == []


def test_no_part_of_an_agent_takes_the_whole() -> None:
    assert {name for name, wanted in ours().items() if "agent.daemon" in wanted} == {"agent.__main__"}


def test_a_circle_is_found() -> None:
    texts = {
        "a": "if TYPE_CHECKING:\n    from p.b import B\n",
        "b": "def f() -> None:\n    try:\n        pass\n    except OSError:\n        from p import c\n",
        "c": "import p.a\nfrom p.d import x\n",
        "d": "import os\n",
        "e.f": "from .g import x\n",
        "e.g": "from . import f\n",
    }
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e.f": {"e.g"}, "e.g": {"e.f"}}
    assert graph(texts, "p") == edges
    assert circles(edges) == {frozenset("abc"), frozenset({"e.f", "e.g"})}


def test_no_import_goes_upwards() -> None:
    assert upwards(ours()) == []
    edges = {"core.slots": {"wire.link", "core.votes"}, "node.prolog": {"tier.version", "wire.ports"}}
    assert upwards(edges) == ["core.slots imports wire.link", "node.prolog imports tier.version"]


def test_each_module_has_a_room_and_each_room_has_modules() -> None:
    assert {name for name in ours() if room(name) == ""} == {""}
    assert {room(name) for name in ours()} == set(HEIGHT)


def test_nobody_else_reads_the_clock() -> None:
    others = {name: text for name, text in sources().items() if name != "clock"}
    assert len(others) > 200
    look = {name: text for name, text in others.items() if MENTIONS_TIME.search(text)}
    assert {name: lines for name, text in look.items() if (lines := clock_reads(text))} == {}, "use gemini_hpc.clock"
    for text, lines in (("import time\ntime . monotonic()\n", [2]), ("from time import sleep\n", [1])):
        assert MENTIONS_TIME.search(text) and clock_reads(text) == lines
