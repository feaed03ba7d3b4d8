"""The supervisor of an agent: when it starts another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPERVISOR = """
import argparse, sys
from gemini_hpc.agent import __main__ as supervisor
from gemini_hpc.config import Settings
from gemini_hpc.node import oom
supervisor._run_agent = lambda settings, args, again, channel: 1
args = argparse.Namespace(job=1, uid=0, node="n1", dir=sys.argv[1])
sys.exit(supervisor._supervise(Settings(agent_restarts=int(sys.argv[2])), args, oom.OwnScore()))
"""


def supervise(directory: Path, restarts: int) -> tuple[int, int]:
    """Its exit status, and how many agents have died."""
    argv = [sys.executable, "-c", SUPERVISOR, str(directory), str(restarts)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stderr.count("agent of job 1 died")


def test_an_agent_that_dies_is_started_again_so_many_times(tmp_path: Path) -> None:
    assert supervise(tmp_path, 3) == (1, 4)


def test_not_where_the_jobs_directory_is_gone(tmp_path: Path) -> None:
    """Root has removed it: the job is over, and another agent could not be reached."""
    assert supervise(tmp_path / "gone", 1000) == (1, 1)
