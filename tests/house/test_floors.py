"""No module imports upwards: the floors are data, `floors.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from .test_circles import ours

FLOORS: list[list[str]] = tomllib.loads(Path(__file__).with_name("floors.toml").read_text())["floors"]
_HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def room(module: str) -> str:
    """The room that a module is in: the longest name of one that it begins with."""
    found = [name for name in _HEIGHT if name and (module == name or module.startswith(f"{name}."))]
    return max(found, key=len, default="")


def upwards(edges: dict[str, set[str]]) -> list[str]:
    """Imports of what is not below, and not in the same room. Anybody may ask the package for its version."""
    return [
        f"{name} imports {wanted}"
        for name, imported in sorted(edges.items())
        for wanted in sorted(imported - {""})
        if room(name) != room(wanted) and _HEIGHT[room(wanted)] >= _HEIGHT[room(name)]
    ]


def test_no_import_goes_upwards() -> None:
    assert upwards(ours()) == []


def test_each_module_has_a_room_and_each_room_has_modules() -> None:
    assert {name for name in ours() if room(name) == ""} == {""}
    assert {room(name) for name in ours()} == set(_HEIGHT)


def test_imports_that_go_upwards_are_found() -> None:
    edges = {"core.slots": {"wire.link", "core.votes"}, "node.prolog": {"tier.version", "wire.ports"}}
    assert upwards(edges) == ["core.slots imports wire.link", "node.prolog imports tier.version"]
