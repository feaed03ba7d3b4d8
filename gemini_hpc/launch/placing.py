"""RANK and its companions in a job with spares, where Slurm's task numbers say nothing of who trains."""

from __future__ import annotations

from collections.abc import Mapping

from gemini_hpc.wire import local

PORTS = 16  # a step takes its MASTER_PORT from the job's base and its own number modulo this


class Uneven(ValueError):
    """The step has not the same number of tasks on each node."""


def tasks_per_node(environ: Mapping[str, str]) -> int:
    """Of this step, from Slurm's variables: "2(x4)" is 2. Raises `Uneven`."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    counts = {part.partition("(")[0] for part in text.split(",")}
    count = counts.pop()
    if counts or not (count.isascii() and count.isdigit() and 0 < int(count) < 100_000):
        raise Uneven(f"a job with spares needs the same number of tasks on each node, and this step has {text[:100]}")
    return int(count)


def rank_environment(environ: Mapping[str, str], place: local.Place) -> dict[str, str]:
    """What torch.distributed reads, on a node of this place. Raises `Uneven`."""
    here, task, step = tasks_per_node(environ), environ.get("SLURM_LOCALID", "0"), environ.get("SLURM_STEP_ID", "0")
    local_rank = int(task) if task.isascii() and task.isdigit() else 0
    number = int(step) % PORTS if step.isascii() and step.isdigit() else 0
    return {
        "RANK": str(place.node_rank * here + local_rank),
        "WORLD_SIZE": str(place.nodes * here),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port + number),
    }
