"""The epilog's work on one node: the agent learns that the job has ended here.

    python3 -I -m gemini_hpc.agent.epilog JOB UID RESTART EXIT_CODE

Runs as root, called by `prolog_epilog/epilog`, perhaps more than once for a job. A child that has become the job's
owner for good talks to the agent; root itself only removes the job's directory, once the agent has released the
memory. An agent that keeps its replicas ("detached") keeps its directory.

Exit status: 0, always.
"""

from __future__ import annotations

import sys
import time
from functools import partial

from gemini_hpc.agent import ask, jobdir, privileges
from gemini_hpc.agent.prolog import parse_number
from gemini_hpc.agent.report import complain
from gemini_hpc.config import ConfigError, load

ANSWER_TIMEOUT_S = 3.0
GONE_TIMEOUT_S = 1.0
OWNER_GRACE_S = 0.5

# How the child that is the job's owner tells root how it went.
_RELEASED, _KEPT, _FAILED = 10, 11, 12


def main(argv: list[str]) -> int:
    """Does the epilog's work; returns 0. Never raises."""
    job = 0
    try:
        if len(argv) != 4:
            raise ValueError(f"wanted 4 arguments, found {len(argv)}")
        job = parse_number("job id", argv[0], 1, 2**32 - 1)
        uid = parse_number("uid", argv[1], 0, 2**32 - 2)
        restart = parse_number("restart count", argv[2], 0, 2**32 - 1)
        exit_code = parse_number("exit code", argv[3], 0, 2**32 - 1)
        _end(load().run_dir, job, uid, restart, exit_code)
    except (ValueError, ConfigError, jobdir.JobDirError, privileges.PrivilegeError, OSError) as exc:
        complain("epilog", job, f"the agent was not told: {exc}")
    return 0


def _end(run_dir: str, job: int, uid: int, restart: int, exit_code: int) -> None:
    try:
        run_fd = jobdir.open_run_dir(run_dir, create=False)
        if not jobdir.exists(run_fd, job, uid):
            return
    except FileNotFoundError:
        return
    question = {"op": "epilog", "job": job, "restart": restart, "exit_code": str(exit_code)}

    def as_owner() -> int:
        now = time.monotonic()
        try:
            with ask.connect(f"{run_dir}/{job}", uid, now + ANSWER_TIMEOUT_S) as sock:
                answer = ask.ask(sock, question, now + ANSWER_TIMEOUT_S)
                if answer["op"] != "ok" or answer.get("state") not in ("released", "detached"):
                    raise ask.AskError("the agent's reply to the epilog is none")
                if answer["state"] == "detached":
                    return _KEPT
                # So that the next prolog of this job does not meet a dying agent.
                ask.wait_until_gone(sock, time.monotonic() + GONE_TIMEOUT_S)
                return _RELEASED
        except ask.NobodyAnswersError:
            return _KEPT  # perhaps about to be started again; if not, a later prolog on this node cleans up
        except ask.AskError as exc:
            complain("epilog", job, str(exc))
            return _FAILED

    child = privileges.fork_as(privileges.owner(uid), as_owner, _FAILED, partial(complain, "epilog", job))
    if privileges.outcome(child, ANSWER_TIMEOUT_S + GONE_TIMEOUT_S + OWNER_GRACE_S) == _RELEASED:
        jobdir.remove(run_fd, str(job))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
