"""What may be done about a silent node: one judgement, a pure function of facts. No I/O, no clock.

The same for nodes that agents report, for survivors that fall silent during a recovery, and for what a controller
that was restarted finds half done. A report is a hint: only what Slurm says and what the controller's own probes
found can lead to an action, and whatever is in doubt leads to none. A kernel that answers in any way (a process takes
the connection up, nobody does, or it is refused) is not dead: such a node is never set DOWN or drained.
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
REBOOT_WINDOW_S = 60.0
END_WINDOW_S = 30.0
REASON = "gemini-hpc: no answer from slurmd and agent"  # of nodes that we have set DOWN, as their Reason begins


class Port(Enum):
    """What a TCP port was found to do during the whole window of probing."""

    ANSWERS = "answers"
    REFUSES = "refuses"
    HANGS = "hangs"  # the kernel accepts, and no process takes it up
    SILENT = "silent"
    UNKNOWN = "unknown"  # the controller could not ask: no proof of anything


class Claim(Enum):
    """Why a node is looked at."""

    REPORTED = "reported"  # by agents of its job
    SURVIVOR = "survivor"  # of a recovery under way: our own probes found it silent, which agents have to confirm
    TAKEN_OVER = "taken over"  # an earlier controller had confirmed its death, and had begun to fence it


class Act(Enum):
    """What follows."""

    WAIT = "wait"  # not enough is known yet
    DISMISS = "dismiss"  # nothing may be done, and waiting will not change that
    LEAVE = "leave"  # not ours to fence; should Slurm find it dead, the requeue is steered
    FENCE = "fence"  # set the node DOWN; Slurm requeues
    ADOPT = "adopt"  # Slurm holds the node for dead already; only steer the requeue
    REQUEUE = "requeue"  # the node rebooted: healthy and empty; send the job back to pending ourselves


class Veto(Enum):
    """Which rule spoke."""

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
    """An action, the sentence that explains it, and the rule that it comes from."""

    act: Act
    why: str
    veto: Veto = Veto.NONE


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that is known about one silent node of one incarnation. Times are seconds.

    `job`: None where Slurm does not know it any more. `kernel`: what ports do on which nobody listens.
    `silent_s`: for how long all three have been silent. `slurmd_before`: when its slurmd had been started, as Slurm
    had it when the incarnation began; 0.0: not known. `fenced`, `budget`, `silent`: nodes fenced in the window
    without this one, allowed, and silent now with this one; `user_...`: those of this job's owner. `slurm_up_s`: how
    long slurmctld has been up and has answered this controller. `finished`: whether the job's training has succeeded,
    by its agents' word.
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
    agent_linked: bool
    slurmd_before: float
    reported_at: float
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
    guard: bool
    slurm_up_s: float
    settle_s: float
    finished: bool = False


def _wait(veto: Veto, why: str) -> Verdict:
    return Verdict(Act.WAIT, why, veto)


def _dismiss(veto: Veto, why: str) -> Verdict:
    return Verdict(Act.DISMISS, why, veto)


def _leave(veto: Veto, why: str) -> Verdict:
    return Verdict(Act.LEAVE, why, veto)


def _of_job(case: Case) -> str:
    """Reasons that lie in the job: never to act, or not to act any more."""
    job = case.job
    if job is None:
        return "Slurm does not know the job any more"
    if job.het:
        return "heterogeneous job: an update of one part changes all of them"
    if not job.actable:
        return "array record that stands for several tasks"
    if not job.batch:
        return "not a batch job: Slurm cannot requeue it"
    if not job.requeue:
        return "the job was submitted without --requeue (Requeue=0)"
    if case.node not in case.members:
        return "this node is not in the job's allocation"
    if case.slurm_node is None:
        return "Slurm does not know this node"
    return _reported(case, job) if case.claim is Claim.REPORTED else _under_way(case, job)


def _reported(case: Case, job: Job) -> str:
    if job.restarts == case.restart:
        if job.state in (RUNNING, CONFIGURING, COMPLETING):
            return ""
        if job.state == COMPLETED and case.finished:
            return "the job is COMPLETED, and its training had finished"
        if job.state in CUT_SHORT:
            # Survivors raise and end the script before anybody has noticed; a job that ended by itself stays so.
            recent = case.reported_at - job.end_time <= END_WINDOW_S
            return "" if recent else f"the job had ended {job.state} long before the report"
        return f"the job is {job.state}"
    if job.restarts == case.restart + 1:
        return "" if job.state in (PENDING, COMPLETING) else f"the job is {job.state} again"
    return f"the report is about restart {case.restart}, the job is at restart {job.restarts}"


def _under_way(case: Case, job: Job) -> str:
    """A recovery has begun: the job is where it was, or on its way back, perhaps not for the first time."""
    if job.restarts < case.restart:
        return f"the recovery is for restart {case.restart}, the job is at restart {job.restarts}"
    where = RUNNING if job.restarts == case.restart else PENDING
    return "" if job.state in (where, CONFIGURING, COMPLETING) else f"the job is {job.state}"


def _rebooted(case: Case, job: Job) -> bool:
    """Whether slurmd was started anew at about the time at which the peers lost the agent; or the node, at any time:
    nobody may have looked when it was (the job was suspended), and nothing of this incarnation is left there."""
    node = case.slurm_node
    if node is None or node.slurmd_start <= (case.slurmd_before or job.start_time):
        return False
    if case.slurmd_before and node.boot_time > case.slurmd_before:
        return True
    return node.slurmd_start >= case.reported_at - REBOOT_WINDOW_S


def _slurmd_answers(case: Case, job: Job) -> Verdict:
    if case.agent is Port.ANSWERS or case.agent_linked:
        return _dismiss(Veto.KERNEL, "slurmd and agent answer: false suspicion")
    if case.claim is not Claim.REPORTED:
        return _dismiss(Veto.KERNEL, "slurmd answers")
    if case.agent is Port.UNKNOWN:
        return _wait(Veto.SIGHT, "slurmd answers; the controller itself fails to probe the agent")
    if not _rebooted(case, job):
        return _wait(Veto.KERNEL, "slurmd answers and has not been restarted: only the agent is gone")
    if case.agent_silent_s < case.confirm_s:
        return _wait(Veto.KERNEL, "the node has rebooted; its agent may still come back")
    if job.state == COMPLETING and job.restarts == case.restart:
        return _wait(Veto.KERNEL, "the node has rebooted and the batch script is still ending")
    if job.restarts != case.restart:
        return _dismiss(Veto.KERNEL, "the node has rebooted and the job is on its way already")
    return Verdict(Act.REQUEUE, "the node has rebooted: healthy, and empty of this job's processes and memory")


def _kernel_lives(case: Case) -> Verdict:
    """slurmd does not answer, and the node's kernel does."""
    if case.slurm_node is not None and case.slurm_node.down:
        return Verdict(Act.ADOPT, "slurmd does not answer and Slurm shows the node as DOWN")
    if case.slurmd is Port.REFUSES:
        return _leave(Veto.KERNEL, "slurmd refuses, so the node's kernel lives: left to Slurm's own detection")
    if case.slurmd is Port.HANGS:
        return _leave(Veto.KERNEL, "slurmd hangs: the kernel accepts connections, so it lives: left to Slurm")
    if case.agent is not Port.SILENT or case.agent_linked:
        return _leave(Veto.KERNEL, "slurmd is silent but the agent, or the kernel at its port, is not: left to Slurm")
    return _leave(Veto.KERNEL, "slurmd and agent are silent but the node's kernel answers: left to Slurm")


