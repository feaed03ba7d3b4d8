"""The README's promise that a script runs unprotected, and says so in one line: the README's own script, by srun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

PYTHON = "/opt/gemini-hpc/venv/bin/python"
README = Path(__file__).resolve().parents[2] / "README.md"
CALL, STEPS = "gemini.set_ranks()", "500)"
ENDS = """
print(f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} has ended", flush=True)
del model, optimizer, ckpt  # before the process group, or torch may wait for gloo's threads for ever
torch.distributed.destroy_process_group()
"""


def write(cluster: Cluster, name: str, *, call: bool) -> Path:
    """Write the README's script, with fewer steps; call: with its `set_ranks`."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (line,) = [line for line in block.splitlines(keepends=True) if line.startswith(CALL)]
    path = cluster.locate_home("alice") / name
    assert block.count(STEPS) == 1, block
    path.write_text(block.replace(line, line if call else "").replace(STEPS, "4)") + ENDS)
    path.chmod(0o644)
    return path


def output(cluster: Cluster, name: str, options: list[str], script: str, *, hold: bool = False) -> str:
    """Submit a job of two nodes, and return what it has printed in the end."""
    out = cluster.locate_home("alice") / name
    out.unlink(missing_ok=True)
    fixed = ["-N2", "-wn1,n2", "--ntasks-per-node=1", f"--output={out}", *options]
    job = cluster.submit_job([*fixed, *(["--hold"] if hold else [])], script=f"#!/bin/bash\n{script}\necho over\n")
    if hold:
        take_plugin_away(cluster)
        cluster.run(["scontrol", "release", str(job)])
    until(lambda: out.exists() and "over" in out.read_text(), 60, 0.2, what="the script's end")
    return out.read_text()


def take_plugin_away(cluster: Cluster) -> None:
    """Leave plugstack.conf empty."""
    (cluster.directory / "etc" / "slurm" / "plugstack.conf").write_text("\n")


def ends_well(text: str, why: str) -> None:
    """Assert that all ranks have ended, and that one line says why they were not protected."""
    for rank in range(2):
        assert text.count(f"rank {rank} of 2 has ended") == 1, text
    assert re.findall(r"gemini-hpc: this training is not protected: (.*)", text) == [f"no agent here ({why})"], text


@pytest.fixture
def plugstack(cluster: Cluster) -> Iterator[None]:
    """The plugin is back after the test."""
    path = cluster.directory / "etc" / "slurm" / "plugstack.conf"
    before = path.read_text()
    yield
    path.write_text(before)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [],
            marks=pytest.mark.witness("without an agent the README's script runs, and says so in one line"),
            id="no option",
        ),
        pytest.param(["--gemini-replicas=2"], id="the plugin is taken away"),
    ],
)
def test_the_readmes_script_runs_unprotected(cluster: Cluster, plugstack: None, options: list[str]) -> None:
    path = write(cluster, "readme.py", call=True)
    text = output(cluster, "unprotected", options, f"srun {PYTHON} {path}", hold=bool(options))
    ends_well(text, "GEMINI_SOCKET is not set: see --gemini-replicas")
    assert text.count("gemini-hpc:") == 1, text


@pytest.fixture
def ill(cluster: Cluster) -> Iterator[str]:
    """A node whose prolog fails; the others do not wait for it as long as on this cluster otherwise."""
    settings = cluster.directory / "etc" / "gemini-hpc" / "gemini.toml"
    before = settings.read_text()
    settings.write_text(re.sub("(?m)^attach_timeout_s = .*", "attach_timeout_s = 5.0", before))
    cluster.exec("n2", ["mount", "-t", "tmpfs", "-o", "ro", "none", "/run/gemini-hpc"])
    yield "n2"
    cluster.exec("n2", ["umount", "/run/gemini-hpc"])
    settings.write_text(before)


def test_one_node_is_ill(cluster: Cluster, ill: str) -> None:
    """Two steps, the second of a script without the call: the plugin has exported ranks. The lines name that node."""
    steps = [f"srun {PYTHON} {write(cluster, f'call-{call}.py', call=call)}" for call in (True, False)]
    text = output(cluster, "ill", ["--gemini-replicas=2"], "\necho next\n".join(steps))
    for part in text.split("next\n"):
        ends_well(part, f"no agent answers on {ill}")
    assert text.count(f"gemini-hpc: this job is not protected: no agent answers on {ill}") == 1, text
    assert f"gemini-hpc: this job is not protected on {ill}: /run/gemini-hpc must belong to root" in text
    assert "not protected on n1" not in text
