"""The Spack recipe and the Ansible role: as far as they run without a Spack and without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]
PACKAGING = TOP / "slurm" / "packaging"
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
ROLE = PACKAGING / "ansible" / "roles" / "gemini_hpc"
_LIMIT_S = 240.0


def recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Any, ...]]]:
    """Run the recipe against a stand-in of Spack's directives; return what it told each of them."""
    told: dict[str, list[tuple[Any, ...]]] = {}

    def directive(name: str) -> Any:
        return lambda *words, **options: told.setdefault(name, []).append((*words, options))

    package = types.ModuleType("spack.package")
    for name in ("license", "version", "variant", "depends_on"):
        setattr(package, name, directive(name))
    package.PythonPackage = type("PythonPackage", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spack", types.ModuleType("spack"))
    monkeypatch.setitem(sys.modules, "spack.package", package)
    exec(compile((PACKAGING / "spack" / "package.py").read_text(), "package.py", "exec"), {"__name__": "recipe"})
    return told


def test_the_recipe_asks_for_what_pyproject_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = recipe(monkeypatch)
    assert {words[0] for words in told["variant"]} == {"torch", "mpi", "tier"}

    def found(when: str) -> set[str]:
        return {spec for spec, options in told["depends_on"] if options.get("when", "") == when}

    def wanted(requirements: list[str]) -> set[str]:
        return {re.sub(r"^([\w-]+)>=([\d.]+).*", r"py-\1@\2:", each) for each in requirements}

    python = f"python@{PROJECT['requires-python'].removeprefix('>=')}:"
    assert found("") == wanted(PROJECT["dependencies"]) | {python, "py-hatchling@1.25:"}
    for variant in ("torch", "mpi", "tier"):
        assert found(f"+{variant}") == wanted(PROJECT["optional-dependencies"][variant]), variant


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_role_is_ansible_s_and_writes_the_settings(tmp_path: Path) -> None:
    """Run it with --check, which changes nothing on this machine and shows the settings as they would be written."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=_LIMIT_S)
    subprocess.run([venv / "bin/pip", "install", "-q", "ansible-core>=2.14,<2.20"], check=True, timeout=_LIMIT_S)
    for name in ("gemini-hpc", "gemini-hpc-node", "gemini-hpc-spank-22.05"):
        (tmp_path / f"{name}_0.2.0-1_all.deb").touch()
    (tmp_path / "hosts").write_text(
        "[slurm_nodes]\nn1 ansible_connection=local ansible_become=false "
        f"ansible_python_interpreter={sys.executable}\n"
        "[slurm_controllers]\n[slurm_logins]\n"
    )
    env = {**os.environ, "HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp")}

    def play(*words: str) -> str:
        argv = [venv / "bin/ansible-playbook", "-i", tmp_path / "hosts", "-e", f"gemini_hpc_packages={tmp_path}"]
        done = subprocess.run(
            [*argv, *words, PACKAGING / "ansible" / "site.yml"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    play("--syntax-check")
    settings = Path("/etc/gemini-hpc/gemini.toml")
    before = settings.read_text() if settings.exists() else None
    said = play("--check", "--diff", "-e", "gemini_hpc_cluster=abc")
    assert '+cluster_name = "abc"' in said
    assert (settings.read_text() if settings.exists() else None) == before
    assert "gemini-hpc-node_0.2.0-1_all.deb" in said
    assert "failed=0" in said
