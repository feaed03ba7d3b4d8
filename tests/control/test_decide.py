"""The rules about silent nodes, and those about candidates, release and budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_hpc.control.decide import (
    Act,
    Case,
    Port,
    budget,
    candidates,
    candidates_wanted,
    decide,
    fits,
    held,
    release_reason,
)
from gemini_hpc.control.slurm.text import parse_node

from .scontrol_line import parse_job

LINE = (Path(__file__).parent / "recorded" / "22.05-job-running.txt").read_text().splitlines()[0]
JOB = parse_job(LINE)
NODE = parse_node("NodeName=n2 CPUTot=4 RealMemory=2000 NodeAddr=10.77.0.12 State=ALLOCATED Partitions=main")
DEAD = Case(
    node="n2",
    restart=0,
    members=("n1", "n2", "n3"),
    witnesses=frozenset(("n1", "n3")),
    suspects=frozenset(("n2",)),
    job=JOB,
    slurm_node=NODE,
    slurmd=Port.SILENT,
    agent=Port.SILENT,
    hangs=False,
    silent_s=6.0,
    agent_silent_s=6.0,
    agent_linked=False,
    slurmd_before=1000.0,
    reported_at=JOB.start_time + 500,
    strangers=frozenset(),
    others_reached=2,
    others_asked=2,
    fenced=0,
    budget=2,
    confirm_s=5.0,
    guard=True,
    slurm_up_s=1000.0,
    settle_s=60.0,
)


def case(**changes: Any) -> Case:
    job = {k: changes.pop(k) for k in list(changes) if k in {f.name for f in dataclasses.fields(JOB)} - {"job"}}
    changed = dataclasses.replace(DEAD, **changes)
    return dataclasses.replace(changed, job=dataclasses.replace(changed.job, **job)) if job else changed


def test_a_dead_node_is_fenced() -> None:
    assert decide(DEAD).act is Act.FENCE


@pytest.mark.parametrize(
    ("act", "word", "changes"),
    [
        (Act.DISMISS, "false suspicion", {"slurmd": Port.ANSWERS, "agent": Port.ANSWERS}),
        (Act.DISMISS, "false suspicion", {"slurmd": Port.ANSWERS, "agent_linked": True}),
        (Act.WAIT, "only the agent", {"slurmd": Port.ANSWERS}),
        (Act.WAIT, "kernel lives", {"slurmd": Port.REFUSES}),
        (Act.WAIT, "slurmd is silent but the agent", {"agent": Port.REFUSES}),
        (Act.WAIT, "slurmd is silent but the agent", {"agent": Port.ANSWERS}),
        (Act.WAIT, "silent for", {"silent_s": 4.9}),
        (Act.WAIT, "1 of 2 witnesses", {"witnesses": frozenset(("n1",))}),
        (Act.WAIT, "0 of 2 witnesses", {"witnesses": frozenset(("n2", "n9", "n8"))}),
        (Act.WAIT, "reaches only", {"others_reached": 1}),
        (Act.DISMISS, "other owners", {"strangers": frozenset((5002,))}),
        (Act.DISMISS, "budget", {"fenced": 2}),
        (Act.DISMISS, "budget", {"budget": 0}),
        (Act.DISMISS, "allocation", {"node": "n4"}),
        (Act.DISMISS, "heterogeneous", {"het": True}),
        (Act.DISMISS, "array record", {"array_job_id": 1, "array_task_id": "1-3"}),
        (Act.DISMISS, "--requeue", {"requeue": False}),
        (Act.DISMISS, "batch", {"batch": False}),
        (Act.DISMISS, "COMPLETED", {"state": "COMPLETED"}),
        (Act.DISMISS, "CANCELLED", {"state": "CANCELLED"}),
        (Act.DISMISS, "SUSPENDED", {"state": "SUSPENDED"}),
        (Act.DISMISS, "again", {"restarts": 1}),
        (Act.DISMISS, "restart 0", {"restarts": 2}),
        (Act.DISMISS, "long before", {"state": "FAILED", "end_time": JOB.start_time + 100}),
    ],
)
def test_vetoes(act: Act, word: str, changes: dict[str, Any]) -> None:
    decision = decide(case(**changes))
    assert decision.act is act and word in decision.why


def test_one_witness_is_enough_where_only_one_node_is_left() -> None:
    two = case(members=("n1", "n2"), witnesses=frozenset(("n1",)))
    assert decide(two).act is Act.FENCE
    both = case(suspects=frozenset(("n2", "n3")), witnesses=frozenset(("n1",)))
    assert decide(both).act is Act.FENCE


def test_slurm_was_first() -> None:
    down = dataclasses.replace(NODE, state="DOWN")
    assert decide(case(slurm_node=down, silent_s=0.2)).act is Act.ADOPT
    assert decide(case(slurm_node=down, silent_s=0.2, state="PENDING", restarts=1)).act is Act.ADOPT
    assert decide(case(slurm_node=down, slurmd=Port.REFUSES)).act is Act.ADOPT
    assert decide(case(slurm_node=down, slurmd=Port.ANSWERS)).act is Act.WAIT


def test_a_script_that_ended_just_before_the_report() -> None:
    assert decide(case(state="FAILED", end_time=DEAD.reported_at - 3)).act is Act.FENCE


def test_reboot() -> None:
    fresh = dataclasses.replace(NODE, slurmd_start=DEAD.reported_at - 2)
    assert decide(case(slurmd=Port.ANSWERS, slurm_node=fresh)).act is Act.REQUEUE
    assert decide(case(slurmd=Port.ANSWERS, slurm_node=fresh, agent_silent_s=1.0)).act is Act.WAIT
    assert decide(case(slurmd=Port.ANSWERS, slurm_node=fresh, state="COMPLETING")).act is Act.WAIT
    long_ago = dataclasses.replace(NODE, slurmd_start=DEAD.reported_at - 300)
    assert decide(case(slurmd=Port.ANSWERS, slurm_node=long_ago)).act is Act.WAIT


PORTS = st.sampled_from(Port)
HOSTS = st.frozensets(st.sampled_from(("n1", "n2", "n3", "n4")))


@settings(max_examples=400)
@given(
    slurmd=PORTS,
    agent=PORTS,
    hangs=st.booleans(),
    silent=st.floats(0, 20),
    up=st.floats(0, 120),
    witnesses=HOSTS,
    suspects=HOSTS,
    linked=st.booleans(),
    strangers=st.frozensets(st.integers(1, 3)),
    reached=st.integers(0, 10),
    fenced=st.integers(0, 3),
    state=st.sampled_from(("RUNNING", "COMPLETING", "PENDING", "FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")),
    restarts=st.integers(0, 2),
    requeue=st.booleans(),
    node=st.sampled_from(("n2", "n4")),
)
def test_site_02_fencing_needs_everything(
    slurmd: Port,
    agent: Port,
    hangs: bool,
    silent: float,
    up: float,
    witnesses: frozenset[str],
    suspects: frozenset[str],
    linked: bool,
    strangers: frozenset[int],
    reached: int,
    fenced: int,
    state: str,
    restarts: int,
    requeue: bool,
    node: str,
) -> None:
    tried = case(
        slurmd=slurmd,
        agent=agent,
        hangs=hangs,
        silent_s=silent,
        slurm_up_s=up,
        witnesses=witnesses,
        suspects=suspects | {node},
        agent_linked=linked,
        strangers=strangers,
        others_reached=reached,
        others_asked=10,
        fenced=fenced,
        state=state,
        restarts=restarts,
        requeue=requeue,
        node=node,
    )
    if decide(tried).act is not Act.FENCE:
        return
    quiet = (Port.SILENT, Port.HANGS)
    assert slurmd in quiet and agent in quiet and not linked and up >= 60
    assert silent >= tried.confirm_s * (3 if hangs else 1)
    assert not strangers and reached >= 9 and fenced < tried.budget and requeue and node == "n2"
    assert state in ("RUNNING", "COMPLETING", "PENDING", "FAILED") and restarts <= 1
    assert (witnesses & {"n1", "n3"}) - suspects


@given(st.integers(0, 10), st.integers(0, 10000))
def test_budget(configured: int, nodes: int) -> None:
    allowed = budget(configured, nodes)
    assert allowed == 0 if configured == 0 else allowed == max(configured, nodes // 100)


def test_site_03_default_budget_is_that_of_the_site_rules() -> None:
    from gemini_hpc.config import Settings

    default = Settings()
    assert (default.fence_budget_nodes, default.fence_budget_window_s, default.fence_confirm_s) == (2, 600.0, 5.0)
    assert default.node_max_jobs_guard


def test_candidates_fit_and_idle_ones_come_first() -> None:
    nodes = {
        name: parse_node(f"NodeName={name} CPUTot={cpus} RealMemory=2000 State={state} Partitions={part}")
        for name, cpus, state, part in (
            ("n1", 4, "ALLOCATED", "main"),
            ("n4", 4, "MIXED", "main"),
            ("n5", 4, "IDLE", "main"),
            ("n6", 4, "IDLE", "other"),
            ("n7", 4, "IDLE+DRAIN", "main"),
            ("n8", 4, "IDLE+RESERVED", "main"),
            ("n9", 1, "IDLE", "main"),
        )
    }
    job = dataclasses.replace(JOB, min_cpus=2)
    assert [n.name for n in candidates(job, nodes, ["n1"], ["n8"])] == ["n5", "n4"]
    wanting = dataclasses.replace(job, features="gpu&ib")
    assert not fits(wanting, nodes["n5"])
    assert fits(wanting, dataclasses.replace(nodes["n5"], features=frozenset(("gpu", "ib"))))


@pytest.mark.parametrize(
    ("state", "ended", "free"),
    [
        ("RUNNING", None, False),
        ("PENDING", None, False),
        ("COMPLETED", 0.0, True),
        ("CANCELLED", 0.0, True),
        ("FAILED", 10.0, False),
        ("FAILED", 900.0, True),
        ("TIMEOUT", 0.0, True),
        ("NODE_FAIL", 1000.0, True),
        (None, None, True),
        (None, 10.0, False),
        (None, 900.0, True),
    ],
)
def test_release(state: str | None, ended: float | None, free: bool) -> None:
    assert bool(release_reason(state, ended, 900.0)) is free


def test_site_11_reasons_that_no_node_can_help() -> None:
    assert held("JobHeldUser") and held("QOSMaxJobsPerUserLimit") and held("AssocGrpCpuLimit") and held("Dependency")
    assert not held("Resources") and not held("BeginTime") and not held("Priority") and not held("")
    assert not held("ReqNodeNotAvail, UnavailableNodes:n2")


def test_site_11_candidates_have_the_gres() -> None:
    asked = dataclasses.replace(JOB, gres_per_node={"gpu:a100": 2})
    assert not fits(asked, NODE)
    assert fits(asked, dataclasses.replace(NODE, gres={"gpu": 4, "gpu:a100": 4}))
    assert not fits(asked, dataclasses.replace(NODE, gres={"gpu": 4, "gpu:v100": 4}))


def test_site_11_one_percent_of_a_large_partition() -> None:
    cluster = {f"n{i}": NODE for i in range(1000)}
    assert candidates_wanted(JOB, cluster, 1, 2) == 11
    assert candidates_wanted(JOB, {"n1": NODE}, 1, 2) == 3
    elsewhere = {f"n{i}": dataclasses.replace(NODE, partitions=("other",)) for i in range(1000)}
    assert candidates_wanted(JOB, elsewhere, 1, 2) == 3
