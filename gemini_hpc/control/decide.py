"""What may be done about a silent node: pure rules (DESIGN §6, SITE 1-3, 7-9, 12). No I/O, no clock.

A report is a hint. Only what Slurm says and what the controller's own probes found can lead to an action, and
whatever is in doubt leads to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from gemini_hpc.control.slurm.facts import (
    COMPLETED,
    COMPLETING,
    CONFIGURING,
    FAILED,
    NODE_FAIL,
    PENDING,
    RUNNING,
    Job,
    Node,
)

WITNESSES = 2
REACH_SHARE = 0.9
REBOOT_WINDOW_S = 60.0
HANG_FACTOR = 3.0  # a node whose kernel still accepts connections may only be slow: longer silence is asked for
END_WINDOW_S = 30.0


class Port(Enum):
    """What a TCP port was found to do during the whole window of probing."""

    ANSWERS = "answers"
    REFUSES = "refuses"
    HANGS = "hangs"  # the kernel accepts, and no process takes it up
    SILENT = "silent"


class Act(Enum):
    """What follows."""

    WAIT = "wait"  # not enough is known yet
    DISMISS = "dismiss"  # nothing may be done, and waiting will not change that
    FENCE = "fence"  # set the node DOWN; Slurm requeues
    ADOPT = "adopt"  # Slurm holds the node for dead already; only steer the requeue
    REQUEUE = "requeue"  # the node rebooted: healthy and empty; send the job back to pending ourselves


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and the sentence that explains it."""

    act: Act
    why: str


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that is known about one silent node of one incarnation. Times are seconds.

    `slurmd_before`: when its slurmd had been started, as Slurm had it when the incarnation began; 0.0: not known.
    `slurm_up_s`: how long slurmctld has been up and has answered this controller.
    """

    node: str
    restart: int
    members: tuple[str, ...]
    witnesses: frozenset[str]
    suspects: frozenset[str]
    job: Job
    slurm_node: Node | None
    slurmd: Port
    agent: Port
    hangs: bool
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
    confirm_s: float
    guard: bool
    slurm_up_s: float
    settle_s: float


def _wait(why: str) -> Decision:
    return Decision(Act.WAIT, why)


def _dismiss(why: str) -> Decision:
    return Decision(Act.DISMISS, why)


def _of_job(case: Case) -> Decision | None:
    """Reasons that lie in the job: never to act, or not to act any more."""
    job = case.job
    if job.het:
        return _dismiss("heterogeneous job: an update of one part changes all of them")
    if not job.actable:
        return _dismiss("array record that stands for several tasks")
    if not job.batch:
        return _dismiss("not a batch job: Slurm cannot requeue it")
    if not job.requeue:
        return _dismiss("the job was submitted without --requeue (Requeue=0)")
    if case.node not in case.members:
        return _dismiss("this node is not in the job's allocation")
    if job.restarts == case.restart:
        if job.state in (RUNNING, CONFIGURING, COMPLETING):
            return None
        if job.state in (FAILED, NODE_FAIL):
            # Survivors raise and end the script before anybody has noticed; a job that failed by itself stays so.
            if case.reported_at - job.end_time <= END_WINDOW_S:
                return None
            return _dismiss(f"the job had ended {job.state} long before the report")
        return _dismiss(f"the job is {job.state}")
    if job.restarts == case.restart + 1:
        if job.state in (PENDING, COMPLETING):
            return None
        return _dismiss(f"the job is {job.state} again")
    return _dismiss(f"the report is about restart {case.restart}, the job is at restart {job.restarts}")


def _rebooted(case: Case) -> bool:
    """Whether slurmd, or the node, was started anew at about the time at which the peers lost the agent."""
    node = case.slurm_node
    if node is None or node.slurmd_start < case.reported_at - REBOOT_WINDOW_S:
        return False
    return node.slurmd_start > (case.slurmd_before or case.job.start_time)


def _kernel_lives(case: Case) -> Decision:
    """slurmd answers or refuses: the node is not dead."""
    if case.slurmd is Port.REFUSES:
        if case.slurm_node is not None and case.slurm_node.down:
            return Decision(Act.ADOPT, "slurmd is gone and Slurm holds the node for DOWN")
        return _wait("slurmd refuses, so the node's kernel lives: left to Slurm")
    if case.agent is Port.ANSWERS or case.agent_linked:
        return _dismiss("slurmd and agent answer: false suspicion")
    if not _rebooted(case):
        return _wait("slurmd answers and has not been restarted: only the agent is gone")
    if case.agent_silent_s < case.confirm_s:
        return _wait("the node has rebooted; its agent may still come back")
    if case.job.state == COMPLETING and case.job.restarts == case.restart:
        return _wait("the node has rebooted and the script is just ending")
    if case.job.restarts != case.restart:
        return _dismiss("the node has rebooted and the job is on its way already")
    return Decision(Act.REQUEUE, "the node has rebooted: healthy, and empty of this job's processes and memory")


def witnesses_needed(case: Case) -> int:
    """Two on different nodes, or as many as are left."""
    return max(1, min(WITNESSES, len(set(case.members) - case.suspects)))


def decide(case: Case) -> Decision:
    """The rules, in the order in which they veto."""
    of_job = _of_job(case)
    if of_job is not None:
        return of_job
    witnesses = (case.witnesses & set(case.members)) - case.suspects - {case.node}
    if len(witnesses) < witnesses_needed(case):
        return _wait(f"{len(witnesses)} of {witnesses_needed(case)} witnesses")
    if case.slurmd in (Port.ANSWERS, Port.REFUSES):
        return _kernel_lives(case)
    if case.agent in (Port.ANSWERS, Port.REFUSES) or case.agent_linked:
        return _wait("slurmd is silent but the agent, or the node's kernel at its port, answers")
    if case.silent_s > 0 and case.slurm_node is not None and case.slurm_node.down:
        return Decision(Act.ADOPT, "silent, and Slurm holds the node for DOWN")
    confirm_s = HANG_FACTOR * case.confirm_s if case.hangs else case.confirm_s
    if case.silent_s < confirm_s:
        return _wait(f"{'hangs' if case.hangs else 'silent'} for {case.silent_s:.1f} of {confirm_s:g} s")
    if case.slurm_up_s < case.settle_s:
        return _wait(f"slurmctld has answered for {case.slurm_up_s:.0f} of {case.settle_s:g} s")
    if case.others_asked and case.others_reached < REACH_SHARE * case.others_asked:
        return _wait(f"the controller itself reaches only {case.others_reached} of {case.others_asked} other nodes")
    if case.guard and case.strangers:
        return _dismiss(f"jobs of other owners (uid {', '.join(map(str, sorted(case.strangers)))}) run on the node")
    if case.fenced >= case.budget:
        return _dismiss(f"budget: {case.fenced} nodes fenced lately, {case.budget} allowed; call the administrator")
    why = f"no answer from slurmd and agent for {case.silent_s:.1f} s, {len(witnesses)} witnesses"
    return Decision(Act.FENCE, why)


def budget(configured: int, cluster_nodes: int) -> int:
    """Nodes that may be fenced in one window: the setting, or 1 % of a large cluster."""
    return configured if configured == 0 else max(configured, cluster_nodes // 100)


# ---- whom to reserve -----------------------------------------------------------------------------------


def fits(job: Job, node: Node) -> bool:
    """Whether Slurm could put this job on the node, as far as partition, features, CPUs, memory and GRES say."""
    partitions = set(job.partition.split(",")) if job.partition else set()
    if partitions and not partitions & set(node.partitions):
        return False
    wanted = job.features.replace("&", ",").split(",") if job.features else []
    if wanted and all(w.replace("_", "").replace("-", "").isalnum() for w in wanted) and set(wanted) - node.features:
        return False
    if any(node.gres.get(name, 0) < count for name, count in job.gres_per_node.items()):
        return False
    return node.cpus >= job.min_cpus and node.memory_mb >= job.min_memory_mb


def candidates(job: Job, nodes: Mapping[str, Node], without: Iterable[str], reserved: Iterable[str]) -> list[Node]:
    """Up nodes that could replace a dead one, the idle ones first; `without` are not wanted, `reserved` are held by
    others."""
    barred = set(without) | set(reserved)
    able = [n for n in nodes.values() if n.name not in barred and n.up and fits(job, n)]
    return sorted(able, key=lambda n: (not n.idle, n.name))


def candidates_wanted(job: Job, nodes: Mapping[str, Node], dead: int, setting: int) -> int:
    """How many nodes to hold beside the survivors: the dead and some, or 1 % of a large partition (SITE 11)."""
    partitions = set(job.partition.split(","))
    size = sum(1 for node in nodes.values() if partitions & set(node.partitions))
    return dead + max(setting, size // 100)


# ---- when replicas are given up ------------------------------------------------------------------------

# TIMEOUT: Slurm never requeues such a job, and there is no tier to spill to.
_AT_ONCE = frozenset((COMPLETED, "CANCELLED", "REVOKED", "DEADLINE", "TIMEOUT"))


def release_reason(state: str | None, ended_for_s: float | None, retention_s: float) -> str:
    """Why a job's agents may free everything now; "" while they may not. state None: Slurm does not know the job.

    `ended_for_s`: since when the job has been seen ended, None: it has not been seen so.
    """
    if state is None and ended_for_s is None:
        return "job unknown to Slurm"
    if state in _AT_ONCE:
        return f"job {state}"
    if ended_for_s is not None and ended_for_s >= retention_s:
        return f"job {state or 'gone'}, retention of {retention_s:g} s is over"
    return ""


_HELD = ("JobHeld", "Dependency", "Licenses", "Assoc", "QOS", "MaxJobs", "Partition", "Invalid")


def held(reason: str) -> bool:
    """Whether a pending job waits for something that no reserved node can give it."""
    return reason.startswith(_HELD)
