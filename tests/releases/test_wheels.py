"""The wheels: what they hold, and an installation from a folder of them, as on a host without internet."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.test_layers import ours

TOP = Path(__file__).resolve().parents[2]
WHEELS = TOP / "slurm" / "packaging" / "wheels.sh"
_LIMIT_S = 240.0

# A training of a process alone, as in an image: it says that no agent protects it, and goes on.
TRAINING = """
import torch, gemini_hpc
print(gemini_hpc.__file__)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ckpt = gemini_hpc.Checkpointer(model, optimizer)
for step in range(ckpt.resume(), 2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckpt.step()
ckpt.close()
"""


def said(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def left_out() -> set[str]:
    """Return the rooms that wheels.sh takes out of the client's wheel."""
    rooms = {
        room for found in re.findall(r"gemini_hpc/\{([a-z,]+)\}", WHEELS.read_text()) for room in found.split(",")
    }
    assert {"agent", "controller", "doctor", "logs"} <= rooms
    return rooms


def test_the_client_imports_nothing_that_it_lacks() -> None:
    """Imports inside functions count."""
    lacked = left_out()
    kept = {name: wanted for name, wanted in ours().items() if name.partition(".")[0] not in lacked}
    assert {"train.checkpointer", "mpi.checkpointer", "launch.__main__"} <= set(kept)
    found = {
        name: gone for name, wanted in kept.items() if (gone := {w for w in wanted if w.partition(".")[0] in lacked})
    }
    assert found == {}


@pytest.mark.slow
def test_a_wheel_of_the_checkout_has_the_site_s_files_and_no_packaging(tmp_path: Path) -> None:
    said(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path,
        TOP,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    found = names(wheel)
    site = "gemini_hpc/_site"
    assert {f"{site}/slurm/Makefile", f"{site}/slurm/plugin.c", f"{site}/prolog_epilog/prolog"} <= found
    assert f"{site}/examples/train_gpt.py" in found and "gemini_hpc/py.typed" in found
    assert not [name for name in found if "packaging" in name or name.startswith(("slurm/", "examples/"))]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_hosts_and_images_install_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    said(WHEELS, sys.executable, folder, cwd=tmp_path)
    for name, extra in (("gemini-hpc", "[tier]"), ("gemini-hpc-client", "")):
        venv = tmp_path / name
        said("/usr/bin/python3", "-m", "venv", venv, cwd=tmp_path)
        said(venv / "bin/pip", "install", "-q", "--no-index", "--find-links", folder, name + extra, cwd=tmp_path)
        said(venv / "bin/pip", "check", cwd=tmp_path)
    assert said(tmp_path / "gemini-hpc/bin/gemini-hpc", "--version", cwd=tmp_path).startswith("gemini-hpc ")
    said(tmp_path / "gemini-hpc/bin/python", "-c", "import h5py, gemini_hpc.tier.hdf5", cwd=tmp_path)
    client = tmp_path / "gemini-hpc-client"
    assert not (client / "bin/gemini-hpc").exists()
    said(client / "bin/python", "-m", "gemini_hpc.launch", "--help", cwd=tmp_path)
    (packages,) = client.glob("lib/python3.*/site-packages")
    text = said(
        sys.executable, "-c", TRAINING, cwd=tmp_path, env={"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin"}
    )
    assert text.startswith(str(packages)) and "not protected" in text
