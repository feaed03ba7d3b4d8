"""Which Python the example scripts take: one that can run the training, wherever it is; else they say what to do."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# each script, and the modules that it says it needs
EXAMPLES = [
    (path.name, tuple(re.findall(r'^needs="(.*)"$', path.read_text(), re.MULTILINE)[0].split()))
    for path in sorted((ROOT / "examples").glob("*.sh"))
]


def interpreter(path: Path, modules: tuple[str, ...]) -> Path:
    """A Python that finds these modules and no others of theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    site = path.parent / f"{path.name}-modules"
    for module in modules:
        (site / module).mkdir(parents=True)
        (site / module / "__init__.py").write_text("raise SystemExit('it is not imported to find out')\n")
    # `-S`: without the packages of this machine's own Python.
    path.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec /usr/bin/python3 -S -s "$@"\n')
    path.chmod(0o755)
    return path


def chosen(tmp_path: Path, script: str, installed: tuple[str, ...], **env: str) -> subprocess.CompletedProcess[str]:
    """The script, run where the installation's Python has these modules; it prints how it would start the step."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in {"scontrol": "exit 0", "gemini-hpc": 'echo "$@"', "hostname": "echo h"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    opt = tmp_path / "opt"
    interpreter(opt / "gemini-hpc/venv/bin/python", installed)
    path = f"{tools}:{env.pop('first', tools)}:/usr/bin:/bin"
    argv = ["unshare", "-m", "sh", "-c", 'mount --make-rprivate /; mount --bind "$1" /opt; shift; exec "$@"', "sh"]
    argv += [str(opt), "bash", str(ROOT / "examples" / script), "--steps", "3"]
    settings = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/work", **env}
    return subprocess.run(argv, env=settings, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("script", "needs"), EXAMPLES)
def test_the_active_environment_before_one_that_lacks_the_modules(
    tmp_path: Path, script: str, needs: tuple[str, ...]
) -> None:
    """A cluster installed by the README: the installation's Python has gemini_hpc and nothing to train with."""
    interpreter(tmp_path / "env/python3", needs)
    done = chosen(tmp_path, script, ("gemini_hpc",), first=str(tmp_path / "env"))
    assert done.returncode == 0 and " python3 " in done.stdout and "/opt/" not in done.stdout, done


@pytest.mark.parametrize(("script", "needs"), EXAMPLES)
def test_the_installations_where_only_it_can(tmp_path: Path, script: str, needs: tuple[str, ...]) -> None:
    interpreter(tmp_path / "env/python3", needs[:-1])
    done = chosen(tmp_path, script, needs, first=str(tmp_path / "env"))
    assert done.returncode == 0 and " /opt/gemini-hpc/venv/bin/python " in done.stdout, done


@pytest.mark.parametrize(("script", "needs"), EXAMPLES)
def test_what_the_user_names_comes_first(tmp_path: Path, script: str, needs: tuple[str, ...]) -> None:
    mine = interpreter(tmp_path / "mine/python3.12", needs)
    interpreter(tmp_path / "env/python3", needs)
    done = chosen(tmp_path, script, needs, first=str(tmp_path / "env"), PYTHON=str(mine))
    assert done.returncode == 0 and f" {mine} " in done.stdout, done


@pytest.mark.parametrize(("script", "needs"), EXAMPLES)
def test_none_can(tmp_path: Path, script: str, needs: tuple[str, ...]) -> None:
    interpreter(tmp_path / "env/python3", ())
    done = chosen(tmp_path, script, ("gemini_hpc",), first=str(tmp_path / "env"))
    assert done.returncode == 2 and not done.stdout
    assert " ".join(needs) in done.stderr and "PYTHON=" in done.stderr and done.stderr.count("\n") == 1
    assert os.path.basename(script) in done.stderr
