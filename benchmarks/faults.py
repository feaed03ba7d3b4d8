"""Other failures than one lost node: how long until the training goes on. Rows of the family `recovery`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.bench import USER, MeasureError, Options, cluster
from benchmarks.launched_job import Job
from benchmarks.rows import Row, median_row
from gemini_hpc.devcluster.cluster import Cluster

HANG_S = 5
_WITHIN_S = 180.0
_LAUNCH = "-m gemini_hpc.launch"
_SPARE = ("--no-kill", "--gemini-spares=1")
_END = "to the end of the first iteration after it"
Fault = Callable[[Cluster, Job], None]


@dataclass(frozen=True)
class Case:
    """A failure and the job that it meets: nodes of the job, more: of the cluster besides."""

    what: str
    strike: Fault
    nodes: int
    more: int
    job: dict[str, Any]


def measure(options: Options) -> list[Row]:
    """All rows."""
    runs = options.count(2)

    def run(name: str) -> list[float]:
        took, case = [], CASES[name]
        for at in range(runs):
            options.progress.say("recovery", f"{name} {at + 1} of {runs}")
            with cluster(case.nodes + case.more) as on:
                took.append(_strike(options, on, case))
        return took

    return [
        median_row(f"recovery.{name}_s", f"{CASES[name].what} {_END}", "s", took)
        for name, took in options.each(CASES, "evacuate", run)
    ]


def _strike(options: Options, on: Cluster, case: Case) -> float:
    job = Job(on, case.nodes, **case.job)
    try:
        job.warm(options)
        began = time.time()
        case.strike(on, job)
        return job.goes_on(began, _WITHIN_S)["first_iteration"]
    finally:
        job.end()


def _batch_host(on: Cluster, job: Job) -> None:
    on.cut_power(job.hosts()[0])


def _two_nodes(on: Cluster, job: Job) -> None:
    for node in job.hosts()[1:3]:
        on.cut_power(node)


def _evacuate(on: Cluster, job: Job) -> None:
    done = on.run(["gemini-hpc", "evacuate", str(job.id), job.hosts()[1]], user=USER)
    if done.returncode:
        raise MeasureError(f"evacuate: {done.stderr}")


def _signal(name: str) -> Fault:
    def strike(on: Cluster, job: Job) -> None:
        node = job.hosts()[-1]
        rank = on.exec(node, ["pgrep", "-n", "-f", "train_gpt.py"]).stdout.strip()
        done = on.exec(node, ["kill", f"-{name}", rank])
        if done.returncode:
            raise MeasureError(f"no rank on {node}: {done.stderr}")

    return strike


CASES = {
    "batch_host": Case(
        "power cut of the batch host, one of three nodes, two others there; Slurm requeues the job;",
        _batch_host,
        3,
        2,
        {"run": "srun"},
    ),
    "batch_host_spare": Case(
        "power cut of the batch host, one of four nodes with a spare among them: requeued all the same, for Slurm "
        "has no script without it;",
        _batch_host,
        4,
        2,
        {"run": "srun", "module": _LAUNCH, "options": _SPARE},
    ),
    "two_nodes": Case(
        "power cut of two of four nodes at once, m = 3, two others there;",
        _two_nodes,
        4,
        2,
        {"run": "srun", "replicas": 3},
    ),
    "rank": Case(
        "SIGKILL of one of two ranks, under launchers,",
        _signal("KILL"),
        2,
        0,
        {"run": "gemini-hpc run -- srun --kill-on-bad-exit=1", "module": _LAUNCH},
    ),
    "hang": Case(
        f"one of two ranks stops for ever (SIGSTOP), with a patience of {HANG_S} s (--gemini-hang={HANG_S}), under "
        "launchers,",
        _signal("STOP"),
        2,
        0,
        {"run": "srun", "module": _LAUNCH, "options": (f"--gemini-hang={HANG_S}",)},
    ),
    "evacuate": Case(
        "gemini-hpc evacuate of one of four nodes with a spare among them, from the call",
        _evacuate,
        4,
        0,
        {"run": "srun", "module": _LAUNCH, "options": _SPARE},
    ),
}
