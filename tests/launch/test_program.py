from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc.launch.import_log import ImportLog
from gemini_hpc.launch.program import Program, import_names, list_imports
from gemini_hpc.wire.ports import compute_attempt_port

SCRIPT = """
from __future__ import annotations
import json, os.path
import helper
from collections import abc as things
from . import nothing
if True:
    import late
def f():
    import later
"""


def test_what_a_script_imports_at_its_top_level_is_known() -> None:
    found = list_imports(SCRIPT.encode())
    assert list(found.items()) == [("json", []), ("os.path", []), ("helper", []), ("collections", ["abc"])]
    with pytest.raises(SyntaxError):
        list_imports(b"import")


def test_what_torch_imports_later_comes_only_with_torch(tmp_path: Path) -> None:
    """Whichever module brings torch in. An empty package has its name here: the real one takes seconds."""
    for name, text in [("torch/_dynamo.py", ""), ("mine/model.py", "import torch\n")]:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).with_name("__init__.py").write_text("")
        (tmp_path / name).write_text(text)
    (tmp_path / "look.py").write_text(
        "import sys\nfrom gemini_hpc.launch.program import Program\nProgram('train.py', False, ()).prepare()\n"
        "print(*(name for name in ('torch', 'torch._dynamo') if name in sys.modules))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for script, found in [
        ("import gemini_hpc, numbers", ""),
        ("from gemini_hpc.wire import local", ""),
        ("import torch", "torch torch._dynamo"),
        ("import mine.model", "torch torch._dynamo"),
        ("from mine import model", "torch torch._dynamo"),
        ("from gemini_hpc import Checkpointer", "torch torch._dynamo"),
    ]:
        (tmp_path / "train.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "look.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == f"{found}\n", script


def launch(directory: Path, script: str, *arguments: str, module: bool = False) -> subprocess.CompletedProcess[str]:
    """Without an agent."""
    (directory / "helper.py").write_text("import os\nprint('imported')\nname = __name__\n")
    (directory / "train.py").write_text(script)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "SLURM_"))}
    where = ["-m", "train"] if module else [str(directory / "train.py")]
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "gemini_hpc.launch", *where, *arguments],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_mpi_is_left_to_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mpi4py").mkdir()
    for name in ("__init__.py", "MPI.py"):
        (tmp_path / "mpi4py" / name).write_text("raise AssertionError('MPI begins')\n")
    before = {name for name in sys.modules if name.partition(".")[0] == "mpi4py"}
    import_names("mpi4py")
    import_names("mpi4py.MPI")
    assert {name for name in sys.modules if name.partition(".")[0] == "mpi4py"} == before


def test_a_command_of_its_own_has_the_interpreters_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (["-u", "-X", "dev"], []):
        monkeypatch.setattr(sys, "orig_argv", ["python", *given, "-m", "gemini_hpc.launch", "-m", "a", "-x"])
        assert Program("a", True, ("-x",)).build_argv() == [sys.executable, *given, "-m", "a", "-x"]


@pytest.mark.parametrize("module", [False, True])
def test_without_an_agent_a_script_runs_as_under_python(tmp_path: Path, module: bool) -> None:
    script = "import sys, helper\nprint(__name__, sys.argv[1:], sys.path[0])\nsys.exit(7)\n"
    done = launch(tmp_path, script, "--max-restarts", "9", "-m", "x", module=module)
    assert done.returncode == 7 and done.stderr == ""
    assert done.stdout == f"imported\n__main__ ['--max-restarts', '9', '-m', 'x'] {tmp_path}\n"


def test_a_traceback_is_the_scripts_own(tmp_path: Path) -> None:
    done = launch(tmp_path, "def f():\n    raise ValueError('no')\nf()\n")
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no\n") and "train.py" in done.stderr


def test_mistakes_are_told_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gemini_hpc.launch"]
    for words, said in [
        ([], "required: SCRIPT"),
        (["none.py"], "none.py: no such file"),
        ([str(tmp_path)], f"{tmp_path}: a directory without __main__.py"),
        (["-m", "none.x"], "no module named 'none.x'"),
        (["-m", ""], "no module named ''"),
        (["-m", ".x"], "no module named '.x'"),
        (["--max-restarts=x", "a"], "whole"),
    ]:
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)  # noqa: PLW1510
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_each_attempt_has_a_port_of_its_own() -> None:
    for first in (1024, 24000, 31999, 65535):
        ports = [compute_attempt_port(first, attempt) for attempt in range(1000)]
        assert ports[0] == first and len(set(ports)) == 1000 and all(1024 <= port < 65536 for port in ports)


def test_what_a_rank_imports_is_imported_by_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazily_imported.py").write_text("")
    (tmp_path / "broken_one.py").write_text("raise RuntimeError\n")
    log = ImportLog()
    try:
        assert log.compute_wait_s() is None
        for name in ("lazily_imported", "broken_one", "lazily_imported", "no such-name", "../x", "ä"):
            log.find_spec(name)
        log.read()
        assert 0 < (log.compute_wait_s() or 0) <= 2.0
        log.import_next()
        assert "lazily_imported" in sys.modules
        log.import_next()
        assert log.compute_wait_s() is None and "broken_one" not in sys.modules
    finally:
        sys.modules.pop("lazily_imported", None)
        os.close(log.fd)
        os.close(log._write)
