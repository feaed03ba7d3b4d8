"""Root that becomes SlurmUser in directories which SlurmUser may have prepared (CVE-2016-10030, CVE-2023-41914)."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_hpc.config import Settings
from gemini_hpc.controller.startup import explain_elsewhere

pytestmark = pytest.mark.slow

SLURM = pwd.getpwnam("slurm")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of SlurmUser's, reachable by it, and beside it what it must not get."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and str(path).startswith("/tmp/") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o011)
    home = tmp_path / "slurm"
    home.mkdir()
    os.chown(home, SLURM.pw_uid, SLURM.pw_gid)
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "secret").write_text("x")
    return home


def start(state_dir: Path) -> subprocess.CompletedProcess[str]:
    """`become_slurm_user` as root, then what the controller does first; tells who it is."""
    code = (
        "import os, sys; from gemini_hpc.config import Settings; from gemini_hpc.controller.startup import *\n"
        "try: become_slurm_user(Settings(state_dir=sys.argv[1]))\n"
        "except ServiceError as e: print(e); sys.exit(1)\n"
        "print(os.getresuid(), os.getresgid(), sorted(os.getgroups()))\n"
        "try: os.setuid(0); print('ROOT AGAIN')\n"
        "except PermissionError: pass\n"
    )
    argv = [sys.executable, "-c", code, str(state_dir)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)


def owner(path: Path) -> int:
    return path.stat(follow_symlinks=False).st_uid


def test_it_is_slurmuser_for_good(home: Path) -> None:
    assert SLURM is not None
    done = start(home / "state")
    uid, gid = SLURM.pw_uid, SLURM.pw_gid
    assert done.returncode == 0 and done.stdout.startswith(f"({uid}, {uid}, {uid}) ({gid}, {gid}, {gid})"), done
    assert "ROOT" not in done.stdout and owner(home / "state") == uid
    (home / "state" / "journal.jsonl").write_text("")
    assert start(home / "state").returncode == 0, "again"


def test_link_in_the_place_of_the_state_directory(home: Path) -> None:
    (home / "state").symlink_to(home.parent / "roots")
    done = start(home / "state")
    assert done.returncode == 1 and "not a link" in done.stdout
    assert owner(home.parent / "roots") == 0


def test_directory_of_roots_that_is_in_use(home: Path) -> None:
    done = start(home.parent / "roots")
    assert done.returncode == 1 and "is in use" in done.stdout
    assert owner(home.parent / "roots") == 0 and owner(home.parent / "roots" / "secret") == 0


def test_link_in_the_place_of_the_log(home: Path) -> None:
    """Root must not open the log of --daemon, which lies in the directory."""
    secret, state = home.parent / "roots" / "secret", home / "state"
    state.mkdir()
    os.chown(state, SLURM.pw_uid, SLURM.pw_gid)
    os.link(secret, state / "controller.log")
    config = home.parent / "gemini.toml"
    config.write_text(f'state_dir = "{state}"\ncontroller_port = 7399\n')
    config.chmod(0o644)
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "controller", "--daemon", "--config", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and "controller.log: Permission denied" in done.stderr, done
    assert secret.read_text() == "x"


def test_a_controller_belongs_on_a_host_that_the_settings_name() -> None:
    for host in ("", "localhost", socket.gethostname(), "192.0.2.1,127.0.0.1", "no-such-host.invalid"):
        assert explain_elsewhere(Settings(controller_host=host)) == "", host
    assert "controller_host is 192.0.2.1" in explain_elsewhere(Settings(controller_host="192.0.2.1"))
