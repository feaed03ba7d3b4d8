"""Count saved versions, never their numbers: each j-th is saved, and j may share a factor with any other period."""

from __future__ import annotations

import ast
from pathlib import Path

import gemini_hpc

ROOT = Path(gemini_hpc.__file__).parent
CHOOSERS = {"train/schedule/interval_controller.py", "mpi/interval.py"}  # they choose the versions that are saved


def _names(node: ast.expr) -> set[str]:
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)
    }


def test_no_remainder_of_a_versions_number_decides_anything() -> None:
    found = []
    for room in ("train", "mpi", "integrations", "client", "agent", "tier"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and "version" in _names(node.left):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {place.partition(":")[0] for place in found} == CHOOSERS, found
