"""The supervisor of an agent: when it starts another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


LASTING = SUPERVISOR.replace("lambda settings, args, again, channel: 1", "last").replace(
    "import argparse, sys",
    """import argparse, os, signal, sys, time
if len(sys.argv) > 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def last(settings, args, again, channel):
    print(os.getpid(), flush=True)
    time.sleep(60)
""",
)


@contextmanager
def lasting(directory: Path, *ignoring: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervisor, and the pid of its agent."""
    argv = [sys.executable, "-c", LASTING, str(directory), "3", *ignoring]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def read_errors(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


@pytest.mark.parametrize("agent_first", [False, True])
def test_sigterm_at_the_nodes_shutdown_ends_both(tmp_path: Path, agent_first: bool) -> None:
    """systemd waits 90 s for what a scope has left, and sends SIGTERM to its processes one after the other."""
    with lasting(tmp_path) as (process, agent):
        if agent_first:
            os.kill(agent, signal.SIGTERM)
        process.terminate()
        assert process.wait(10) == 1
        assert not Path("/proc", str(agent)).exists()
        assert "agent of job 1 ended by SIGTERM: no other follows" in read_errors(process)


def test_sigterm_to_the_agent_alone_is_a_death(tmp_path: Path) -> None:
    with lasting(tmp_path) as (process, agent):
        os.kill(agent, signal.SIGTERM)
        assert process.stdout is not None
        assert int(process.stdout.readline()) != agent
        process.terminate()
        assert process.wait(10) == 1
        assert "died (status 15, death 1): starting another" in read_errors(process)


def test_sigterm_that_the_starter_has_had_ignored(tmp_path: Path) -> None:
    """Slurm ends a job with it, and own agents may still have to save to the tier."""
    with lasting(tmp_path, "ignoring") as (process, agent):
        process.terminate()
        os.kill(agent, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.kill(agent, signal.SIGKILL)
        assert process.stdout is not None
        again = int(process.stdout.readline())
        process.kill()
        os.kill(again, signal.SIGKILL)
