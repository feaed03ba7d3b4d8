"""The judgement on a silent node: a pure function of facts, without I/O or clock.

The same function serves three cases: nodes that agents report, survivors that fall silent during a recovery, and
half-done recoveries of a restarted controller. A report is a hint. Only facts from Slurm and from the controller's
own probes lead to an action. Any doubt leads to no action. A kernel that answers in any way is not dead: a process
accepts the connection, or no process does, or the kernel refuses it. Such a node is never set DOWN or drained.

A suspect whose slurmd and agent answer is dismissed without witnesses, and counts as a witness again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gemini_hpc.slurm.facts import (
    COMPLETED,
    COMPLETING,
    CONFIGURING,
    CUT_SHORT,
    PENDING,
    RUNNING,
    Job,
    Node,
)

WITNESSES = 2
REACH_SHARE = 0.9
REBOOT_WINDOW_S = 60.0  # slurmd may have started this long before the silence and still count as a reboot
END_WINDOW_S = 30.0  # a script that ended this long before the silence was found may have ended because of it
REASON = "gemini-hpc: no answer from slurmd and agent"  # prefix of the Reason of nodes that we have set DOWN


class Port(Enum):
    """The behavior of a TCP port over the whole window of probing."""

    ANSWERS = "answers"
    REFUSES = "refuses"
    HANGS = "hangs"  # the kernel accepts, but no process answers
    SILENT = "silent"
    UNKNOWN = "unknown"  # the controller could not probe: no proof of anything


class Claim(Enum):
    """The reason why a node is judged."""

    REPORTED = "reported"  # by agents of its job
    SURVIVOR = "survivor"  # of a recovery in progress: our own probes found it silent, and agents must confirm
    TAKEN_OVER = "taken over"  # an earlier controller had confirmed its death and had begun to fence it


class Act(Enum):
    """The action that follows from a judgement."""

    WAIT = "wait"  # not enough is known yet
    DISMISS = "dismiss"  # no action is allowed, and waiting will not change that
    LEAVE = "leave"  # not ours to fence; if Slurm declares it dead, the requeue is steered
    FENCE = "fence"  # set the node DOWN; Slurm requeues the job
    ADOPT = "adopt"  # Slurm already considers the node dead; only steer the requeue
    REQUEUE = "requeue"  # the node rebooted, healthy and empty; requeue the job ourselves


class Veto(Enum):
    """The rule that forbids an action; `NONE` if none does."""

    NONE = "none"
    JOB = "job"
    WITNESSES = "witnesses"
    KERNEL = "kernel"
    SIGHT = "sight"
    SILENCE = "silence"
    SETTLING = "settling"
    REACH = "reach"
    STRANGERS = "strangers"
    BUDGET = "budget"
    USER_BUDGET = "user budget"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement: an action, the sentence that explains it, and the rule behind it."""

    act: Act
    why: str
    veto: Veto = Veto.NONE


@dataclass(frozen=True, slots=True)
class Case:
    """The facts about one silent node of one incarnation. Times are seconds.

    Attributes:
        job: The job in Slurm; None if Slurm no longer knows it.
        kernel: Behavior of ports without a listener.
        silent_s: Time for which slurmd, agent and kernel have all been silent.
        found_at: Unix time at which the job's agents found the node silent.
        slurmd_before: Start of the node's slurmd, as Slurm had it when the incarnation began; 0.0: not known.
        fenced: Nodes fenced in the window, without this one.
        budget: Nodes that may be fenced in the window.
        silent: Nodes silent now, with this one.
        user_fenced: As `fenced`, for this job's owner.
        user_budget: As `budget`, for this job's owner.
        user_silent: As `silent`, for this job's owner.
        slurm_up_s: Time for which slurmctld has been up and has answered this controller.
        has_finished: Whether the job's agents have reported that its training succeeded.
    """

    claim: Claim
    node: str
    restart: int
    members: tuple[str, ...]
    witnesses: frozenset[str]
    suspects: frozenset[str]
    job: Job | None
    slurm_node: Node | None
    slurmd: Port
    agent: Port
    kernel: Port
    silent_s: float
    agent_silent_s: float
    is_agent_linked: bool
    slurmd_before: float
    found_at: float
    strangers: frozenset[int]
    others_reached: int
    others_asked: int
    fenced: int
    budget: int
    silent: int
    user_fenced: int
    user_budget: int
    user_silent: int
    confirm_s: float
    is_guarded: bool
    slurm_up_s: float
    settle_s: float
    has_finished: bool = False


def _wait(veto: Veto, why: str) -> Verdict:
    return Verdict(Act.WAIT, why, veto)


