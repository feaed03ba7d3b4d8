"""No pickle is read, but for what a planner of DCP has made in the same process a moment before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "gemini_hpc"
ALLOWED = {("integrations/dcp.py", "_load_own_pickle")}


def unpickling(path: Path) -> Iterator[tuple[str, str]]:
    """Yield file and function of each place that could run code which data names."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            for node in ast.iter_child_nodes(function) if isinstance(function, ast.Module) else ast.walk(function):
                if _unpickles(node):
                    yield path.relative_to(PACKAGE).as_posix(), getattr(function, "name", "")


def _unpickles(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(name.name.split(".")[0] in ("pickle", "dill", "cloudpickle", "shelve") for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in ("pickle", "dill", "cloudpickle", "shelve")
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    loads = name == "torch.load" and not safe
    numpy = any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords)
    return loads or numpy or name in ("pickle.load", "pickle.loads", "eval", "exec")


def test_what_is_read_carries_no_code() -> None:
    found = {place for path in PACKAGE.rglob("*.py") for place in unpickling(path)}
    assert found == ALLOWED


def test_each_way_to_unpickle_is_seen(tmp_path: Path) -> None:
    for line in (
        "import pickle",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
    ):
        assert any(_unpickles(node) for node in ast.walk(ast.parse(line))), line
    for line in ("torch.load(x, weights_only=True)", "np.load(x)", "json.loads(x)"):
        assert not any(_unpickles(node) for node in ast.walk(ast.parse(line))), line
