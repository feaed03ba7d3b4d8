"""Requirement cut-off-nodes: what the agent signals is the process that has called, and no other that has got its
number since."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("number_used_again.py")


@pytest.mark.slow
def test_number_that_is_used_again() -> None:
    # the numbers of processes are chosen in a process namespace of its own
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, str(_SCRIPT)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same", "number", "lives", "caller", "ended"]
