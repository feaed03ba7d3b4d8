"""Checks of protected jobs, running or waiting: is each of their nodes protected, and can they be requeued?"""

from __future__ import annotations

from gemini_hpc import clock
from gemini_hpc.doctor.check import ANYWHERE, ON_NODE, Check
from gemini_hpc.doctor.facts import HostFacts
from gemini_hpc.doctor.finding import Outcome, Unavailable, ok, some, warning, wrong
from gemini_hpc.doctor.plugin import NAME
from gemini_hpc.doctor.processes import environment, maps
from gemini_hpc.doctor.protected import Protected, protected
from gemini_hpc.query import ask
from gemini_hpc.query.slurm_facts import slurm_facts
from gemini_hpc.slurm.facts import RUNNING
from gemini_hpc.wire.inspect_schema import JobAnswer

MAX_JOBS = 64
MAX_WITHOUT_CONTROLLER = 8
YOUNG_S = 10.0
AGAIN, AGAIN_S = 3, 0.5
DEADLINE_S = 12.0


class _Asking:
    """A source of answers about jobs: the controller, or the agents if no controller answers."""

    def __init__(self, facts: HostFacts, deadline: float) -> None:
        self._settings, self._deadline = facts.settings, deadline
        self._line: ask.ControllerLine | None = None
        self._without = 0

    def answer(self, raw_id: int) -> JobAnswer | None:
        """Return the answer about a job, None if it was refused or no time is left."""
        if clock.monotonic() > self._deadline:
            return None
        try:
            try:
                if self._without:
                    raise ask.NoControllerError("")
                self._line = self._line or ask.ControllerLine(self._settings, raw_id)
                return self._line.ask(raw_id)
            except ask.NoControllerError:
                self._without += 1
                if self._without > MAX_WITHOUT_CONTROLLER:
                    return None
                return ask.agents(self._settings, raw_id)
        except ask.QueryError:
            return None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _bare(answer: JobAnswer, sure: bool) -> tuple[str, ...]:
    """Return the nodes of the job without an agent.

    A job that never asked for protection, or never gets it, has none.
    """
    if "heterogeneous" in answer.slurm.get("note", "") or answer.slurm.get("state") != RUNNING:
        return ()
    return answer.missing if answer.parts or sure else ()


def agents(facts: HostFacts) -> Outcome:
    """Compare the nodes that have agents with the nodes of the job."""
    known = protected(facts)
    rows = [facts.queue[i] for i in sorted(known.sure) + sorted(known.perhaps, reverse=True)]
    running = [row.raw_id for row in rows if row.state == RUNNING][:MAX_JOBS]
    if not running:
        return ok(f"no protected job runs{_as_seen(known)}")
    asking = _Asking(facts, clock.monotonic() + DEADLINE_S)
    protected_jobs, untold, told = 0, 0, []
    try:
        for raw_id in running:
            answer = asking.answer(raw_id)
            if answer is None:
                untold += 1
                continue
            sure = raw_id in known.sure
            if _bare(answer, sure):
                job = facts.job(raw_id)
                if job is None or clock.time() - job.start_time < YOUNG_S:
                    continue
                for _ in range(AGAIN):  # a busy node may have answered late
                    clock.sleep(AGAIN_S)
                    answer = asking.answer(raw_id) or answer
                    if not _bare(answer, sure):
                        break
            bare = _bare(answer, sure)
            protected_jobs += bool(answer.parts) or sure
            if bare:
                none = "no agent at all" if not answer.parts else f"no agent on {some(bare, ', ')}"
                told.append(f"job {raw_id} of {answer.slurm.get('user', '?')[:32]}: {none}")
    finally:
        asking.close()
    if told:
        return wrong(
            f"partly protected or not at all: {some(told)}",
            "an agent on every node of each protected job",
            "run doctor on those nodes; see the system log, tag gemini-hpc, and the job's stderr",
        )
    if untold and not protected_jobs:
        raise Unavailable(f"could not ask about {untold} running jobs")
    return ok(f"protected jobs that run: {protected_jobs}, with an agent on each of their nodes{_as_seen(known)}")


def _as_seen(known: Protected) -> str:
    return "" if known.complete else " (as far as can be seen from here)"


def requeue(facts: HostFacts) -> Outcome:
    """Check for jobs that Slurm and the controller can never requeue."""
    known = protected(facts)
    if not known.sure and not known.complete:
        raise Unavailable("only root and SlurmUser can see which jobs are protected, on the controller host")
    notes = []
    for raw_id in sorted(known.sure)[:MAX_JOBS]:
        job = facts.job(raw_id)
        note = slurm_facts(job).get("note") if job else None
        if job and note and not job.has_ended:
            notes.append(f"job {raw_id} of {job.user[:32]}: {note}")
    if notes:
        fix = (
            "tell their owners: sbatch --requeue --open-mode=append; while pending: scontrol update JobId=J Requeue=1"
        )
        return warning(some(notes), "protected jobs that can be requeued", fix)
    return ok(f"protected jobs: {len(known.sure)}, all can be requeued{_as_seen(known)}")


def tasks(facts: HostFacts) -> Outcome:
    """Check for tasks of protected jobs whose slurmstepd did not load the plugin.

    A task's environment proves nothing: srun passes on the values that the batch script's node has set.
    """
    facts.need_root("what slurmstepd has loaded")
    steps = {p.pid: p for p in facts.processes if p.name == "slurmstepd"}
    bare, seen = [], 0
    for process in facts.processes:
        if process.parent not in steps or process.name == "slurmstepd":
            continue
        values = environment(process.pid)
        job = values.get(b"SLURM_JOB_ID", b"").decode(errors="replace")
        if b"SLURM_GEMINI_REPLICAS" not in values or not job.isdecimal():
            continue
        seen += 1
        if not maps(process.parent, NAME):
            bare.append(f"pid {process.pid} of job {int(job[:10])}")
    if bare:
        return wrong(
            f"{len(bare)} tasks run here without the plugin: {some(bare)}",
            f"{NAME} loaded by the slurmstepd of every protected job",
            "see plugin.line and plugin.release on this node, and slurmd's log; then start the job's step again",
        )
    return ok(f"tasks of protected jobs here: {seen}, all started with the plugin")


CHECKS = (
    Check("jobs.agents", "plugin-loaded", ANYWHERE, agents),
    Check("jobs.requeue", "requeue", ANYWHERE, requeue),
    Check("jobs.tasks", "plugin-loaded", ON_NODE, tasks),
)
