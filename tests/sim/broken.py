"""Production code broken on purpose, by name: what a simulated site must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.controller import give_back, job_watch, recovery, requeue
from gemini_hpc.controller.fencing import Act, Case, Verdict, Veto
from gemini_hpc.controller.gate import Gate
from gemini_hpc.controller.recoveries import Recoveries
from gemini_hpc.controller.reservation import Held
from gemini_hpc.slurm.facts import CANCELLED, FAILED, NODE_FAIL

from .slurm import SimSlurm


async def _nothing(*_: Any, **__: Any) -> None: ...


def no_reservation() -> None:
    """Survivors are pinned, and not reserved."""
    Held.reserve_nodes = _nothing  # type: ignore[method-assign]


def keeps_reservations() -> None:
    """What is held is never let go of."""
    Held.release_reservation = _nothing  # type: ignore[method-assign]


def fences_living_kernels() -> None:
    """A node that hangs is set DOWN."""
    there: Any = recovery
    judge = there.judge_case

    def worse(case: Case) -> Verdict:
        verdict: Verdict = judge(case)
        return Verdict(Act.FENCE, "it hangs") if (verdict.act, verdict.veto) == (Act.LEAVE, Veto.KERNEL) else verdict

    there.judge_case = worse


def no_budget() -> None:
    """As many nodes as there are may be fenced."""
    there: Any = recovery
    there.compute_budget = there.compute_user_budget = lambda configured, cluster: 99


def starts_now() -> None:
    """`StartTime=now`: the credentials are revoked."""
    asked = SimSlurm.set_start_time
    SimSlurm.set_start_time = lambda self, job, start: asked(self, job, "now")  # type: ignore[method-assign]


def resumes_nothing() -> None:
    """What a dead controller has begun stays so."""
    Recoveries.resume_open = _nothing  # type: ignore[method-assign]


def tells_once() -> None:
    """Agents of a job that has ended tell nobody of the death that has ended it, as up to November 2026."""
    Agent.should_report_deaths = lambda self, now: not self.membership.detached  # type: ignore[method-assign]


def looks_away() -> None:
    """Agents of a job that has failed do not look whether a node was lost just before, as up to November 2026."""

    def watch(self: Any, now: float) -> None:
        incarnation = self.membership.incarnation
        if incarnation is not None and not incarnation.mesh.dead:
            incarnation.mesh.detector.watching = False

    Agent._stop_watching = watch  # type: ignore[method-assign]


def no_user_budget() -> None:
    """One user's jobs may use up all of the budget."""
    there: Any = recovery
    there.compute_user_budget = lambda configured, whole: whole


def anybodys_candidates() -> None:
    """Nodes of other owners' protected jobs serve as replacements."""
    Recoveries.list_protected = lambda self, user_id: set()  # type: ignore[method-assign]


def takes_drains_for_ours() -> None:
    """What an administrator has drained gets our reason when it dies, as up to November 2026."""
    give_back.find_drain_reason = lambda node: ""


def sends_back_the_cancelled() -> None:
    """A job that ends in mid-recovery is sent back, whatever it has ended by."""
    there: Any = requeue
    there.CUT_SHORT = frozenset((CANCELLED,))


def leaves_the_completed() -> None:
    """A script that ends with 0 has done its work, whatever its training says, as up to November 2026."""
    there: Any = requeue
    there.CUT_SHORT = frozenset((FAILED, NODE_FAIL))


def frees_the_completed() -> None:
    """Copies of a job that is COMPLETED go at once, as up to November 2026."""
    there: Any = job_watch
    why = there.find_release_reason
    there.find_release_reason = lambda state, ended_s, kept_s, doubt_s: why(state, ended_s, kept_s)


def opens_the_gate() -> None:
    """The controller acts, whatever the mode says."""
    Gate.explain_refusal = lambda self, partitions: ""  # type: ignore[method-assign]


BROKEN: dict[str, Callable[[], None]] = {
    b.__name__.replace("_", "-"): b
    for b in (
        no_reservation,
        keeps_reservations,
        fences_living_kernels,
        no_budget,
        starts_now,
        resumes_nothing,
        tells_once,
        looks_away,
        no_user_budget,
        anybodys_candidates,
        takes_drains_for_ours,
        sends_back_the_cancelled,
        leaves_the_completed,
        frees_the_completed,
        opens_the_gate,
    )
}
