"""Thirty faults that one training meets, one after the other: each costs one step at most."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import LiteJob

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1500)]

ROUNDS, SEED = 5, 1
STOPPED_S = 3.0
Line = dict[str, Any]


def place(job: LiteJob, chance: random.Random) -> Line:
    """Return the newest line of a rank that trains now."""
    ranks = {line["node_rank"]: line for line in job.lines("resumed")}
    return ranks[chance.choice(sorted(ranks))]


def signal(job: LiteJob, line: Line, name: str) -> str:
    assert job.cluster.exec(line["node"], ["kill", f"-{name}", str(line["pid"])]).returncode == 0, job.story()
    return f"SIG{name} to rank {line['rank']} on {line['node']}"


def kill_rank(job: LiteJob, chance: random.Random) -> str:
    return signal(job, place(job, chance), "KILL")


def crash_rank(job: LiteJob, chance: random.Random) -> str:
    return signal(job, place(job, chance), "SEGV")


def stop_rank(job: LiteJob, chance: random.Random) -> str:
    line = place(job, chance)
    told = signal(job, line, "STOP")
    time.sleep(STOPPED_S)
    signal(job, line, "CONT")
    return f"{told}, SIGCONT after {STOPPED_S:g} s"


def kill_agent(job: LiteJob, chance: random.Random) -> str:
    node = place(job, chance)["node"]
    assert job.cluster.exec(node, ["kill", "-9", str(job.agent_pid(node))]).returncode == 0, job.story()
    return f"SIGKILL to the agent on {node}"


def kill_launcher(job: LiteJob, chance: random.Random) -> str:
    line = place(job, chance)
    launcher = job.cluster.exec(line["node"], ["ps", "-o", "ppid=", "-p", str(line["pid"])]).stdout.strip()
    assert job.cluster.exec(line["node"], ["kill", "-9", launcher]).returncode == 0, job.story()
    return f"SIGKILL to the launcher of rank {line['rank']} on {line['node']}"


def cut_node(job: LiteJob, chance: random.Random) -> str:
    node = place(job, chance)["node"]
    batch = " (with the batch script)" if node == job.hosts()[0] else ""
    job.cluster.power_off(node)
    return f"power cut of {node}{batch}"


FAULTS: tuple[Callable[[LiteJob, random.Random], str], ...] = (
    kill_rank,
    crash_rank,
    kill_agent,
    stop_rank,
    kill_launcher,
    cut_node,
)


def repair(cluster: Cluster) -> None:
    """Give all nodes their power back, as a site would within the hour."""
    for node in cluster.node_names:
        if not cluster.is_on(node):
            cluster.power_on(node)
        if "down" in cluster.node_state(node) or "drain" in cluster.node_state(node):
            cluster.resume(node)


def launches(job: LiteJob, since: float) -> dict[tuple[int, str], list[Line]]:
    """Return the lines with which ranks began after a moment, by restart and launch."""
    found: dict[tuple[int, str], list[Line]] = {}
    for line in job.lines("resumed"):
        found.setdefault((line["restart"], line["step"]), []).append(line)
    return {key: lines for key, lines in found.items() if min(line["t"] for line in lines) > since}


def outcome(job: LiteJob, since: float) -> tuple[str, int]:
    """Return what a fault has cost, in words, and the steps that were repeated."""
    most, words = 0, []
    for (restart, step), lines in launches(job, since).items():
        assert len({line["version"] for line in lines}) == 1, job.story()
        repeated = job.completed(min(line["t"] for line in lines)) - lines[0]["version"]
        most = max(most, repeated)
        words.append(f"restart {restart} launch {step} from version {lines[0]['version']}, {repeated} repeated")
    return "; ".join(words) or "the training went on", most


def suffer(job: LiteJob, chance: random.Random) -> tuple[list[str], int]:
    """Let all faults happen; return what each has cost, and the most steps that one has had repeated."""
    table, worst = [], 0
    for number in range(ROUNDS * len(FAULTS)):
        began = time.time()
        what = FAULTS[number % len(FAULTS)](job, chance)
        time.sleep(0.5)
        job.reach(job.completed(time.time()) + 5, timeout_s=120)
        words, repeated = outcome(job, began)
        worst = max(worst, repeated)
        table.append(f"{number + 1:2} {what}: {words} ({time.time() - began:.0f} s)")
        print(table[-1], flush=True)
        repair(job.cluster)
    return table, worst


def test_thirty_faults() -> None:
    settings: dict[str, int | str | float | bool] = {"fence_budget_nodes": 1000, "fence_budget_user_nodes": 1000}
    with Cluster.up(f"thirty{os.getpid()}", nodes=7, settings=settings) as cluster:
        job = LiteJob(
            cluster,
            run="gemini-hpc run -- srun --kill-on-bad-exit=1",
            python="python -m gemini_hpc.launch",
            options=("-N4", "--no-kill", "--gemini-spares=1"),
        ).submit()
        job.reach(10)
        table, worst = suffer(job, random.Random(SEED))
        job.finish()
    assert worst <= 1, "\n".join(table)
