"""A training in a container, and one of another release, with a real agent.

Debian 12 has neither enroot nor Apptainer: user and mount namespaces, and the packages' file for enroot's mounts.d,
read as enroot reads it, stand for a container of pyxis. The image is this machine's /usr and Python. Apptainer itself
comes from Debian sid, in a root of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini_hpc.wire import version
from tests.releases import machine, root

from .conftest import JOB

TOP = Path(__file__).parents[2]
CONTAINER = Path(__file__).with_name("container.sh")
APPTAINER = Path(__file__).with_name("apptainer.sh")
FSTAB = TOP / "slurm/packaging/files/gemini-hpc-node.fstab"
TASK_PROLOG = TOP / "slurm/packaging/files/gemini-hpc-node.task_prolog"
NEXT = version.CURRENT + 1

TRAINING = """
import time, gemini_hpc, torch
from gemini_hpc.wire import version
print("speaks", version.OLDEST, version.CURRENT, "from", gemini_hpc.__file__, flush=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ckpt = gemini_hpc.Checkpointer(model, optimizer)
for step in range(ckpt.resume(), 20):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step(); time.sleep(0.05)
    ckpt.step()
print("version", ckpt.version, flush=True)
ckpt.close()
"""
PLACE = {
    "SLURM_JOB_ID": str(JOB), "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
    "GEMINI_REPLICAS": "1", "GEMINI_NODE_RANK": "0", "GEMINI_NODES": "1", "GEMINI_EPOCH": "1", "GEMINI_RESTART": "0",
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


def image(tmp_path: Path, speaks: tuple[int, int]) -> Path:
    """Return a folder with gemini_hpc of a release that speaks these versions."""
    top = tmp_path / "image"
    shutil.copytree(TOP / "gemini_hpc", top / "gemini_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    path = top / "gemini_hpc/wire/version.py"
    text = re.sub(r"(?m)^OLDEST = \d+", f"OLDEST = {speaks[0]}", path.read_text())
    path.write_text(re.sub(r"(?m)^CURRENT = \d+", f"CURRENT = {speaks[1]}", text))
    return top


def trained(argv: list[str | Path], **more: str) -> str:
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "OMP_NUM_THREADS": "1", **PLACE, **more}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def python() -> Path:
    """Return the interpreter, in the directory of its environment."""
    return Path(sys.prefix) / "bin" / "python"


@pytest.mark.slow
def test_a_training_in_a_container_is_protected(make_agent: Callable[..., Any], tmp_path: Path) -> None:
    agent = make_agent()
    package = image(tmp_path, (version.OLDEST, version.CURRENT))
    text = trained(
        ["unshare", "-Umr", CONTAINER, agent.directory, FSTAB, package, python(), TRAINING],
        GEMINI_SOCKET=f"/run/gemini-hpc/{JOB}/agent.sock",
    )
    assert f"from {package}" in text
    assert "not protected" not in text and "protected since step" in text
    none = tmp_path / "none.fstab"
    none.write_text("# A site without the file.\n")
    text = trained(
        ["unshare", "-Umr", CONTAINER, agent.directory, none, package, python(), TRAINING],
        GEMINI_SOCKET=f"/run/gemini-hpc/{JOB}/agent.sock",
    )
    assert "not protected" in text and "protected since step" not in text


@pytest.mark.long
@pytest.mark.timeout(1200)  # the root is made once, in minutes
def test_a_training_in_apptainer_is_protected(make_agent: Callable[..., Any], tmp_path: Path) -> None:
    """The real one. The environment reaches the container by itself, the job's directory by the task prolog."""
    agent = make_agent()
    package = image(tmp_path, (version.OLDEST, version.CURRENT))
    with root.held(root.CACHE, root.Recipe("26.05", machine.mirror(), ("apptainer", "slurmd"))) as sid:
        for hook in (TASK_PROLOG, Path("/bin/true")):
            text = trained(
                ["unshare", "-m", APPTAINER, sid, agent.directory, hook, package, python(), TRAINING],
                GEMINI_SOCKET=f"/run/gemini-hpc/{JOB}/agent.sock",
                APPTAINER_BINDPATH="/usr/share",
            )
            assert "from /package/" in text
            protected = "not protected" not in text and "protected since step" in text
            assert protected == (hook == TASK_PROLOG), text


@pytest.mark.parametrize(
    ("before", "socket", "after"),
    [
        ("", "", "unset APPTAINER_BINDPATH"),
        ("", "/run/gemini-hpc/7/agent.sock", "export APPTAINER_BINDPATH=/run/gemini-hpc/7"),
        (
            "/data:/d a,/x*",
            "/run/gemini-hpc/7/agent.sock",
            "export APPTAINER_BINDPATH=/data:/d a,/x*,/run/gemini-hpc/7",
        ),
        ("/run/gemini-hpc/6", "/run/gemini-hpc/7/agent.sock", "export APPTAINER_BINDPATH=/run/gemini-hpc/7"),
        ("/x,/run/gemini-hpc/6,/y", "", "export APPTAINER_BINDPATH=/x,/y"),
        ("/run/gemini-hpc/6", "", "unset APPTAINER_BINDPATH"),
    ],
)
def test_the_task_prolog_binds_this_jobs_directory_and_no_other(before: str, socket: str, after: str) -> None:
    """Inherited binds of an unprotected job, and of the steps of a protected one."""
    env = {"APPTAINER_BINDPATH": before, "GEMINI_SOCKET": socket}
    done = subprocess.run([TASK_PROLOG], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == after + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "agent", "agreed"),
    [
        ((version.CURRENT, NEXT), (version.CURRENT, version.CURRENT), True),
        ((version.CURRENT, version.CURRENT), (version.CURRENT, NEXT), True),
        ((NEXT, NEXT), (version.CURRENT, version.CURRENT), False),
    ],
)
def test_a_training_of_another_release(
    make_agent: Callable[..., Any], tmp_path: Path, rank: tuple[int, int], agent: tuple[int, int], agreed: bool
) -> None:
    """Releases N and N - 1, in both directions; the build of N has its number raised. Others train unprotected."""
    made = make_agent(speaks=agent)
    package = image(tmp_path, rank)
    text = trained([python(), "-P", "-c", TRAINING], GEMINI_SOCKET=str(made.socket), PYTHONPATH=str(package))
    assert f"speaks {rank[0]} {rank[1]} from {package}" in text
    if agreed:
        assert "not protected" not in text and "protected since step" in text
    else:
        assert "protocol" in text and "install the same gemini-hpc on all hosts" in text