def _dismiss(veto: Veto, why: str) -> Verdict:
    return Verdict(Act.DISMISS, why, veto)


def _leave(veto: Veto, why: str) -> Verdict:
    return Verdict(Act.LEAVE, why, veto)


def _find_job_veto(case: Case) -> str:
    """Return a reason in the job itself not to act, now or ever; "" if there is none."""
    job = case.job
    if job is None:
        return "Slurm does not know the job any more"
    if job.is_het:
        return "heterogeneous job: an update of one part changes all of them"
    if not job.is_actable:
        return "array record that stands for several tasks"
    if not job.is_batch:
        return "not a batch job: Slurm cannot requeue it"
    if not job.may_requeue:
        return "the job was submitted without --requeue (Requeue=0)"
    if case.node not in case.members:
        return "this node is not in the job's allocation"
    if case.slurm_node is None:
        return "Slurm does not know this node"
    return _find_report_veto(case, job) if case.claim is Claim.REPORTED else _find_reason_to_stop(case, job)


def _find_report_veto(case: Case, job: Job) -> str:
    if job.restarts == case.restart:
        if job.state in (RUNNING, CONFIGURING, COMPLETING):
            return ""
        if job.state == COMPLETED and case.has_finished:
            return "the job is COMPLETED, and its training had finished"
        if job.state in CUT_SHORT:
            # Survivors raise and end the script before the failure is detected; a job that ended by itself stays
            # ended.
            recent = case.found_at - job.end_time <= END_WINDOW_S
            return "" if recent else f"the job had ended {job.state} long before the node fell silent"
        return f"the job is {job.state}"
    if job.restarts == case.restart + 1:
        return "" if job.state in (PENDING, COMPLETING) else f"the job is {job.state} again"
    return f"the report is about restart {case.restart}, the job is at restart {job.restarts}"


def _find_reason_to_stop(case: Case, job: Job) -> str:
    """Return a reason in the job not to continue a recovery that has begun; "" if there is none.

    The job may be in its old incarnation or on its way back, perhaps not for the first time.
    """
    if job.restarts < case.restart:
        return f"the recovery is for restart {case.restart}, the job is at restart {job.restarts}"
    where = RUNNING if job.restarts == case.restart else PENDING
    return "" if job.state in (where, CONFIGURING, COMPLETING) else f"the job is {job.state}"


def _has_rebooted(case: Case, job: Job) -> bool:
    """Return whether the node, or its slurmd, was restarted.

    A start of slurmd counts if it came about when the peers lost the agent. A reboot of the node counts at any
    time. The reboot may have gone unnoticed (the job was suspended), and no process or copy of this incarnation is
    left there.
    """
    node = case.slurm_node
    if node is None or node.slurmd_start <= (case.slurmd_before or job.start_time):
        return False
    if case.slurmd_before and node.boot_time > case.slurmd_before:
        return True
    return node.slurmd_start >= case.found_at - REBOOT_WINDOW_S


def _is_agent_alive(case: Case) -> bool:
    return case.agent is Port.ANSWERS or case.is_agent_linked


def _judge_answering_slurmd(case: Case, job: Job) -> Verdict:
    if _is_agent_alive(case):
        return _dismiss(Veto.KERNEL, "slurmd and agent answer: false suspicion")
    if case.claim is not Claim.REPORTED:
        return _dismiss(Veto.KERNEL, "slurmd answers")
    if case.agent is Port.UNKNOWN:
        return _wait(Veto.SIGHT, "slurmd answers; the controller itself fails to probe the agent")
    if not _has_rebooted(case, job):
        return _wait(Veto.KERNEL, "slurmd answers and has not been restarted: only the agent is gone")
    if case.agent_silent_s < case.confirm_s:
        return _wait(Veto.KERNEL, "the node has rebooted; its agent may still come back")
    if job.state == COMPLETING and job.restarts == case.restart:
        return _wait(Veto.KERNEL, "the node has rebooted and the batch script is still ending")
    if job.restarts != case.restart:
        return _dismiss(Veto.KERNEL, "the node has rebooted and the job is on its way already")
    return Verdict(Act.REQUEUE, "the node has rebooted: healthy, and empty of this job's processes and memory")


def _judge_living_kernel(case: Case) -> Verdict:
    """Judge a node whose slurmd does not answer but whose kernel does."""
    if case.slurm_node is not None and case.slurm_node.is_down:
        return Verdict(Act.ADOPT, "slurmd does not answer and Slurm shows the node as DOWN")
    if case.slurmd is Port.REFUSES:
        return _leave(Veto.KERNEL, "slurmd refuses, so the node's kernel lives: left to Slurm's own detection")
    if case.slurmd is Port.HANGS:
        return _leave(Veto.KERNEL, "slurmd hangs: the kernel accepts connections, so it lives: left to Slurm")
    if case.agent is not Port.SILENT or case.is_agent_linked:
        return _leave(Veto.KERNEL, "slurmd is silent but the agent, or the kernel at its port, is not: left to Slurm")
    return _leave(Veto.KERNEL, "slurmd and agent are silent but the node's kernel answers: left to Slurm")


