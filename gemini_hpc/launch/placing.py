"""RANK and its companions in a job with spares, where Slurm's task numbers do not show which nodes train."""

from __future__ import annotations

from collections.abc import Mapping

from gemini_hpc.client.joining import SPARES_ENV
from gemini_hpc.core import hostlist
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.wire import local, ports


class Uneven(ValueError):
    """An error: the step has different numbers of tasks on its nodes."""


def count_tasks_per_node(environ: Mapping[str, str]) -> int:
    """Return the number of tasks on each node of this step from Slurm's variables: "2(x4)" is 2.

    Raises:
        Uneven: The nodes have different numbers of tasks.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    counts = {part.partition("(")[0] for part in text.split(",")}
    count = parse_number(counts.pop())
    if counts or not 0 < count < 100_000:
        what = "a job with spares needs the same number of tasks on each node (srun --ntasks-per-node)"
        raise Uneven(f"{what}, and this step has {text[:100]}")
    return count


def count_spares(environ: Mapping[str, str]) -> int:
    """Return the number of the job's nodes that wait to replace a lost one."""
    return parse_number(environ.get(SPARES_ENV, ""))


def place_without_agent(environ: Mapping[str, str]) -> local.Place:
    """Return this node's place, by position in Slurm's list, in a job with spares that no agent protects.

    Raises:
        ValueError: Slurm's variables are missing.
    """
    hosts = hostlist.expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    if not hosts:
        raise ValueError("a job with spares needs Slurm's list of its hosts, and SLURM_JOB_NODELIST is not set")
    nodes, position = max(1, len(hosts) - count_spares(environ)), parse_number(environ.get("SLURM_NODEID", ""))
    port = ports.compute_master_port(
        parse_number(environ.get("SLURM_JOB_ID", "")), parse_number(environ.get("SLURM_RESTART_COUNT", ""))
    )
    return local.Place(position if position < nodes else -1, nodes, hosts[0], port)


def build_rank_environment(environ: Mapping[str, str], place: local.Place) -> dict[str, str]:
    """Return the variables that torch.distributed reads, for a node of this place.

    Raises:
        Uneven: The nodes have different numbers of tasks.
    """
    tasks_per_node, local_rank = count_tasks_per_node(environ), parse_number(environ.get("SLURM_LOCALID", ""))
    return {
        "RANK": str(place.node_rank * tasks_per_node + local_rank),
        "WORLD_SIZE": str(place.nodes * tasks_per_node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(tasks_per_node),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(ports.compute_step_port(place.port, parse_number(environ.get("SLURM_STEP_ID", "")))),
    }
