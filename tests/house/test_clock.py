"""All code takes the time from one place, which a simulation can replace."""

from __future__ import annotations

import ast
from pathlib import Path

import gemini_hpc
from gemini_hpc import clock

PACKAGE = Path(gemini_hpc.__file__).parent
TELLS_TIME = {"monotonic", "monotonic_ns", "time", "time_ns", "sleep"}


def reads(source: str) -> list[int]:
    """Lines on which the system's clock is read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and node.attr in TELLS_TIME:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if name.name in TELLS_TIME]
    return found


def test_nobody_else_reads_the_clock() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "clock.py"]
    assert len(files) > 200
    found = {str(path.relative_to(PACKAGE)): lines for path in files if (lines := reads(path.read_text()))}
    assert not found, "use gemini_hpc.clock"
    assert reads("import time\nfrom time import sleep\ntime.monotonic()\n") == [2, 3]


def test_another_clock() -> None:
    class Stopped:
        def monotonic_ns(self) -> int:
            return 5_000_000_000

        def time(self) -> float:
            return 7.0

        def sleep(self, seconds: float) -> None: ...

    try:
        clock.use(Stopped())
        assert (clock.monotonic(), clock.time()) == (5.0, 7.0)
    finally:
        clock.use(None)
    assert clock.time() > 1.7e9
