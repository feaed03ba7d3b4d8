"""Slurm's facts on a job, for `inspect`, and the sentences shared by all parts that answer for Slurm."""

from __future__ import annotations

from gemini_hpc.slurm.facts import Job

NOT_YOURS = "unknown, or not yours"


def explain_no_requeue(job: Job) -> str:
    """Return why Slurm can never requeue this job after a failure, "" if it can (requirement requeue)."""
    if job.is_het:
        return "this is a heterogeneous job: gemini-hpc never acts on one"
    if not job.is_batch:
        return "this is not a batch job (salloc, srun): Slurm cannot requeue it"
    if not job.may_requeue:
        return "this job was submitted without --requeue"
    return ""


def build_slurm_facts(job: Job | None) -> dict[str, str]:
    """Return Slurm's facts on a job, for `inspect`."""
    if job is None:
        return {"state": "UNKNOWN", "reason": "Slurm does not know this job any more"}
    facts = {
        "id": job.id,
        "state": job.state,
        "nodes": ",".join(job.nodes),
        "num_nodes": str(job.num_nodes),
        "restarts": str(job.restarts),
        "reason": job.reason,
        "requeue": "1" if job.may_requeue else "0",
        "user": job.user,
        "partition": job.partition,
        "reservation": job.reservation,
        "req_nodes": ",".join(job.req_nodes),
        "exit_code": job.exit_code,
    }
    if job.has_ended and job.end_time:
        facts["end_time"] = f"{job.end_time:.0f}"
    if why := explain_no_requeue(job):
        facts["note"] = f"{why}: a lost node ends the job"
    return facts