def witnesses_needed(case: Case) -> int:
    """Two on different nodes, or as many as are left; none more where a controller had heard them before it died."""
    if case.claim is Claim.TAKEN_OVER:
        return 0
    return max(1, min(WITNESSES, len(set(case.members) - case.suspects)))


def judge(case: Case) -> Verdict:
    """The rules, in the order in which they veto."""
    job, of_job = case.job, _of_job(case)
    if of_job or job is None:
        return _dismiss(Veto.JOB, of_job)
    witnesses = (case.witnesses & set(case.members)) - case.suspects - {case.node}
    lacks = f"{len(witnesses)} of {needed} witnesses" if len(witnesses) < (needed := witnesses_needed(case)) else ""
    if lacks and case.claim is Claim.REPORTED:
        return _wait(Veto.WITNESSES, lacks)
    if case.slurmd is Port.ANSWERS:
        return _slurmd_answers(case, job)
    if Port.UNKNOWN in (case.slurmd, case.agent, case.kernel):
        return _wait(Veto.SIGHT, "the controller itself fails to probe the node (name resolution, resources, routes)")
    if {case.slurmd, case.agent, case.kernel} != {Port.SILENT} or case.agent_linked:
        return _kernel_lives(case)
    if case.silent_s > 0 and case.slurm_node is not None and case.slurm_node.down:
        return Verdict(Act.ADOPT, "silent, and Slurm shows the node as DOWN")
    if case.silent_s < case.confirm_s:
        return _wait(Veto.SILENCE, f"silent for {case.silent_s:.1f} of {case.confirm_s:g} s")
    if case.slurm_up_s < case.settle_s:
        return _wait(Veto.SETTLING, f"slurmctld has answered for {case.slurm_up_s:.0f} of {case.settle_s:g} s")
    if case.others_asked and case.others_reached < REACH_SHARE * case.others_asked:
        why = f"the controller itself reaches only {case.others_reached} of {case.others_asked} other nodes"
        return _wait(Veto.REACH, why)
    if lacks:  # no packet comes here from it: no proof that none goes anywhere
        return _wait(Veto.WITNESSES, f"silent to the controller: {lacks}")
    return _silent(case, len(witnesses))


def _silent(case: Case, witnesses: int) -> Verdict:
    """It is dead as far as anybody can see: is it ours to fence?"""
    if case.guard and case.strangers:
        uids = ", ".join(map(str, sorted(case.strangers)))
        return _leave(Veto.STRANGERS, f"jobs of other owners (uid {uids}) run on the node: left to Slurm")
    counts = (
        (Veto.BUDGET, "budget", case.fenced, case.silent, case.budget),
        (Veto.USER_BUDGET, "budget of this user", case.user_fenced, case.user_silent, case.user_budget),
    )
    for veto, name, fenced, silent, allowed in counts:
        if fenced + max(1, silent) > allowed:
            why = f"{name}: {fenced} nodes fenced recently, {max(1, silent)} silent now, {allowed} allowed"
            return _leave(veto, f"{why}: left to Slurm; call the administrator")
    by = "" if case.claim is Claim.REPORTED else f", {case.claim.value}"
    by += "" if case.claim is Claim.TAKEN_OVER else f", {witnesses} witnesses"
    return Verdict(Act.FENCE, f"no answer from slurmd, agent and kernel for {case.silent_s:.1f} s{by}")


def budget(configured: int, cluster_nodes: int) -> int:
    """Nodes that may be fenced in one window: the setting, or 1 % of a large cluster."""
    return configured if configured == 0 else max(configured, cluster_nodes // 100)


def user_budget(configured: int, whole: int) -> int:
    """What of it one owner's jobs may use up: the setting, or half of a large one."""
    return min(whole, configured if configured == 0 else max(configured, whole // 2))
