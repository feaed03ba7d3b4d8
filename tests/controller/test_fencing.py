"""The judgement about silent nodes: every combination of facts, and the sentences of single ones."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_hpc.config import Settings
from gemini_hpc.controller.fencing import (
    Act,
    Case,
    Claim,
    Port,
    Verdict,
    Veto,
    compute_budget,
    compute_user_budget,
    judge_case,
)
from gemini_hpc.slurm.text import parse_node

from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-running.txt").read_text().splitlines()[0]
JOB = parse_job(LINE)
NODE = parse_node("NodeName=n2 CPUTot=4 RealMemory=2000 NodeAddr=10.77.0.12 State=ALLOCATED Partitions=main")
DOWN = dataclasses.replace(NODE, state="DOWN")
REBOOTED = dataclasses.replace(NODE, slurmd_start=JOB.start_time + 498)
DEAD = Case(
    claim=Claim.REPORTED,
    node="n2",
    restart=0,
    members=("n1", "n2", "n3"),
    witnesses=frozenset(("n1", "n3")),
    suspects=frozenset(("n2",)),
    job=JOB,
    slurm_node=NODE,
    slurmd=Port.SILENT,
    agent=Port.SILENT,
    kernel=Port.SILENT,
    silent_s=6.0,
    agent_silent_s=6.0,
    is_agent_linked=False,
    slurmd_before=1000.0,
    found_at=JOB.start_time + 500,
    strangers=frozenset(),
    others_reached=2,
    others_asked=2,
    fenced=0,
    budget=2,
    silent=1,
    user_fenced=0,
    user_budget=2,
    user_silent=1,
    confirm_s=5.0,
    is_guarded=True,
    slurm_up_s=1000.0,
    settle_s=60.0,
)
ALIVE = (Port.ANSWERS, Port.REFUSES, Port.HANGS)


def case(**changes: Any) -> Case:
    job = {k: changes.pop(k) for k in list(changes) if k in {f.name for f in dataclasses.fields(JOB)} - {"job"}}
    changed = dataclasses.replace(DEAD, **changes)
    return dataclasses.replace(changed, job=dataclasses.replace(JOB, **job)) if job else changed


def test_a_dead_node_is_fenced() -> None:
    for claim in Claim:
        assert judge_case(case(claim=claim)).act is Act.FENCE


# ---- every combination -----------------------------------------------------------------------------------

FACTS: dict[str, tuple[Any, ...]] = {
    "claim": tuple(Claim),
    "slurmd": tuple(Port),
    "agent": tuple(Port),
    "kernel": (Port.SILENT, Port.REFUSES, Port.UNKNOWN),
    "is_agent_linked": (False, True),
    "silent_s": (0.0, 4.9, 5.0),
    "slurm_node": (NODE, DOWN, REBOOTED),
    "witnesses": (frozenset(("n1", "n3")), frozenset(("n1",)), frozenset(("n2", "n9"))),
    "strangers": (frozenset(), frozenset((5002,))),
    "others_reached": (10, 8),
    "slurm_up_s": (60.0, 59.0),
    # fenced, silent, user_fenced, user_silent
    "spent": ((0, 1, 0, 1), (1, 2, 0, 1), (2, 1, 0, 1), (0, 1, 1, 1), (0, 2, 0, 2)),
}


def everything_holds(c: Case) -> bool:
    return (
        {c.slurmd, c.agent, c.kernel} == {Port.SILENT}
        and not c.is_agent_linked
        and c.silent_s >= c.confirm_s
        and c.slurm_node is not None
        and not c.slurm_node.is_down
        and (c.claim is Claim.TAKEN_OVER or c.witnesses == {"n1", "n3"})
        and not c.strangers
        and c.others_reached >= 9
        and c.slurm_up_s >= c.settle_s
        and c.fenced + c.silent <= c.budget
        and c.user_fenced + c.user_silent <= c.user_budget
    )


def check(c: Case, verdict: Verdict) -> None:
    """What must hold of every verdict."""
    assert verdict.why
    alive = c.slurmd in ALIVE or c.agent in ALIVE or c.kernel in ALIVE or c.is_agent_linked
    if verdict.act is Act.FENCE:
        assert not alive and verdict.veto is Veto.NONE
    if alive:
        assert verdict.act is not Act.FENCE, "what gives any sign of life is never set DOWN"
    blind = {c.agent} if c.slurmd is Port.ANSWERS else {c.slurmd, c.agent, c.kernel}
    if Port.UNKNOWN in blind:
        assert verdict.act in (Act.WAIT, Act.DISMISS), "what could not be asked is no ground for anything"
        assert verdict.act is Act.WAIT or c.slurmd is Port.ANSWERS or verdict.veto is Veto.JOB
    if verdict.act is Act.ADOPT:
        assert c.slurm_node is not None and c.slurm_node.is_down and c.slurmd is not Port.ANSWERS
    if verdict.act is Act.REQUEUE:
        assert c.claim is Claim.REPORTED and c.slurmd is Port.ANSWERS and c.slurm_node is REBOOTED
        assert c.agent is not Port.ANSWERS and not c.is_agent_linked
    if verdict.act in (Act.FENCE, Act.ADOPT, Act.REQUEUE) and c.claim is Claim.REPORTED:
        assert c.witnesses == {"n1", "n3"}


@pytest.mark.slow
def test_every_combination_of_what_is_seen() -> None:
    """Fenced if, and only if, everything speaks for it."""
    fenced = tried = 0
    names = list(FACTS)
    base = {f.name: getattr(DEAD, f.name) for f in dataclasses.fields(Case)} | {
        "others_asked": 10,
        "budget": 2,
        "user_budget": 1,
    }
    for values in product(*FACTS.values()):
        facts = base | dict(zip(names, values, strict=True))
        facts["fenced"], facts["silent"], facts["user_fenced"], facts["user_silent"] = facts.pop("spent")
        tried_case = Case(**facts)
        verdict = judge_case(tried_case)
        check(tried_case, verdict)
        assert (verdict.act is Act.FENCE) is everything_holds(tried_case), (tried_case, verdict)
        tried, fenced = tried + 1, fenced + (verdict.act is Act.FENCE)
    assert (tried, fenced) == (486_000, 10)


STATES = ("RUNNING", "CONFIGURING", "COMPLETING", "PENDING", "FAILED", "NODE_FAIL", "COMPLETED", "CANCELLED",
          "TIMEOUT", "SUSPENDED")  # fmt: skip
ODD: tuple[dict[str, Any], ...] = (
    {},
    {"is_het": True},
    {"may_requeue": False},
    {"is_batch": False},
    {"array_job_id": 1, "array_task_id": "1-3"},
)


def test_every_combination_of_what_slurm_says_of_the_job() -> None:
    acted: set[tuple[Claim, str, int]] = set()
    for claim, state, restarts, odd, member, known, port in product(
        Claim, STATES, range(4), ODD, (True, False), (NODE, DOWN, None), (Port.SILENT, Port.HANGS, Port.UNKNOWN)
    ):
        tried = case(
            claim=claim,
            restart=1,
            members=("n1", "n2", "n3") if member else ("n1", "n3", "n4"),
            slurm_node=known,
            slurmd=port,
            state=state,
            restarts=restarts,
            end_time=DEAD.found_at - 3,
            **odd,
        )
        verdict = judge_case(tried)
        check(tried, verdict)
        if odd or not member or known is None:
            assert verdict.act is Act.DISMISS and verdict.veto is Veto.JOB
        elif verdict.act in (Act.FENCE, Act.ADOPT):
            acted.add((claim, state, restarts))
    here, gone = ("RUNNING", "CONFIGURING", "COMPLETING"), ("PENDING", "COMPLETING")
    wanted = {(Claim.REPORTED, s, 1) for s in (*here, "FAILED", "NODE_FAIL", "COMPLETED")}
    wanted |= {(Claim.REPORTED, s, 2) for s in gone}
    for claim in (Claim.SURVIVOR, Claim.TAKEN_OVER):
        wanted |= {(claim, s, 1) for s in here} | {(claim, s, n) for s in (*gone, "CONFIGURING") for n in (2, 3)}
    assert acted == wanted
    assert judge_case(dataclasses.replace(DEAD, job=None)).act is Act.DISMISS


# ---- single ones -----------------------------------------------------------------------------------------


def test_vetoes() -> None:
    cases: list[tuple[Act, str, dict[str, Any]]] = [
        (Act.DISMISS, "false suspicion", {"slurmd": Port.ANSWERS, "agent": Port.ANSWERS}),
        (Act.DISMISS, "false suspicion", {"slurmd": Port.ANSWERS, "is_agent_linked": True}),
        (Act.WAIT, "only the agent", {"slurmd": Port.ANSWERS}),
        (Act.DISMISS, "slurmd answers", {"slurmd": Port.ANSWERS, "claim": Claim.SURVIVOR}),
        (Act.LEAVE, "refuses", {"slurmd": Port.REFUSES}),
        (Act.LEAVE, "refuses", {"slurmd": Port.REFUSES, "claim": Claim.SURVIVOR, "silent_s": 0.0}),
        (Act.LEAVE, "hangs", {"slurmd": Port.HANGS}),
        (Act.LEAVE, "hangs", {"slurmd": Port.HANGS, "agent": Port.HANGS, "silent_s": 100.0}),
        (Act.LEAVE, "agent", {"agent": Port.REFUSES}),
        (Act.LEAVE, "agent", {"agent": Port.ANSWERS}),
        (Act.LEAVE, "kernel answers", {"kernel": Port.REFUSES, "claim": Claim.TAKEN_OVER}),
        (Act.WAIT, "fails to probe", {"slurmd": Port.UNKNOWN}),
        (Act.WAIT, "fails to probe", {"agent": Port.UNKNOWN, "slurm_node": DOWN}),
        (Act.WAIT, "fails to probe", {"kernel": Port.UNKNOWN, "claim": Claim.TAKEN_OVER}),
        (Act.WAIT, "fails to probe", {"slurmd": Port.ANSWERS, "agent": Port.UNKNOWN, "slurm_node": REBOOTED}),
        (Act.WAIT, "silent for", {"silent_s": 4.9, "claim": Claim.SURVIVOR}),
        (Act.DISMISS, "false suspicion", {"slurmd": Port.ANSWERS, "is_agent_linked": True, "witnesses": frozenset()}),
        (Act.WAIT, "1 of 2 witnesses", {"witnesses": frozenset(("n1",))}),
        (Act.WAIT, "0 of 2 witnesses", {"witnesses": frozenset(("n2", "n9", "n8"))}),
        (Act.WAIT, "reaches only", {"others_reached": 1, "claim": Claim.SURVIVOR}),
        (Act.WAIT, "slurmctld has answered", {"slurm_up_s": 3.0, "claim": Claim.SURVIVOR}),
        (Act.LEAVE, "other owners", {"strangers": frozenset((5002,))}),
        (Act.LEAVE, "fence_budget_nodes: 2 nodes", {"fenced": 2}),
        (Act.LEAVE, "fence_budget_nodes: 0 nodes", {"budget": 0}),
        (Act.LEAVE, "3 silent now", {"silent": 3}),
        (Act.LEAVE, "fence_budget_user_nodes: 2", {"user_fenced": 2, "budget": 100}),
        (Act.DISMISS, "allocation", {"node": "n4"}),
        (Act.DISMISS, "heterogeneous", {"is_het": True}),
        (Act.DISMISS, "--requeue", {"may_requeue": False}),
        (Act.DISMISS, "again", {"restarts": 1}),
        (Act.DISMISS, "restart 0", {"restarts": 2}),
        (Act.DISMISS, "long before", {"state": "FAILED", "end_time": JOB.start_time + 100}),
        (Act.DISMISS, "long before", {"state": "COMPLETED", "end_time": JOB.start_time + 100}),
        (Act.DISMISS, "had finished", {"state": "COMPLETED", "end_time": JOB.start_time + 499, "has_finished": True}),
        (Act.FENCE, "no answer", {"state": "FAILED", "end_time": JOB.start_time + 499, "has_finished": True}),
    ]
    for act, word, changes in cases:
        verdict = judge_case(case(**changes))
        assert verdict.act is act and word in verdict.why, (changes, verdict)


def test_one_witness_is_enough_where_only_one_node_is_left() -> None:
    assert judge_case(case(members=("n1", "n2"), witnesses=frozenset(("n1",)))).act is Act.FENCE
    both = case(suspects=frozenset(("n2", "n3")), witnesses=frozenset(("n1",)), silent=2, user_silent=2)
    assert judge_case(both).act is Act.FENCE


def test_strangers_where_the_site_allows_it() -> None:
    assert judge_case(case(strangers=frozenset((5002,)), is_guarded=False)).act is Act.FENCE


def test_slurm_was_first() -> None:
    assert judge_case(case(slurm_node=DOWN, silent_s=0.2)).act is Act.ADOPT
    assert judge_case(case(slurm_node=DOWN, silent_s=0.2, state="PENDING", restarts=1)).act is Act.ADOPT
    assert judge_case(case(slurm_node=DOWN, slurmd=Port.REFUSES)).act is Act.ADOPT
    assert judge_case(case(slurm_node=DOWN, slurmd=Port.HANGS, fenced=5)).act is Act.ADOPT
    assert judge_case(case(slurm_node=DOWN, slurmd=Port.ANSWERS)).act is Act.WAIT


def test_reboot() -> None:
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=REBOOTED)).act is Act.REQUEUE
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=REBOOTED, agent_silent_s=1.0)).act is Act.WAIT
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=REBOOTED, state="COMPLETING")).act is Act.WAIT
    long_ago = dataclasses.replace(NODE, slurmd_start=DEAD.found_at - 300)
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=long_ago)).act is Act.WAIT


def test_a_reboot_that_nobody_looked_at_counts_however_long_ago() -> None:
    """The job was suspended meanwhile. A slurmd that alone was started anew takes no agent with it."""
    start, before = DEAD.found_at - 300, DEAD.found_at - 5000
    booted = dataclasses.replace(NODE, slurmd_start=start, boot_time=start - 20)
    alone = dataclasses.replace(NODE, slurmd_start=start, boot_time=before - 100)
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=booted, slurmd_before=before)).act is Act.REQUEUE
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=alone, slurmd_before=before)).act is Act.WAIT
    assert judge_case(case(slurmd=Port.ANSWERS, slurm_node=booted, slurmd_before=0.0)).act is Act.WAIT


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10000))
def test_budget(configured: int, of_user: int, nodes: int) -> None:
    allowed = compute_budget(configured, nodes)
    assert allowed == 0 if configured == 0 else allowed == max(configured, nodes // 100)
    mine = compute_user_budget(of_user, allowed)
    assert mine <= allowed and (mine > 0) == (of_user > 0 and allowed > 0)


def test_default_budget_is_that_of_the_rules() -> None:
    default = Settings()
    assert (default.fence_budget_nodes, default.fence_budget_window_s, default.fence_confirm_s) == (2, 600.0, 5.0)
    assert default.node_max_jobs_guard and default.fence_budget_user_nodes == 2
    assert compute_user_budget(2, compute_budget(2, 1000)) == 5, "a large cluster has room for others"
