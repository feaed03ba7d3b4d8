"""A job's share of a node, which is also its share of the memory for copies there.

slurmctld's credential holds the job's CPUs and GPUs, and slurmd passes them to the prolog. slurm.conf holds the
node's. The larger of the two shares counts. A job's memory does not count, because no prolog learns it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemini_hpc.core import conf_text, hostlist

MAX_NODES = 65536

_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_IN_PARENTHESES = re.compile(r"\([^()]*\)")


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a node that jobs can have; 0 means unknown.

    Attributes:
        cpus: The fewest CPUs that make up the whole node: its cores, if Slurm counts each thread of a core. A job
            with `--hint=nomultithread` is given one thread a core.
        gpus: Number of GPUs.
    """

    cpus: int = 0
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a node.

    `part` is from 0 to 1; `words` names the share for the user.
    """

    part: float
    words: str


WHOLE = Share(1.0, "")


def parse_shape(text: str, node: str) -> Shape:
    """Return the shape of a node by the text of slurm.conf, with its includes inserted.

    The last line that names the node counts. An unreadable line names no node.
    """
    defaults: dict[str, str] = {}
    found: dict[str, str] = {}
    for _, line in conf_text.split_lines(text):
        values = dict(conf_text.read_pairs(line))
        names = values.get("nodename", "")
        if names.lower() == "default":
            defaults |= values
        elif names and _names_node(names, node):
            found = defaults | values
    sockets = _read_number(found, "sockets", 0) or _read_number(found, "boards", 1) * _read_number(
        found, "socketsperboard", 1
    )
    threads = max(1, _read_number(found, "threadspercore", 1))
    threads_of_all = sockets * _read_number(found, "corespersocket", 1) * threads
    cpus = (
        _read_number(found, "cpus", 0)
        or _read_number(found, "procs", 0)
        or (threads_of_all if threads_of_all > 1 else 0)
    )
    if cpus == threads_of_all:
        cpus //= threads
    return Shape(max(0, cpus - _read_number(found, "corespeccount", 0)), _count_gpus(found.get("gres", "")))


def _names_node(text: str, node: str) -> bool:
    try:
        return node in hostlist.expand(text, MAX_NODES)
    except ValueError:
        return False


def _read_number(values: dict[str, str], key: str, default: int) -> int:
    text = values.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else default


def _count_gpus(gres: str) -> int:
    """Return the number of GPUs in a value such as gpu:a100:4(S:0),gpu:v100:2."""
    count = 0
    for item in _IN_PARENTHESES.sub("", gres).split(","):
        name, *more = item.split(":")
        if name == "gpu":
            last = more[-1] if more else "1"
            count += int(last) if last.isascii() and last.isdecimal() and len(last) < 8 else 1
    return count


def compute_share(shape: Shape, node: str, nodelist: str, cpus: str, gpus: str) -> Share:
    """Return the share of a job that has a part of a node; the whole node if the share cannot be known.

    Args:
        shape: Shape of the node.
        node: Name of the node.
        nodelist: Hostlist expression of the job's nodes.
        cpus: Value of SLURM_JOB_CPUS_PER_NODE.
        gpus: Value of SLURM_JOB_GPUS.
    """
    own_cpus = _count_cpus(cpus, node, nodelist)
    if not own_cpus or not shape.cpus:
        return WHOLE
    parts = [Share(own_cpus / shape.cpus, f"{own_cpus} of {shape.cpus} CPUs")]
    if gpus:
        count = sum(_count_indices(item) for item in gpus.split(","))
        if not shape.gpus:
            return WHOLE
        parts.append(Share(count / shape.gpus, f"{count} of {shape.gpus} GPUs"))
    largest = max(parts, key=lambda share: share.part)
    return largest if largest.part < 1 else WHOLE


def _count_cpus(cpus: str, node: str, nodelist: str) -> int:
    """Return the count of this node in a text such as 4(x2),2, which follows the list; 0 if unknown."""
    try:
        at = hostlist.expand(nodelist, MAX_NODES).index(node)
    except ValueError:
        return 0
    return hostlist.find_count(cpus, at)


def _count_indices(item: str) -> int:
    match = _RANGE.fullmatch(item)
    return max(1, int(match[2]) - int(match[1]) + 1) if match else 1