def count_witnesses_needed(case: Case) -> int:
    """Return the number of witnesses needed: two on different nodes, or as many as are left.

    If an earlier controller had their reports before it died, none are needed.
    """
    if case.claim is Claim.TAKEN_OVER:
        return 0
    return max(1, min(WITNESSES, len(set(case.members) - case.suspects)))


def judge_case(case: Case) -> Verdict:
    """Judge a case by the rules, in the order in which they veto."""
    job, of_job = case.job, _find_job_veto(case)
    if of_job or job is None:
        return _dismiss(Veto.JOB, of_job)
    witnesses = (case.witnesses & set(case.members)) - case.suspects - {case.node}
    if case.claim is Claim.REPORTED and case.slurmd is Port.ANSWERS and _is_agent_alive(case):
        return _judge_answering_slurmd(case, job)  # life needs no witnesses
    lacks = (
        f"{len(witnesses)} of {needed} witnesses" if len(witnesses) < (needed := count_witnesses_needed(case)) else ""
    )
    if lacks and case.claim is Claim.REPORTED:
        return _wait(Veto.WITNESSES, lacks)
    if case.slurmd is Port.ANSWERS:
        return _judge_answering_slurmd(case, job)
    if Port.UNKNOWN in (case.slurmd, case.agent, case.kernel):
        return _wait(Veto.SIGHT, "the controller itself fails to probe the node (name resolution, resources, routes)")
    if {case.slurmd, case.agent, case.kernel} != {Port.SILENT} or case.is_agent_linked:
        return _judge_living_kernel(case)
    if case.silent_s > 0 and case.slurm_node is not None and case.slurm_node.is_down:
        return Verdict(Act.ADOPT, "silent, and Slurm shows the node as DOWN")
    if case.silent_s < case.confirm_s:
        return _wait(Veto.SILENCE, f"silent for {case.silent_s:.1f} of {case.confirm_s:g} s")
    if case.slurm_up_s < case.settle_s:
        return _wait(Veto.SETTLING, f"slurmctld has answered for {case.slurm_up_s:.0f} of {case.settle_s:g} s")
    if case.others_asked and case.others_reached < REACH_SHARE * case.others_asked:
        why = f"the controller itself reaches only {case.others_reached} of {case.others_asked} other nodes"
        return _wait(Veto.REACH, why)
    if lacks:  # no packet reaches this host from the node, which does not prove that none reaches other hosts
        return _wait(Veto.WITNESSES, f"silent to the controller: {lacks}")
    return _judge_silent_node(case, len(witnesses))


def _judge_silent_node(case: Case, witnesses: int) -> Verdict:
    """Judge a node that is dead by all evidence: may the controller fence it?"""
    if case.is_guarded and case.strangers:
        uids = ", ".join(map(str, sorted(case.strangers)))
        return _leave(Veto.STRANGERS, f"jobs of other owners (uid {uids}) run on the node: left to Slurm")
    counts = (
        (Veto.BUDGET, "fence_budget_nodes", case.fenced, case.silent, case.budget),
        (Veto.USER_BUDGET, "fence_budget_user_nodes", case.user_fenced, case.user_silent, case.user_budget),
    )
    for veto, name, fenced, silent, allowed in counts:
        if fenced + max(1, silent) > allowed:
            why = f"{name}: {fenced} nodes fenced recently, {max(1, silent)} silent now, {allowed} allowed"
            return _leave(veto, f"{why}: left to Slurm; call the administrator")
    evidence = "" if case.claim is Claim.REPORTED else f", {case.claim.value}"
    evidence += "" if case.claim is Claim.TAKEN_OVER else f", {witnesses} witnesses"
    return Verdict(Act.FENCE, f"no answer from slurmd, agent and kernel for {case.silent_s:.1f} s{evidence}")


def compute_budget(configured: int, cluster_nodes: int) -> int:
    """Return the number of nodes that may be fenced in one window: the setting, or 1 % of a large cluster."""
    return configured if configured == 0 else max(configured, cluster_nodes // 100)


def compute_user_budget(configured: int, whole: int) -> int:
    """Return the part of the budget for one owner's jobs: the setting, or half of a large budget."""
    return min(whole, configured if configured == 0 else max(configured, whole // 2))
