"""How a root is made and kept; in the place of debootstrap stands a script of a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from . import machine, root
from .errors import ReleaseError
from .root import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe("24.11", "http://mirror.invalid/debian", ("slurmd", "munge"))
TOP = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in tells how often it was called."""
    calls, script = tmp_path / "calls", tmp_path / "make.sh"
    script.write_text(
        f'#!/bin/bash\necho "$1 $3" >>{calls}\nmkdir -p "$2/etc"\nsleep ${{SLOW:-0.3}}\n'
        f"[ ! -e {tmp_path}/broken ] || {{ echo E: no such package; exit 1; }}\necho whole >$2/last\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(root, "SCRIPT", script)
    monkeypatch.setattr(root, "_slurm_of", lambda _: "24.11.5")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "debootstrap").write_text("#!/bin/sh\n")
    (tmp_path / "debootstrap").chmod(0o755)
    return calls


def calls(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def roots(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_root_is_made_once_also_for_two_at_the_same_time(made: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def use() -> None:
        with root.held(tmp_path / "cache", RECIPE) as found:
            seen.append((found / "last").read_text())

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert seen == ["whole\n"] * 3 and calls(made) == 1
    assert roots(tmp_path / "cache") == [f"slurm-24.11-{RECIPE.digest}"]
    assert "24.11.5 on Debian trixie" in root.described(tmp_path / "cache" / f"slurm-24.11-{RECIPE.digest}")


def test_other_packages_are_another_root_and_another_mirror_is_not(made: Path) -> None:
    assert Recipe("24.11", "http://other.invalid/debian", RECIPE.packages).digest == RECIPE.digest
    assert Recipe("24.11", RECIPE.mirror, (*RECIPE.packages, "strace")).digest != RECIPE.digest
    assert Recipe("26.05", RECIPE.mirror, RECIPE.packages).digest != RECIPE.digest


def test_a_failed_making_leaves_nothing_and_says_how_its_log_ends(made: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(ReleaseError, match="no such package"), root.held(tmp_path / "cache", RECIPE):
        pass
    assert roots(tmp_path / "cache") == []
    (tmp_path / "broken").unlink()
    with root.held(tmp_path / "cache", RECIPE) as found:
        assert (found / "last").exists()


def test_a_suite_that_has_moved_on_is_said_and_not_kept(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root, "_slurm_of", lambda _: "25.11.2")
    with pytest.raises(ReleaseError, match=r"trixie has Slurm 25\.11\.2 now"), root.held(tmp_path / "cache", RECIPE):
        pass
    assert roots(tmp_path / "cache") == []


def test_anew_waits_for_those_who_use_the_root(made: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with root.held(cache, RECIPE) as found:
        (found / "mark").touch()
        again = threading.Thread(target=lambda: root.held(cache, RECIPE, anew=True).__enter__())
        again.start()
        again.join(1.0)
        assert again.is_alive() and (found / "mark").exists() and calls(made) == 1
    again.join(30.0)
    assert not again.is_alive() and calls(made) == 2 and not (found / "mark").exists()


def test_roots_that_nobody_has_used_for_long_go(made: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    others = [Recipe("24.11", RECIPE.mirror, (package,)) for package in ("old", "young", "held")]
    with root.held(cache, others[2]) as held:
        for other in others[:2]:
            with root.held(cache, other):
                pass
        for other in (others[0], others[2]):
            os.utime(cache / f"slurm-24.11-{other.digest}.lock", (0, 0))
        with root.held(cache, RECIPE):
            pass
        assert roots(cache) == sorted([f"slurm-24.11-{r.digest}" for r in (RECIPE, others[1])] + [held.name])


def test_a_tool_killed_while_it_makes_a_root_leaves_no_process_and_no_half_root(made: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.releases import root\n"
        f"root.SCRIPT = Path({str(root.SCRIPT)!r})\n"
        f"with root.held(Path(sys.argv[1]), root.Recipe('24.11', 'm', {RECIPE.packages!r})): pass\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "cache")]
    tool = subprocess.Popen(argv, cwd=TOP, env={**os.environ, "SLOW": "97.25"}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20.0
    while not calls(made):
        assert time.monotonic() < deadline and tool.poll() is None
        time.sleep(0.01)
    tool.send_signal(signal.SIGKILL)
    tool.wait(10.0)
    while "97.25" in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline, "what makes the root outlives the tool"
        time.sleep(0.05)
    assert [name for name in roots(tmp_path / "cache") if not name.endswith(".new")] == []
    with root.held(tmp_path / "cache", RECIPE):
        assert roots(tmp_path / "cache") == [f"slurm-24.11-{RECIPE.digest}"]


def test_the_machine_names_its_mirror_and_what_a_root_needs() -> None:
    assert machine.mirror().startswith(("http://", "https://", "file:"))
    assert {"slurmctld", "slurmdbd", "mariadb-server-core", "gcc"} <= set(machine.packages(TOP))
    assert machine.python(TOP).is_relative_to("/usr/bin")
    assert 'Acquire::Languages "none";' in machine.apt_settings()


def test_an_unknown_release_names_those_there_are() -> None:
    argv = [sys.executable, "-m", "tests.releases", "21.08"]
    done = subprocess.run(argv, cwd=TOP, capture_output=True, text=True, timeout=30.0, check=False)
    assert done.returncode == 2 and "24.11" in done.stderr and "Traceback" not in done.stderr


def test_options_may_follow_the_release() -> None:
    argv = [sys.executable, "-m", "tests.releases", "24.11", "--bind", "/nonexistent", "--", "true", "--anew"]
    done = subprocess.run(argv, cwd=TOP, capture_output=True, text=True, timeout=30.0, check=False)
    assert done.returncode == 1 and done.stderr == "tests.releases: /nonexistent is not a directory\n"
