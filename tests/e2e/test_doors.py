"""Other ways to start a training, under a real Slurm: torchrun below srun, Hugging Face's Trainer, Lightning.

In each a rank is killed, then a node's power is cut; the bits are those of an undisturbed run. MPI: test_heat.py.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from train.launch import Run as Ranks
from training import SMALL, Run, Training

from gemini_hpc.devcluster.cluster import Cluster
from gemini_hpc.devcluster.layout import INSIDE

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"
BIN = INSIDE / "venv" / "bin"
KILLED_AT, CUT_AT, STEPS = 10, 20, 30
SCRIPT = """#!/bin/bash
#SBATCH --ntasks-per-node=1 --requeue --open-mode=append
export OMP_NUM_THREADS=1  # as the undisturbed runs; accelerate takes all cores for a rank that is alone on its node
exec gemini-hpc run -- srun --kill-on-bad-exit=1 COMMAND
"""
# "--": torchrun takes a word of the script that begins like one of its own options, as --log, for that.
TORCHRUN = f"""bash -c 'exec {BIN}/torchrun --nnodes=$GEMINI_NODES --nproc-per-node=1 --node-rank=$GEMINI_NODE_RANK \\
    --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT -- train_gpt.py ARGUMENTS'"""


def submit(cluster: Cluster, label: str, nodes: int, command: str, *files: Path) -> Training:
    """Submit a protected job of alice's in a directory with these files."""
    directory = cluster.locate_home("alice") / f"{label}-{time.time_ns()}"
    directory.mkdir(0o755)
    for file in files:
        shutil.copy(file, directory)
    (directory / "job.sh").write_text(SCRIPT.replace("COMMAND", command))
    for path in [directory, *directory.iterdir()]:
        path.chmod(0o755)
    shutil.chown(directory, 5001)
    how = [f"-N{nodes}", f"--chdir={directory}", f"--output={directory}/out", "--gemini-replicas=2"]
    return Training(cluster, cluster.submit_job([*how, str(directory / "job.sh")]), directory)


def kill(job: Training, what: str) -> None:
    """Kill the rank of the job's second node."""
    assert job.cluster.exec(job.hosts()[1], ["pkill", "-KILL", "-f", what]).returncode == 0


def test_torchrun_below_srun(cluster: Cluster, reference: Callable[..., Run]) -> None:
    """One torchrun a node, which has its place from the agents; its workers' ranks are its own."""
    wanted = reference()
    arguments = " ".join([*SMALL, "--iteration-s=0.15", "--log=loss.jsonl"])
    job = submit(cluster, "torchrun", 3, TORCHRUN.replace("ARGUMENTS", arguments), EXAMPLES / "train_gpt.py")
    job.reach(KILLED_AT)
    kill(job, "[-]u train_gpt[.]py")
    job.wait("the next step", lambda: "resumed at version" in job.output(), 90)
    job.reach(CUT_AT)
    cluster.cut_power(job.hosts()[1])
    job.finish()
    job.assert_same_as(wanted)
    assert job.repeated() <= 2 and job.output().count("resumed at version") == 2, job.output()
    assert cluster.read_job(job.id)["Restarts"] == "1" and "not protected" not in job.output(), job.output()


@pytest.mark.parametrize("stack", ["huggingface", "lightning"])
def test_another_stack(cluster: Cluster, tmp_path: Path, stack: str) -> None:
    """Losses, weights, optimizer, the stack's own history and a callback's state."""
    options = {"stack": stack, "steps": STEPS}
    wanted = Ranks(None, 2, {**options, "directory": str(tmp_path)}).wait()
    given = json.dumps({**options, "directory": "run", "log": "log", "sleep_s": 0.15}, separators=(",", ":"))
    command = f"{BIN}/python door.py '{given}'"
    job = submit(cluster, stack, 2, command, Path(__file__).with_name("door.py"), TESTS / "integrations/stacks.py")

    def rows(rank: int) -> list[tuple[int, str]]:
        path = job.directory / f"log.{rank}"
        text = path.read_text() if path.exists() else ""
        words = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(int(step), loss) for _, step, loss in words]

    def reach(step: int) -> None:
        job.wait(f"step {step}", lambda: any(found >= step for found, _ in rows(0)), 120)

    reach(KILLED_AT)
    kill(job, "door[.]py")
    job.wait("the next step", lambda: "resumed at version" in job.output(), 120)
    reach(CUT_AT)
    cluster.cut_power(job.hosts()[1])
    job.finish(200)
    assert job.output().count("resumed at version") == 2 and cluster.read_job(job.id)["Restarts"] == "1", job.output()
    assert not any(word in job.output() for word in ("not passed", "not captured", "not protected")), job.output()
    for rank, before in enumerate(wanted):
        after = json.loads((job.directory / f"told.{rank}").read_text().splitlines()[-1])
        found = rows(rank)
        assert {step for step, _ in found} == set(range(1, STEPS + 1)) and len(found) - STEPS <= 2, found
        assert [row for row in found if before["losses"][str(row[0])] != row[1]] == []
        for key in before.keys() - {"start", "losses", "report"}:
            assert after[key] == before[key], key
        assert after["report"]["state"] == "protected", after["report"]
