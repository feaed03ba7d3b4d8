"""An imagined compute node: a mount and PID namespace with its own /run, /opt and /etc, two users, and Slurm commands
that tell on whoever calls them. Everything that a test starts there ends with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE_INIT = Path(__file__).with_name("node_init.sh")
RECORDING_HOLD = "import sys\nwith open('/run/held', 'a') as f:\n    print(*sys.argv[1:], file=f)\n"
NOTHING: Mapping[str, str] = MappingProxyType({})
ALICE, BOB = 61001, 61002
ALICE_GID, ALICE_EXTRA_GID, BOB_GID = 61101, 61103, 61102


@dataclass
class Node:
    """One imagined node; `pid` is its init's."""

    pid: int
    venv: Path

    def run(
        self, argv: list[str], env: Mapping[str, str] = NOTHING, *, timeout_s: float = 30.0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` as root with exactly this environment."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-w/", "--"]
        return subprocess.run(
            [*enter, *argv],
            env={**env, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def sh(self, script: str) -> str:
        done = self.run(["/bin/sh", "-euc", script], PATH="/usr/sbin:/usr/bin:/sbin:/bin")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def prolog(
        self, env: Mapping[str, str] = NOTHING, *, job: int = 7, uid: int = ALICE, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run(["/opt/scripts/prolog"], {**_slurm_env(job, uid), **env, **more})

    def epilog(
        self, env: Mapping[str, str] = NOTHING, *, job: int = 7, uid: int = ALICE, **more: str
    ) -> subprocess.CompletedProcess[str]:
        given = {**_slurm_env(job, uid), "SLURM_JOB_EXIT_CODE": "256"}
        return self.run(["/opt/scripts/epilog"], {**given, **env, **more})

    def as_user(self, uid: int, script: str) -> str:
        """What a user's shell says, on both channels; its status does not matter."""
        argv = ["setpriv", f"--reuid={uid}", f"--regid={uid + 100}", "--clear-groups", "/bin/sh", "-c", script]
        done = self.run(argv, PATH="/usr/sbin:/usr/bin:/sbin:/bin")
        return done.stdout + done.stderr

    def installation(self, works: bool) -> None:
        """Whether the real agent could be imported."""
        (_package(self.venv) / "agent" / "daemon.py").write_text("" if works else "import missing_library\n")

    def records(self, job: int = 7) -> list[dict[str, Any]]:
        """What the fake agent wrote down: one entry a message."""
        text = self.sh(f"cat /run/gemini-hpc/{job}/record 2>/dev/null || :")
        return [json.loads(line) for line in text.splitlines()]

    def agents(self) -> list[int]:
        """Pids of the agents, as the node numbers them."""
        return [int(pid) for pid in self.sh("pgrep -f '[g]emini_hpc.agent --job' || :").split()]

    def mode(self, mode: str) -> None:
        """How the next agent behaves."""
        (_package(self.venv) / "agent" / "fake_mode").write_text(mode)

    def site(self, toml: str) -> None:
        self.sh(f"mkdir -p /etc/gemini-hpc; printf '%s\\n' '{toml}' >/etc/gemini-hpc/gemini.toml")

    def exists(self, path: str) -> bool:
        return self.sh(f"if [ -e {path} ] || [ -L {path} ]; then echo yes; fi") != ""


def _slurm_env(job: int, uid: int) -> dict[str, str]:
    """As slurmd sets it (22.05): no PATH. Group and name are lies on purpose: nobody may believe them."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": str(uid),
        "SLURM_JOB_GID": "0",
        "SLURM_JOB_USER": "root",
        "SLURM_JOB_RESTART_COUNT": "0",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NODELIST": "n[1-3]",
        "SLURMD_NODENAME": "n2",
        "SPANK_GEMINI_REPLICAS": "2",
    }


def _package(venv: Path) -> Path:
    (found,) = venv.glob("lib/python*/site-packages/gemini_hpc")
    return found


@pytest.fixture(scope="session")
def fake_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment as a site has it, with the package in it and the fake agent in place of the real one."""
    venv = tmp_path_factory.mktemp("prolog") / "venv"
    base = os.path.realpath(sys.executable)
    as_nobody = ["setpriv", "--reuid=65534", "--clear-groups", base, "-c", ""]
    reachable = subprocess.run(as_nobody, check=False, capture_output=True).returncode == 0
    python = base if reachable else "/usr/bin/python3"
    subprocess.run([python, "-m", "venv", "--without-pip", "--symlinks", venv], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    shutil.copytree(ROOT / "gemini_hpc", site_packages / "gemini_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).with_name("fake_agent.py"), site_packages / "gemini_hpc" / "agent" / "__main__.py")
    (site_packages / "gemini_hpc" / "agent" / "daemon.py").write_text("# can be imported: all is well\n")
    (site_packages / "gemini_hpc" / "controller" / "epilog_fallback.py").write_text(RECORDING_HOLD)
    subprocess.run([venv / "bin" / "python3", "-m", "compileall", "-q", site_packages], check=True)
    subprocess.run(["chmod", "-R", "a+rX", venv], check=True)
    return venv


@pytest.fixture(scope="session")
def tattling_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No Python at all: a script that tells that it was started."""
    venv = tmp_path_factory.mktemp("tattling") / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python3"
    python.write_text("#!/bin/sh\necho started >>/run/python-was-started\n")
    python.chmod(0o755)
    return venv


def _boot(venv: Path) -> Iterator[Node]:
    init = ["/bin/sh", str(NODE_INIT), os.readlink("/proc/self/ns/mnt"), str(venv), str(ROOT / "prolog_epilog")]
    argv = ["unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc", *init]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as outer:
        try:
            assert outer.stdout is not None
            assert outer.stdout.readline() == "ready\n"
            pid = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0]
            node = Node(int(pid), venv)
            yield node
            assert not node.exists("/run/slurm-was-called"), "a Slurm command was called"
            assert not node.exists("/run/pwned"), "a user's text was executed"
        finally:
            outer.kill()


@pytest.fixture
def node(fake_venv: Path) -> Iterator[Node]:
    """A node with the fake agent in mode `ok`."""
    for node in _boot(fake_venv):
        node.mode("ok")
        yield node


@pytest.fixture
def tattling_node(tattling_venv: Path) -> Iterator[Node]:
    """A node that notices when Python is started."""
    yield from _boot(tattling_venv)
