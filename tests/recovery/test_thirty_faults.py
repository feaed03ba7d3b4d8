"""Thirty faults that one training meets, one after the other: each costs one step at most.

On a cluster as sites have it: Slurm tracks processes by cgroups, and the kernel holds the job to its memory.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import LiteJob
from waiting import until

from gemini_hpc.devcluster import cgroups
from gemini_hpc.devcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

ROUNDS, SEED = 3, 1
STOPPED_S = 3.0
TOLD_S = 60.0
MEMORY_MB = 300
LACKING = f"ended with SIGKILL (out of memory: the limit here is {MEMORY_MB} MiB); starting all ranks again"
ONCE_S = 2.0  # for a signal that would come twice
Line = dict[str, Any]


def places(job: LiteJob) -> dict[int, Line]:
    """Return the newest line of each rank that trains now."""
    return {line["node_rank"]: line for line in job.lines("resumed")}


def place(job: LiteJob, chance: random.Random) -> Line:
    """Return that of one of them."""
    ranks = places(job)
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


def starve_rank(job: LiteJob, chance: random.Random) -> str:
    """More than the job's --mem: told with the limit, and no fault of the node's."""
    line, known = place(job, chance), job.output().count(LACKING)
    signal(job, line, "USR2")
    until(lambda: job.output().count(LACKING) > known, TOLD_S, what="the output names the limit")
    until(lambda: places(job)[line["node_rank"]]["t"] > line["t"], TOLD_S, what="the rank is back")
    assert places(job)[line["node_rank"]]["node"] == line["node"], job.story()
    return f"rank {line['rank']} on {line['node']} takes more than {MEMORY_MB} MiB"


def kill_agent(job: LiteJob, chance: random.Random) -> str:
    node = place(job, chance)["node"]
    assert job.cluster.exec(node, ["kill", "-9", str(job.agent_pid(node))]).returncode == 0, job.story()
    return f"SIGKILL to the agent on {node}"


def starve_agent(job: LiteJob, chance: random.Random) -> str:
    node = place(job, chance)["node"]
    job.starve_agent(node)
    return f"the agent on {node} takes more than its limit"


def kill_launcher(job: LiteJob, chance: random.Random) -> str:
    line = place(job, chance)
    launcher = job.cluster.exec(line["node"], ["ps", "-o", "ppid=", "-p", str(line["pid"])]).stdout.strip()
    assert job.cluster.exec(line["node"], ["kill", "-9", launcher]).returncode == 0, job.story()
    return f"SIGKILL to the launcher of rank {line['rank']} on {line['node']}"


def send(job: LiteJob, name: str) -> str:
    done = job.cluster.run(["scancel", f"--signal={name}", str(job.id)], user="alice")
    assert done.returncode == 0, done.stderr
    return f"scancel --signal={name}"


def signal_job(job: LiteJob, _: random.Random) -> str:
    """Each rank gets it once, from Slurm or from its launcher, and goes on."""
    known = len(job.lines("USR1"))
    told = send(job, "USR1")
    until(lambda: len(job.lines("USR1")) - known >= job.nodes, TOLD_S, what=f"USR1 at each rank\n{job.story()}")
    time.sleep(ONCE_S)
    ranks = sorted(line["rank"] for line in job.lines("USR1")[known:])
    assert ranks == list(range(job.nodes)), job.story()
    return f"{told}, which reached ranks {ranks}"


def end_step(job: LiteJob, _: random.Random) -> str:
    """The ranks do not mind SIGTERM: it ends them, and `gemini-hpc run` starts the next step."""
    before = places(job)
    told = send(job, "TERM")
    until(lambda: all(line["step"] != before[rank]["step"] for rank, line in places(job).items()), TOLD_S)
    return told


def cut_node(job: LiteJob, chance: random.Random) -> str:
    node = place(job, chance)["node"]
    batch = " (with the batch script)" if node == job.hosts()[0] else ""
    job.cluster.cut_power(node)
    return f"power cut of {node}{batch}"


Fault = Callable[[LiteJob, random.Random], str]
FAULTS: tuple[Fault, ...] = (
    kill_rank,
    starve_rank,
    kill_agent,
    signal_job,
    crash_rank,
    starve_agent,
    stop_rank,
    end_step,
    kill_launcher,
    cut_node,
)


def repair(job: LiteJob) -> None:
    """Give all nodes their power back, as a site would within the hour: not before Slurm knows that they are down."""
    cluster = job.cluster
    for node in cluster.node_names:
        if not cluster.is_on(node):
            until(lambda: node in job.refused(), TOLD_S, what=f"{node} is down")  # noqa: B023
            cluster.restore_power(node)
    for node in job.refused():
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
        began, fault = time.time(), FAULTS[number % len(FAULTS)]
        what = fault(job, chance)
        time.sleep(0.5)
        job.reach(job.completed(time.time()) + 5, timeout_s=240)
        words, repeated = outcome(job, began)
        worst = max(worst, repeated)
        table.append(f"{number + 1:2} {what}: {words} ({time.time() - began:.0f} s)")
        print(table[-1], flush=True)
        assert fault is cut_node or not job.refused(), f"{what}\n{job.story()}"
        repair(job)
    return table, worst


def test_thirty_faults() -> None:
    if why := cgroups.find_tracking_problem():
        pytest.skip(f"`up` says so: {why}")
    settings: dict[str, int | str | float | bool] = {"fence_budget_nodes": 1000, "fence_budget_user_nodes": 1000}
    with Cluster.bring_up(f"thirty{os.getpid()}", nodes=7, profile="site", settings=settings) as cluster:
        job = LiteJob(
            cluster,
            run="env LITE_SIGNALS=1 gemini-hpc run -- srun --kill-on-bad-exit=1",
            python="python -m gemini_hpc.launch",
            options=("-N4", "--no-kill", "--gemini-spares=1", f"--mem={MEMORY_MB}"),
        ).submit()
        job.reach(10)
        table, worst = suffer(job, random.Random(SEED))
        job.finish()
    assert worst <= 1, "\n".join(table)
