"""The epilog's work on one node: report to the agent that the job has ended here.

    python3 -I -m gemini_hpc.node.epilog JOB UID RESTART EXIT_CODE NODE NODELIST

`prolog_epilog/epilog` calls it as root, perhaps more than once for a job. A child that has become the job's owner
for good talks to the agent. Root itself only removes the job's directory, after the agent has released the memory.
An agent that keeps its replicas ("detached") keeps its directory.

Exit status: 0, always.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial

from gemini_hpc import clock
from gemini_hpc.config import ConfigError, Settings, load_site_settings
from gemini_hpc.node import again, ask_agent, health_report, job_directory, ledger, privileges, reaper
from gemini_hpc.node.complaint import log_fault
from gemini_hpc.node.prolog import MOVES_S, WAIT_POLL_S, parse_number

ANSWER_TIMEOUT_S = 3.0  # for the agent's answer, within TOTAL_S
LEDGER_S = 1.0  # for the ledger's lock, within TOTAL_S
GONE_TIMEOUT_S = 1.0  # for a released agent to end
OWNER_GRACE_S = 0.2  # for the owner's child to end after its own time limit
TOTAL_S = 4.4  # of the 5 s that an epilog may take (requirement users-errors), from Python's start to its end

# Exit statuses by which the child that is the job's owner reports its outcome to root.
_RELEASED, _KEPT, _FAILED = 10, 11, 12
# The incarnation to hold is slurmd's or the one before, because slurmd may already report the next one. Root takes
# only this choice from the agent: the agent belongs to its owner and could send anything.
_HOLD_THIS, _HOLD_FORMER = 64, 65
_CHECK = 128  # added to a status if the agent doubts this node's health


def main(argv: list[str]) -> int:
    """Do the epilog's work and return 0. Never raise."""
    deadline = clock.monotonic() + TOTAL_S - _read_age_s()
    job = 0
    try:
        if len(argv) != 6:
            raise ValueError(f"wanted 6 arguments, found {len(argv)}")
        job = parse_number("job id", argv[0], 1, 2**32 - 1)
        uid = parse_number("uid", argv[1], 0, 2**32 - 2)
        restart = parse_number("restart count", argv[2], 0, 2**32 - 1)
        exit_code = parse_number("exit code", argv[3], 0, 2**32 - 1)
        _end_incarnation(load_site_settings(), job, uid, restart, exit_code, tuple(argv[4:]), deadline)
    except (ValueError, ConfigError, job_directory.JobDirError, privileges.PrivilegeError, OSError) as exc:
        log_fault(
            "epilog", job, f"the agent does not know that the job has ended, and keeps its memory for now: {exc}"
        )
    except Exception as exc:  # an epilog that fails drains its node: never for a fault of ours
        log_fault(
            "epilog",
            job,
            f"internal error of gemini-hpc ({type(exc).__name__}: {exc}): the agent keeps its memory for now",
        )
    return 0


