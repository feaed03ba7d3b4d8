"""The reaper: root's process that ends an agent's remains on this node after its job is over.

    python3 -I -m gemini_hpc.node.reaper

An agent releases its memory by itself after its retention. An agent that its owner has stopped does not. Nor does a
process that was smuggled into its cgroup. So the reaper kills the cgroup of an ended job as a whole, a grace after
the last moment at which the agent would have released. Epilog and prolog start the one reaper of a node with ended
jobs. The reaper waits, and ends when no entry is left to wait for.

A node that was cut off while its job went on elsewhere gets no epilog. So the time also runs for a silent agent
whose job has no step here. It starts when the reaper first finds the agent silent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

from gemini_hpc import clock
from gemini_hpc.config import ConfigError, Settings, load_site_settings
from gemini_hpc.node import ask_agent, cgroup, job_directory, job_steps, ledger, privileges, spawn, stale_jobs
from gemini_hpc.node.complaint import log_fault
from gemini_hpc.node.meminfo import read_meminfo
from gemini_hpc.node.memory_cgroup import AGENT_ROOM_BYTES, Choice

GRACE_S = 30.0  # added to the last moment at which an agent releases by itself
LOG_S = 10.0  # time for which the log of a released agent stays for its owner
SWEEPS = 6  # sweeps of directories without agents; after these, the next prolog removes the rest
YOUNG_S = 5.0  # added to attach_timeout_s: an agent may still be about to start
LOOK_LEAST_S, LOOK_S = 0.1, 1.0  # shortest and first wait between two checks of the ledger
LOOK_MOST_S = 30.0  # longest wait; shorter if an entry is due earlier
ANSWER_S = 1.0  # time limit for an agent's answer
END_S, POLL_S = 2.0, 0.02  # time limit to end an agent, and the pause between two attempts
AGAIN_S = (2.0, 4.0)  # pauses before a silent agent is asked again
BY_NAME_S = 1.0  # time limit of the child that reads command lines
LOCK = "reaper.lock"
_WATCHED_MAX = 512
_SILENT, _ANSWERS = 11, 10


def ensure_reaper(settings: Settings, where: str, job: int) -> None:
    """Ensure that a reaper runs if jobs have ended here, or seem to. Requires root. Never raise.

    Prolog and epilog of `job` call this.
    """
    try:
        with ledger.open_ledger(settings.run_dir) as entries:
            known = list(entries)
        # The ledger is not locked here: both calls take a while. The reaper's own lock keeps a second one away.
        ended = any(entry.ended_s is not None for entry in known)
        silent = {entry.job for entry in known} - {job}
        if not ended and silent:
            silent -= job_steps.find_jobs_with_steps()
        if (ended or silent) and _is_lock_free(settings.run_dir):
            _start(settings)
    except OSError as exc:
        log_fault(
            where, 0, f"no reaper could be started, so agents of ended jobs may keep memory: {exc.strerror or exc}"
        )


def _is_lock_free(run_dir: str) -> bool:
    lock = ledger.acquire_lock(run_dir, LOCK)
    if lock >= 0:
        os.close(lock)
    return lock >= 0


def prepare_cgroup(settings: Settings) -> Choice:
    """Make the cgroup of all agents, with room for those in the ledger and for the reaper. Requires root.

    Raises:
        OSError: The ledger cannot be opened.
    """
    # under the lock, so that the last prolog to count also sets the limit last
    with ledger.open_ledger(settings.run_dir) as entries:
        return cgroup.prepare(settings, read_meminfo()["MemTotal"], sum(1 for _ in entries) + 1)


def _start(settings: Settings) -> None:
    """Start the reaper outside of slurmd's cgroup, like the agents.

    Prolog and epilog may run in a cgroup that ends with the job.
    """

    def enter_cgroup(pid: int) -> None:
        with suppress(OSError, ValueError, KeyError):
            cgroup.admit(prepare_cgroup(settings), 0, pid, AGENT_ROOM_BYTES)

    with suppress(spawn.LaunchError):
        os.close(spawn.start_daemon([sys.executable, "-I", "-m", "gemini_hpc.node.reaper"], enter_cgroup))


def compute_grace_periods(settings: Settings) -> tuple[float, float]:
    """Return the grace periods after the job's end, in seconds, before an agent is killed.

    The first applies to an agent that does not answer, the second to an agent that answers.
    """
    after_s = settings.tier_flush_s + GRACE_S
    held_s = settings.held_retention_s  # held jobs have not ended for good; only the agent knows about them
    return settings.retention_s + after_s, max(settings.retention_s, held_s) + after_s


def check_entries(settings: Settings) -> float | None:
    """Check every entry once. Return the seconds until the next entry is due; None if there is none to wait for."""
    silent_s, answering_s = compute_grace_periods(settings)
    with ledger.open_ledger(settings.run_dir) as entries:
        known = list(entries)
    running = job_steps.find_jobs_with_steps()
    waits: list[float] = []
    for entry in known:
        if entry.ended_s is None:
            if entry.job not in running and (start_left_s := _compute_start_left_s(settings, entry)) > 0:
                waits.append(start_left_s)
                continue
            since_s = _measure_doubt_s(settings, entry, entry.job in running)
            if since_s is None:
                continue
            over = since_s > silent_s
        elif entry.job in running:  # the job runs here again, and no prolog was called or could record it
            with ledger.open_ledger(settings.run_dir) as entries:
                entries.withdraw_end(entry)
            continue
        else:
            since_s = ledger.read_boot_clock_s() - entry.ended_s
            over = since_s > answering_s or (
                since_s > silent_s and not _answers_within_retries(settings.run_dir, entry)
            )
        gone = not list_agent_pids(entry)
        # An agent that has released by itself leaves its log for its owner, until `sweep_directories`.
        if (over or gone) and end_agent(
            settings.run_dir, entry, f"the job ended {since_s:.0f} s ago", remove=not gone
        ):
            continue
        waits += [due_in_s for due in (silent_s, answering_s) if (due_in_s := due - since_s) > 0] or [LOOK_MOST_S]
    return min(waits, default=None)


def sweep_directories(settings: Settings) -> bool:
    """Remove the leftovers of jobs that are not in the ledger. Return whether any such directory is left."""
    try:
        run_fd = job_directory.open_run_dir(settings.run_dir, create=False)
    except FileNotFoundError:
        return False
    try:
        return _sweep(run_fd, settings)
    finally:
        os.close(run_fd)


def _sweep(run_fd: int, settings: Settings) -> bool:
    if not _has_unknown_directories(run_fd, settings.run_dir):
        return False
    for problem in stale_jobs.remove(run_fd, settings.run_dir, except_job=0, age_s=LOG_S):
        log_fault("reaper", 0, problem)
    return _has_unknown_directories(run_fd, settings.run_dir)


def _has_unknown_directories(run_fd: int, run_dir: str) -> bool:
    """Return whether there are directories of jobs that are not in the ledger."""
    with ledger.open_ledger(run_dir) as entries:
        known = {str(entry.job) for entry in entries}
    return any(name.isascii() and name.isdecimal() and name not in known for name in os.listdir(run_fd))


def _compute_start_left_s(settings: Settings, entry: ledger.LedgerEntry) -> float:
    """Return for how many more seconds an agent may still be about to start."""
    return entry.started_s + settings.attach_timeout_s + YOUNG_S - ledger.read_boot_clock_s()


def _measure_doubt_s(settings: Settings, entry: ledger.LedgerEntry, running: bool) -> float | None:
    """Return for how many seconds a job without an epilog has had no step here and no answering agent.

    None means that the job may be between two steps. The result is recorded in the ledger.
    """
    now_s = ledger.read_boot_clock_s()
    alive = running or (bool(list_agent_pids(entry)) and _answers_within_retries(settings.run_dir, entry))
    since_s = None if alive else now_s if entry.doubted_s is None else entry.doubted_s
    if since_s != entry.doubted_s:
        with ledger.open_ledger(settings.run_dir) as entries:
            entries.record_doubt(entry, since_s)
    return None if since_s is None else now_s - since_s


def end_agent(run_dir: str, entry: ledger.LedgerEntry, why: str, *, remove: bool = True) -> bool:
    """End what an agent has left, unless its job runs here again. Return whether nothing is left.

    The call takes at most `END_S`.

    Args:
        run_dir: The run directory.
        entry: The agent's entry in the ledger.
        why: Reason to log if a process had to be killed.
        remove: Whether to remove the job's directory, too.
    """
    deadline, first = clock.monotonic() + END_S, -1
    now: ledger.LedgerEntry | None = None
    while True:
        with ledger.open_ledger(run_dir) as entries:
            before, now = now, entries.get(entry.job)
            if now is None or now.uid != entry.uid or (now.ended_s is None and now.doubted_s is None):
                return True
            if before is not None and before != now:
                return False  # the job's next prolog and epilog have both run
            pids = list_agent_pids(now)
            first = len(pids) if first < 0 else first
            if not pids and cgroup.remove_empty(now.group):
                entries.strike(now.job)
                break
            kill_pids(now, pids)
        if clock.monotonic() > deadline:
            log_fault(
                "reaper", entry.job, f"could not end the agent: {len(pids)} of its processes hang in the kernel"
            )
            return False
        clock.sleep(POLL_S)
    if first and why:
        log_fault("reaper", entry.job, f"{why}, and {first} processes of its agent did not end: killed them")
    if remove:
        with ledger.open_ledger(run_dir) as entries:
            if entries.get(entry.job) is not None:  # the job's next prolog has run meanwhile
                return True
        try:
            run_fd = job_directory.open_run_dir(run_dir, create=False)
            try:
                job_directory.remove(run_fd, str(entry.job))
            finally:
                os.close(run_fd)
        except FileNotFoundError:
            return True
        except job_directory.JobDirError as exc:
            log_fault("reaper", entry.job, f"{exc}")
    return True


def list_agent_pids(entry: ledger.LedgerEntry) -> list[int]:
    """Return the pids of the processes of a job's agent."""
    return cgroup.list_members(entry.group) if entry.group.version else find_pids_by_name(entry.job, entry.uid)


