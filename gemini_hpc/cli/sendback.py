"""The job's own last resort, where nobody else requeues it: it asks Slurm, as its owner may."""

from __future__ import annotations

import os
import subprocess

TIMEOUT_S = 15.0


def is_smaller() -> bool:
    """Whether Slurm has taken a lost node out of the running job (`sbatch --no-kill`); False: not known."""
    job, nodes = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_JOB_NUM_NODES", "")
    if not (job.isdecimal() and nodes.isdecimal()):
        return False
    said, problem = _call("squeue", "-h", "-j", job, "-O", "NumNodes:20")
    return not problem and said.strip().isdecimal() and int(said) < int(nodes)


def requeue() -> str:
    """Ask for it; why Slurm refused, or ""."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return _call("scontrol", "requeue", job)[1] if job.isdecimal() else "SLURM_JOB_ID is not set"


def _call(*argv: str) -> tuple[str, str]:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", f"{argv[0]} cannot be run, or does not answer"
    problem = done.stderr.strip().splitlines()[-1:] or [f"{argv[0]}: status {done.returncode}"]
    return done.stdout, problem[0] if done.returncode else ""
