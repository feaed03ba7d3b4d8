"""The program that makes a job's directory again after somebody has unmounted or removed it.

    python3 -I -m gemini_hpc.node.again JOB UID

The job's living agent moves into the new directory by itself. The epilog calls `make_directory`. The SPANK plugin in
slurmstepd runs the program before a step begins, because no prolog runs between two steps of a job. The program
runs as root and touches nothing inside the directory.

Exit status: 0 if the directory was made, 1 if not.
"""

from __future__ import annotations

import os
import sys

from gemini_hpc.config import ConfigError, load_site_settings
from gemini_hpc.node import job_directory, ledger, privileges, reaper
from gemini_hpc.node.complaint import log_fault
from gemini_hpc.node.prolog import parse_number

LEDGER_S = 1.0  # a step, or the epilog, waits for this


def make_directory(run_dir: str, job: int, uid: int) -> bool:
    """Make the directory of a job whose agent is alive on this node and has not released its memory.

    Return whether the directory exists now.

    Raises:
        OSError, JobDirError, PrivilegeError: The directory could not be made.
    """
    with ledger.open_ledger(run_dir, LEDGER_S) as entries:
        entry = entries.get(job)
    if entry is None or entry.uid != uid or entry.released or not reaper.list_agent_pids(entry):
        return False
    group = privileges.find_owner(uid).pw_gid
    run_fd = job_directory.open_run_dir(run_dir, create=True)
    try:
        with ledger.open_ledger(
            run_dir, LEDGER_S
        ):  # of several steps that begin at once, only one makes the directory
            job_directory.make(run_fd, job, uid, group)
    finally:
        os.close(run_fd)
    return True


def main(argv: list[str]) -> int:
    """Make the directory and return the exit status. Never raise."""
    job = 0
    try:
        if len(argv) != 2:
            raise ValueError(f"wanted 2 arguments, found {len(argv)}")
        job = parse_number("job id", argv[0], 1, 2**32 - 1)
        if not make_directory(load_site_settings().run_dir, job, parse_number("uid", argv[1], 0, 2**32 - 2)):
            return 1
    except (ValueError, ConfigError, job_directory.JobDirError, privileges.PrivilegeError, OSError) as exc:
        log_fault(
            "step",
            job,
            f"the directory of its agent is gone, so ranks here are not protected; it could not be made again: {exc}",
        )
        return 1
    log_fault("step", job, "the directory of its agent was gone, unmounted or removed: made another one")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
