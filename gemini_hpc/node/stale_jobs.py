"""The removal of dead agents' leftovers, in the reaper or in the prolog of the next job on the node.

A job that is cancelled while it waits to be requeued gets no epilog anywhere. Without this removal its directory
would stay until the node reboots. (Its memory is freed with the agent's process.)
"""

from __future__ import annotations

import os
import stat

from gemini_hpc import clock
from gemini_hpc.node import ask_agent, job_directory, job_steps, ledger, privileges

AGE_MIN_S = 60.0  # a younger directory's agent may be about to start
REMOVED_MAX = 8
TIMEOUT_S = 1.0  # a prolog waits for the removal
PROBE_TIMEOUT_S = 0.2  # short: users' agents can use up TIMEOUT_S

_SOMEBODY, _NOBODY = 10, 11


def remove(run_fd: int, run_dir: str, except_job: int, age_s: float = AGE_MIN_S) -> list[str]:
    """Remove leftovers of other jobs, a bounded number in bounded time.

    A leftover is a directory older than `age_s`, without an answering agent, of a job that has no step on this
    node. A crashed agent is not a leftover: its supervisor restarts it, and its ranks wait for it.

    Return one sentence for each leftover that could not be removed.
    """
    deadline = clock.monotonic() + TIMEOUT_S
    problems: list[str] = []
    candidates = sorted(name for name in os.listdir(run_fd) if name.isascii() and name.isdecimal())
    running: set[int] | None = None
    starting = _find_starting_jobs(run_dir)
    # Start with a different directory each time: stopped agents use up the time, and their owner might exploit
    # that.
    first = clock.monotonic_ns() // 1000 % max(1, len(candidates))
    removed = 0
    for name in candidates[first:] + candidates[:first]:
        if removed >= REMOVED_MAX or clock.monotonic() > deadline:
            break
        if name == str(except_job) or int(name) in starting:
            continue
        running = job_steps.find_jobs_with_steps() if running is None else running
        if int(name) in running:
            continue
        try:
            if _is_leftover(run_fd, run_dir, name, age_s):
                removed += 1
                job_directory.remove(run_fd, name)
        except job_directory.JobDirError as exc:
            problems.append(f"{run_dir}/{name}: {exc}")
    return problems


def _find_starting_jobs(run_dir: str) -> set[int]:
    """Return the jobs whose prolog has run a moment ago: they have no step yet, and perhaps no agent."""
    try:
        with ledger.open_ledger(run_dir, TIMEOUT_S) as entries:
            now_s = ledger.read_boot_clock_s()
            return {e.job for e in entries if e.ended_s is None and now_s - e.started_s < AGE_MIN_S}
    except OSError:
        return set()


def _is_leftover(run_fd: int, run_dir: str, name: str, age_s: float) -> bool:
    info = job_directory.read_entry_status(run_fd, name)
    if info is None or not stat.S_ISDIR(info.st_mode):
        return False
    if 0 <= clock.time() - info.st_mtime < age_s:  # a time in the future counts as old: the owner may have set it
        return False
    return not _answers(f"{run_dir}/{name}", info.st_uid)


def _answers(directory: str, uid: int) -> bool:
    """Return whether an agent answers in the directory.

    The probe runs as the directory's owner: the owner's files must not lead root anywhere. In doubt, the answer is
    yes. If a file system of the owner's makes the probe hang forever, the answer is no.
    """

    def probe() -> int:
        try:
            ask_agent.connect(directory, uid, clock.monotonic() + PROBE_TIMEOUT_S).close()
        except ask_agent.NobodyAnswersError:
            return _NOBODY
        return _SOMEBODY

    try:
        owner = privileges.find_owner(uid)
    except privileges.PrivilegeError:
        return False  # the user is gone, so no supervisor could restart an agent
    child = privileges.fork_as(owner, probe, _SOMEBODY, lambda _: None)
    return privileges.wait_for_child(child, 2 * PROBE_TIMEOUT_S) not in (_NOBODY, privileges.HANGS)
