"""`gemini-hpc run` outside of Slurm: what it hands to its command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "echo ${SLURM_NTASKS-none} ${SLURM_NPROCS-none}"


def run(*command: str, **slurm: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GEMINI_"))} | slurm
    argv = [sys.executable, "-m", "gemini_hpc.cli.main", "run", "--", *command]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("tasks", "nodes", "most", "wanted"),
    [
        ("3", "2", "1", "2 2"),  # one node less
        ("16", "3", "4", "12 12"),
        ("5", "3", "2", "5 none"),  # there is room: as the user has it
        ("3", "4", "1", "3 none"),
        ("3", "2", "", "3 none"),
        ("3", "two", "1", "3 none"),
        ("3", "2", "9" * 30, "3 none"),
        ("3", "0", "1", "3 none"),
    ],
)
def test_a_job_with_fewer_nodes_than_it_was_submitted_with_has_fewer_tasks(
    tasks: str, nodes: str, most: str, wanted: str
) -> None:
    done = run("sh", "-c", SHOW, SLURM_NTASKS=tasks, SLURM_JOB_NUM_NODES=nodes, SLURM_NTASKS_PER_NODE=most)
    assert (done.returncode, done.stdout.strip()) == (0, wanted)
    assert ("nodes now" in done.stderr) == (wanted.split()[1] != "none")


def test_outside_of_slurm_nothing_is_set() -> None:
    assert run("sh", "-c", SHOW).stdout.strip() == "none none"


def test_its_exit_status_is_the_commands() -> None:
    assert run("sh", "-c", "exit 7").returncode == 7
    assert run("kill-me-not-there").returncode == 127
    assert run().returncode == 2
