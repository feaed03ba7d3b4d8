"""Checks of protected jobs and of this node's agents.

Slurm does not show which jobs were submitted with the option, so all places that show it are searched.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass

from gemini_hpc import clock
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.doctor.facts import NODE, HostFacts, maps_file, read_environment
from gemini_hpc.doctor.finding import Outcome, Unavailable, join_some, report_ok, report_warning, report_wrong
from gemini_hpc.doctor.plugin import NAME
from gemini_hpc.node import cgroup, ledger, mounts
from gemini_hpc.query import ask
from gemini_hpc.query.slurm_facts import build_slurm_facts
from gemini_hpc.slurm.facts import RUNNING
from gemini_hpc.wire.inspect_schema import JobAnswer

MAX_JOBS = 64
MAX_WITHOUT_CONTROLLER = 8
YOUNG_S = 10.0  # a job's agents start with its prologs and find each other in this time
AGAIN, AGAIN_S = 3, 0.5  # a busy node answers late, not never
DEADLINE_S = 12.0  # shorter than the time of a check, so that its answer is complete


def _list_bare_nodes(answer: JobAnswer, sure: bool) -> tuple[str, ...]:
    """Return the nodes of the job without an agent.

    A job that never asked for protection, or never gets it, has none.
    """
    if "heterogeneous" in answer.slurm.get("note", "") or answer.slurm.get("state") != RUNNING:
        return ()
    return answer.missing if answer.parts or sure else ()


def check_agents(facts: HostFacts) -> Outcome:
    """Compare the nodes that have agents with the nodes of the job."""
    known = find_protected(facts)
    rows = [facts.queue[i] for i in sorted(known.sure) + sorted(known.perhaps, reverse=True)]
    running = [row.raw_id for row in rows if row.state == RUNNING][:MAX_JOBS]
    if not running:
        return report_ok(f"no protected job runs{_describe_view(known)}")
    source, deadline = ask.AnswerSource(facts.settings, again=False), clock.monotonic() + DEADLINE_S

    def ask_job(raw_id: int) -> JobAnswer | None:
        """Return the answer about a job, None if it was refused or no time is left."""
        if clock.monotonic() > deadline or source.without >= MAX_WITHOUT_CONTROLLER:
            return None
        try:
            return source.ask(raw_id)[0]
        except ask.QueryError:
            return None

    protected_jobs, unanswered, problems = 0, 0, []
    with closing(source):
        for raw_id in running:
            answer = ask_job(raw_id)
            if answer is None:
                unanswered += 1
                continue
            sure = raw_id in known.sure
            if _list_bare_nodes(answer, sure):
                job = facts.find_job(raw_id)
                if job is None or clock.time() - job.start_time < YOUNG_S:
                    continue
                for _ in range(AGAIN):  # a busy node may have answered late
                    clock.sleep(AGAIN_S)
                    answer = ask_job(raw_id) or answer
                    if not _list_bare_nodes(answer, sure):
                        break
            bare = _list_bare_nodes(answer, sure)
            protected_jobs += bool(answer.parts) or sure
            if bare:
                none = "no agent at all" if not answer.parts else f"no agent on {join_some(bare, ', ')}"
                problems.append(f"job {raw_id} of {answer.slurm.get('user', '?')[:32]}: {none}")
    if problems:
        return report_wrong(
            f"partly protected or not at all: {join_some(problems)}",
            "an agent on every node of each protected job",
            "run doctor on those nodes; see the system log, tag gemini-hpc, and the job's stderr",
        )
    if unanswered and not protected_jobs:
        raise Unavailable(f"could not ask about {unanswered} running jobs")
    return report_ok(
        f"protected jobs that run: {protected_jobs}, with an agent on each of their nodes{_describe_view(known)}"
    )


def _describe_view(known: Protected) -> str:
    return "" if known.complete else " (as far as can be seen from here)"


def check_requeue(facts: HostFacts) -> Outcome:
    """Check for jobs that Slurm and the controller can never requeue."""
    known = find_protected(facts)
    if not known.sure and not known.complete:
        raise Unavailable("only root and SlurmUser can see which jobs are protected, on the controller host")
    notes = []
    for raw_id in sorted(known.sure)[:MAX_JOBS]:
        job = facts.find_job(raw_id)
        note = build_slurm_facts(job).get("note") if job else None
        if job and note and not job.has_ended:
            notes.append(f"job {raw_id} of {job.user[:32]}: {note}")
    if notes:
        fix = (
            "tell their owners: sbatch --requeue --open-mode=append; while pending: scontrol update JobId=J Requeue=1"
        )
        return report_warning(join_some(notes), "protected jobs that can be requeued", fix)
    return report_ok(f"protected jobs: {len(known.sure)}, all can be requeued{_describe_view(known)}")


def check_tasks(facts: HostFacts) -> Outcome:
    """Check for tasks of protected jobs whose slurmstepd did not load the plugin.

    A task's environment proves nothing: srun passes on the values that the batch script's node has set.
    """
    facts.require_root("what slurmstepd has loaded")
    steps = {p.pid: p for p in facts.processes if p.name == "slurmstepd"}
    bare, seen = [], 0
    for process in facts.processes:
        if process.parent not in steps or process.name == "slurmstepd":
            continue
        values = read_environment(process.pid)
        job = parse_number(values.get(b"SLURM_JOB_ID", b"").decode(errors="replace"))
        if b"SLURM_GEMINI_REPLICAS" not in values or not job:
            continue
        seen += 1
        if not maps_file(process.parent, NAME):
            bare.append(f"pid {process.pid} of job {job}")
    if bare:
        return report_wrong(
            f"{len(bare)} tasks run here without the plugin: {join_some(bare)}",
            f"{NAME} loaded by the slurmstepd of every protected job",
            "see plugin.line and plugin.release on this node, and slurmd's log; then start the job's step again",
        )
    return report_ok(f"tasks of protected jobs here: {seen}, all started with the plugin")


_VARIABLE = b"SLURM_GEMINI_REPLICAS="
MAX_ASKED = 2000
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Protected:
    """The raw ids of unfinished jobs that are protected, or may be.

    `sure` are known to be protected. `perhaps` are jobs that may be asked about.
    """

    sure: frozenset[int]
    perhaps: frozenset[int]
    complete: bool


def _list_job_ids(directory: str, suffix: str = "") -> set[int]:
    return {parse_number(n.removesuffix(suffix)) for n in os.listdir(directory) if n.endswith(suffix)} - {0}


def _asks(save: str, raw_id: int) -> bool:
    """Return whether the environment that Slurm stores for a batch job has the plugin's variable."""
    try:
        with open(f"{save}/hash.{raw_id % 10}/job.{raw_id}/environment", "rb") as f:
            entries = f.read(_MAX_BYTES).split(b"\0")
    except OSError:
        return False
    # The first entry has a length in front.
    return any(e.startswith(_VARIABLE) for e in entries) or _VARIABLE in entries[0]


