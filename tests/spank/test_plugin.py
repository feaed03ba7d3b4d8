"""The SPANK plugin: its unit tests (C, with sanitizers) and the finished shared object. Needs no cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SLURM_DIR = Path(__file__).resolve().parents[2] / "slurm"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("spank")
    make("test", build)
    return build / "gemini_spank.so"


def make(target: str, build: Path) -> str:
    argv = ["make", "-j2", "-C", str(SLURM_DIR), target, f"BUILD={build}/build", f"PLUGIN={build}/gemini_spank.so"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_unit_tests_pass_with_sanitizers(built: Path) -> None:
    out = make("test", built.parent)
    wanted = {f"passed: test/{path.name}" for path in SLURM_DIR.glob("test/test_*.c")}
    assert wanted and wanted <= set(out.splitlines())


def test_only_the_plugins_symbols_are_exported(built: Path) -> None:
    out = subprocess.run(["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in out.splitlines()}
    assert names == {
        "plugin_name",
        "plugin_type",
        "plugin_version",
        "spank_plugin_version",
        "slurm_spank_init",
        "slurm_spank_init_post_opt",
        "slurm_spank_task_init",
    }


def test_it_is_hardened(built: Path) -> None:
    dynamic = subprocess.run(["readelf", "-dW", built], capture_output=True, text=True, check=True).stdout
    assert "BIND_NOW" in dynamic
    segments = subprocess.run(["readelf", "-lW", built], capture_output=True, text=True, check=True).stdout
    assert "GNU_RELRO" in segments
    stack = next(line for line in segments.splitlines() if "GNU_STACK" in line)
    assert "RWE" not in stack
    needed = subprocess.run(
        ["nm", "-D", "--undefined-only", built], capture_output=True, text=True, check=True
    ).stdout
    assert "__stack_chk_fail" in needed
    assert "__snprintf_chk" in needed


def test_plugstack_example_names_the_installed_file(tmp_path: Path, built: Path) -> None:
    argv = ["make", "-C", str(SLURM_DIR), "install", f"BUILD={built.parent}/build", f"PLUGIN={built}"]
    subprocess.run([*argv, f"DESTDIR={tmp_path}"], capture_output=True, timeout=100, check=True)
    lines = (SLURM_DIR / "plugstack.conf.example").read_text().splitlines()
    (line,) = [line for line in lines if line and not line.startswith("#")]
    word, path = line.split()
    assert word == "optional"
    assert (tmp_path / path.lstrip("/")).is_file()
