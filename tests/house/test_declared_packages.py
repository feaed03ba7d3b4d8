"""`make check` installs all that lint and the quick tests import.

Other lists of pyproject.toml may bring a package along by chance: what such a machine runs says nothing of a new one.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTS = PROJECT["optional-dependencies"]

OURS = {"gemini_hpc", "tests", "benchmarks", "examples"}
# Of lists that other targets install, or nobody: integrations, pyslurm, Triton.
ELSEWHERE = {"accelerate", "lightning", "megatron", "pyslurm", "torchtitan", "transformers", "triton"}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!\[; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _imported(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def test_lint_and_quick_tests_have_every_package_of_the_product() -> None:
    installed = {_name(each) for each in PROJECT["dependencies"] + LISTS["dev"]}
    for purpose in ("torch", "report", "tier", "export", "metrics", "mpi"):
        assert {_name(each) for each in LISTS[purpose]} <= installed, purpose


def test_every_import_of_the_product_is_declared() -> None:
    installed = {_name(each) for each in PROJECT["dependencies"] + LISTS["dev"]}
    for path in (ROOT / "gemini_hpc").rglob("*.py"):
        for module in _imported(path) - OURS - ELSEWHERE - set(sys.stdlib_module_names):
            assert module.replace("_", "-") in installed, f"{path}: {module}"