def find_protected(facts: HostFacts) -> Protected:
    """Return the protected jobs.

    Sources are the controller's records, slurmctld's (root and SlurmUser), this node's agents, and one's own
    jobs. Raises `Unavailable` if Slurm does not answer.
    """
    live = set(facts.queue)
    sure: set[int] = set()
    complete = False
    with suppress(OSError):
        sure |= _list_job_ids(os.path.join(facts.settings.state_dir, "jobs"), ".job")
    save = facts.conf["StateSaveLocation"]
    if facts.uid in (0, facts.slurm_uid) and os.access(save, os.R_OK | os.X_OK):
        sure |= {raw_id for raw_id in sorted(live, reverse=True)[:MAX_ASKED] if _asks(save, raw_id)}
        complete = True
    if NODE in facts.roles:
        with suppress(OSError):
            sure |= _list_job_ids(facts.settings.run_dir)
        sure |= {p.agent_of for p in facts.processes if p.agent_of is not None}
    privileged = facts.root or facts.uid == facts.slurm_uid
    perhaps = live if privileged else {i for i, row in facts.queue.items() if row.user_id == facts.uid}
    sure &= live if privileged else perhaps
    return Protected(frozenset(sure), frozenset(perhaps - sure if not complete else ()), complete)


_OURS = (b"gemini_hpc.agent", b"gemini_hpc.tier.worker", b"gemini_hpc.node.reaper")
_FULL = 0.9


def check_strangers(facts: HostFacts) -> Outcome:
    """Check that the agents' cgroups, which lie outside of Slurm's, hold only processes that root started there."""
    facts.require_root("which processes are in the agents' cgroups")
    run_dir = facts.settings.run_dir
    if not os.path.isdir(ledger.locate_directory(run_dir)):
        return report_ok(f"{ledger.locate_directory(run_dir)} does not exist yet")
    try:
        with ledger.open_ledger(run_dir) as entries:
            known = list(entries)
    except OSError as exc:
        raise Unavailable(f"{ledger.locate_directory(run_dir)}: {exc.strerror or exc}") from None
    processes, strangers = {p.pid: p for p in facts.processes}, []
    for entry in known:
        for pid in cgroup.list_members(entry.group):
            process = processes.get(pid)
            if process is not None and not any(word in process.arguments for word in _OURS):
                strangers.append(
                    f"pid {pid} ({process.name[:32]!r}, uid {process.uid}) in {entry.group.directories[0]}"
                )
    if strangers:
        return report_wrong(
            f"foreign processes in the agents' cgroups, outside Slurm's limits: {join_some(strangers)}",
            "agents and their workers only",
            "look at the process and at its owner; the reaper kills it with the agent when the job is over",
        )
    return report_ok(f"{len(known)} jobs have agents here, with nobody else in their cgroups")


def check_room(facts: HostFacts) -> Outcome:
    """Check that the directories are not full of bytes or files, which would leave jobs without protection."""
    run_dir = facts.settings.run_dir
    shortages, seen = [], 0
    try:
        names = [name for name in os.listdir(run_dir) if name.isascii() and name.isdecimal()]
        for path in (run_dir, *(f"{run_dir}/{name}" for name in names)):
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mount = mounts.find_mount(fd)
                if mount is None or (path != run_dir and not mount.ours):
                    continue  # a plain directory, or a user's own file system, which may not answer
                seen += 1
                found = os.fstatvfs(fd)
                shortages += [
                    f"{path} has {left:,} of {total:,} {what} left"
                    for what, left, total in (
                        ("files", found.f_favail, found.f_files),
                        ("blocks", found.f_bavail, found.f_blocks),
                    )
                    if total and left < (1 - _FULL) * total
                ]
            finally:
                os.close(fd)
    except FileNotFoundError:
        return report_ok(f"{run_dir} does not exist yet, or has just changed")
    except OSError as exc:
        raise Unavailable(f"{run_dir}: {exc.strerror}") from None
    if shortages:
        fix = "a job's own directory: its owner fills it, only that job suffers; run directory: see what lies in it"
        return report_warning(join_some(shortages), "room for sockets, maps and logs", fix)
    return report_ok(f"{seen} file systems of gemini-hpc at {run_dir}, none of them nearly full")