def _read_age_s() -> float:
    """Return the age of this process in seconds. The script's time already runs while Python starts."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, min(TOTAL_S, ledger.read_boot_clock_s() - ticks / os.sysconf("SC_CLK_TCK")))


def _end_incarnation(
    settings: Settings, job: int, uid: int, restart: int, exit_code: int, place: tuple[str, ...], deadline: float
) -> None:
    run_dir = settings.run_dir
    try:
        run_fd = job_directory.open_run_dir(run_dir, create=False)
    except FileNotFoundError:
        return
    # Enter the end first: from here on the agent's time is limited, whatever fails later.
    _record_end(run_fd, run_dir, job, uid, restart)
    try:
        has_directory, patience_s = job_directory.has_directory(run_fd, job, uid), 0.0
        if not has_directory and (has_directory := again.make_directory(run_dir, job, uid)):
            patience_s = MOVES_S
        outcome = (
            _report_end(run_dir, job, uid, restart, exit_code, deadline, patience_s) if has_directory else _FAILED
        )
        if outcome > _CHECK:
            outcome -= _CHECK
            health_report.start(settings, job, restart, place[0])
        if outcome == _RELEASED:
            _finish_release(run_fd, run_dir, job)
    finally:
        reaper.ensure_reaper(settings, "epilog", job)
    if outcome in (_HOLD_THIS, _HOLD_FORMER):
        _hold_survivors(job, restart - (outcome == _HOLD_FORMER), place, deadline)


def _report_end(
    run_dir: str, job: int, uid: int, restart: int, exit_code: int, deadline: float, patience_s: float
) -> int:
    """Report the end to the agent. Return its answer as a status.

    Args:
        run_dir: The run directory.
        job: The job's id.
        uid: The uid of the job's owner.
        restart: The restart count of the incarnation that slurmd reports.
        exit_code: The job's exit code.
        deadline: Latest time for the epilog, on the clock of `clock.monotonic`.
        patience_s: Seconds during which an absent agent is tolerated; it may be moving into its new directory.
    """
    answer_by = min(clock.monotonic() + ANSWER_TIMEOUT_S, deadline - GONE_TIMEOUT_S - OWNER_GRACE_S)
    question = {"op": "epilog", "job": job, "restart": restart, "exit_code": str(exit_code)}

    def report_as_owner() -> int:
        try:
            with _connect_to_agent(f"{run_dir}/{job}", uid, answer_by, patience_s) as sock:
                answer = ask_agent.ask(sock, question, answer_by)
                if answer["op"] != "ok" or answer.get("state") not in ("released", "detached", "hold"):
                    raise ask_agent.ListenerError("the agent's reply to the epilog is not valid")
                check = _CHECK if answer.get("check") is True else 0
                if answer["state"] == "hold":
                    return check + _choose_hold_status(restart, answer.get("restart"))
                if answer["state"] == "detached":
                    return check + _KEPT
                # Otherwise the next prolog of this job could meet a dying agent.
                ask_agent.wait_until_gone(sock, clock.monotonic() + GONE_TIMEOUT_S)
                return check + _RELEASED
        except ask_agent.NobodyAnswersError:
            return _KEPT  # its supervisor may start it again; if not, a later prolog on this node cleans up
        except ask_agent.ListenerError as exc:
            log_fault("epilog", job, str(exc))
            return _FAILED

    child = privileges.fork_as(
        privileges.find_owner(uid), report_as_owner, _FAILED, partial(log_fault, "epilog", job)
    )
    return privileges.wait_for_child(child, answer_by + GONE_TIMEOUT_S + OWNER_GRACE_S - clock.monotonic())


def _connect_to_agent(directory: str, uid: int, answer_by: float, patience_s: float) -> socket.socket:
    until = clock.monotonic() + patience_s
    while True:
        try:
            return ask_agent.connect(directory, uid, answer_by)
        except ask_agent.NobodyAnswersError:
            if clock.monotonic() >= until:
                raise
            clock.sleep(WAIT_POLL_S)


def _record_end(run_fd: int, run_dir: str, job: int, uid: int, restart: int) -> None:
    try:
        # `read_entry_status` never enters a file system that a user has mounted there
        has_directory = job_directory.read_entry_status(run_fd, str(job)) is not None
    except job_directory.JobDirError:
        has_directory = True
    try:
        with ledger.open_ledger(run_dir, LEDGER_S) as entries:
            if has_directory or entries.get(job) is not None:
                entries.record_end(job, uid, restart)
    except OSError as exc:
        log_fault(
            "epilog",
            job,
            f"could not record the job's end, so nothing ends an agent that hangs: {exc.strerror or exc}",
        )


def _finish_release(run_fd: int, run_dir: str, job: int) -> None:
    """Record that the agent has released its memory, and remove the job's directory.

    If no process of the agent is left, its cgroup and ledger entry are removed, too. The agent lives a moment
    longer while it completes a version on the tier. Then the reaper waits for it, and no prolog treats it as a
    leftover.
    """
    with ledger.open_ledger(run_dir, LEDGER_S) as entries:
        entry = entries.get(job)
        if entry is not None:
            entries.record_release(entry)
    if entry is not None and not reaper.list_agent_pids(entry):
        reaper.end_agent(run_dir, entry, "")
    else:
        job_directory.remove(run_fd, str(job))


def _choose_hold_status(restart: int, answer: object) -> int:
    if answer == restart:
        return _HOLD_THIS
    return _HOLD_FORMER if restart > 0 and answer == restart - 1 else _KEPT


def _hold_survivors(job: int, restart: int, place: tuple[str, ...], deadline: float) -> None:
    """Hold the job's survivors: a peer died, no controller answers, and this node is the first alive.

    This is the only Slurm action of prolog and epilog. The agent's answer is a hint that
    `controller.epilog_fallback` checks with Slurm. A hold that is not done in time goes on in a session of its own,
    without slurmd's pipes. Only the waiting for it ends.
    """
    argv = [sys.executable, "-I", "-m", "gemini_hpc.controller.epilog_fallback"]
    argv += ["--job", str(job), "--restart", str(restart), "--node", place[0], "--nodes", place[1]]
    try:
        null = subprocess.DEVNULL
        hold = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)
        hold.wait(max(0.2, deadline - clock.monotonic()))  # `subprocess.run` would kill it at the timeout
    except subprocess.TimeoutExpired:
        log_fault("epilog", job, "Slurm is slow: the job's other nodes are not reserved yet; still trying")
    except OSError as exc:
        log_fault("epilog", job, f"could not reserve the job's other nodes, so other jobs may take them: {exc}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