def _wait_for_end(run_dir: str, timeout_s: float) -> None:
    """Wait until a process of a doubted or ended entry ends, at most `timeout_s`."""
    with ledger.open_ledger(run_dir) as entries:
        waited = [entry for entry in entries if entry.ended_s is not None or entry.doubted_s is not None]
    pids = [pid for entry in waited for pid in list_agent_pids(entry)]
    poll, opened = select.poll(), []
    try:
        for pid in pids[:_WATCHED_MAX]:
            with suppress(OSError):
                opened.append(os.pidfd_open(pid))
                poll.register(opened[-1], select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        for fd in opened:
            os.close(fd)


def kill_pids(entry: ledger.LedgerEntry, pids: list[int]) -> None:
    """Kill those of the processes `pids` that still belong to the job's agent."""
    if entry.group.version:
        cgroup.kill(entry.group, pids)
        return
    opened: dict[int, int] = {}
    try:
        for pid in pids[:_WATCHED_MAX]:
            with suppress(OSError):
                opened[pid] = os.pidfd_open(pid)
        called = (
            find_pids_by_name(entry.job, entry.uid) if opened else []
        )  # the kernel may have given a pid to another process
        for pid in set(opened) & set(called):
            with suppress(OSError):
                signal.pidfd_send_signal(opened[pid], signal.SIGKILL)
    finally:
        for process in opened.values():
            os.close(process)


def find_pids_by_name(job: int, uid: int) -> list[int]:
    """Return the pids of the owner's processes whose command line names this job's agent.

    This serves agents without a cgroup of their own. A child reads the command lines, for at most `BY_NAME_S`. The
    reader of a hostile command line may hang and have to be killed.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            # The child may outlive this process: it must hold no lock and none of slurmd's pipes.
            os.closerange(0, write_end)
            os.closerange(write_end + 1, os.sysconf("SC_OPEN_MAX"))
            _write_pids_by_name(job, uid, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    found = b""
    deadline = clock.monotonic() + BY_NAME_S
    try:
        while select.select([read_end], [], [], max(0.0, deadline - clock.monotonic()))[0]:
            if not (more := os.read(read_end, 4096)):
                break
            found += more
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        _reap_child(pid)
    return [int(line) for line in found.splitlines(keepends=True) if line.endswith(b"\n")]


def _reap_child(pid: int) -> None:
    """Reap a killed child. A child that hangs in the kernel is left to the process that inherits it."""
    until = clock.monotonic() + BY_NAME_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and clock.monotonic() < until:
        clock.sleep(0.005)


def _write_pids_by_name(job: int, uid: int, write_end: int) -> None:
    wanted = b"\0".join((b"gemini_hpc.agent", b"--job", b"%d" % job, b"--uid", b"%d" % uid)) + b"\0"
    for pid in os.listdir("/proc"):
        if not pid.isdecimal():
            continue
        with suppress(OSError):
            if not job_steps.has_real_uid(pid, uid):
                continue
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if wanted in f.read(4096):
                    os.write(write_end, b"%s\n" % pid.encode())


def _answers_within_retries(run_dir: str, entry: ledger.LedgerEntry) -> bool:
    """Return whether the agent answers at one of three attempts.

    The agent may be slow, or its supervisor may be about to restart it.
    """
    for wait_s in (*AGAIN_S, 0.0):
        if _answers(run_dir, entry):
            return True
        clock.sleep(wait_s)
    return False


def _answers(run_dir: str, entry: ledger.LedgerEntry) -> bool:
    """Return whether the agent itself answers. An answer from a process outside the agent does not count."""
    pids = list_agent_pids(entry)

    def probe() -> int:
        deadline = clock.monotonic() + ANSWER_S
        try:
            with ask_agent.connect(f"{run_dir}/{entry.job}", entry.uid, deadline) as sock:
                if ask_agent.read_peer_pid(sock) not in pids:
                    return _SILENT
                ask_agent.ask(sock, {"op": "verdict?"}, deadline)
        except (ask_agent.NobodyAnswersError, ask_agent.ListenerError):
            return _SILENT
        return _ANSWERS

    try:
        child = privileges.fork_as(privileges.find_owner(entry.uid), probe, _SILENT, lambda _: None)
    except privileges.PrivilegeError:
        # The user is gone, or the name service fails. An outage of the name service must not cost kept copies.
        return bool(pids)
    return privileges.wait_for_child(child, 2 * ANSWER_S) == _ANSWERS


def main() -> int:
    """Kill ended agents until there is none left to wait for. Return the exit status."""
    try:
        settings = load_site_settings()
        run_dir = settings.run_dir
        lock = ledger.acquire_lock(run_dir, LOCK)
        if lock < 0:
            return 0
        wait_s, sweeps = LOOK_S, SWEEPS
        while True:
            due_in_s, left = check_entries(settings), sweep_directories(settings)
            if due_in_s is not None:
                _wait_for_end(run_dir, max(LOOK_LEAST_S, min(wait_s, due_in_s)))
                wait_s = min(2 * wait_s, LOOK_MOST_S)
                continue
            if left and sweeps:  # a log is kept for a moment, or a process still holds a part of the directory
                sweeps -= 1
                clock.sleep(LOG_S / 4)
                continue
            with ledger.open_ledger(
                run_dir
            ) as entries:  # under the lock: an epilog that comes now starts the next reaper
                if all(entry.ended_s is None and entry.doubted_s is None for entry in entries):
                    os.close(lock)
                    return 0
    except (ConfigError, job_directory.JobDirError, OSError) as exc:
        log_fault("reaper", 0, f"{exc}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
