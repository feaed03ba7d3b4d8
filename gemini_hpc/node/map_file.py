"""The map file: an incarnation as the SPANK plugin and the batch script read it, all or nothing.

See requirement all-or-nothing-map.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

NAME = "map"
WAITING = "waiting"  # without a map, steps wait a moment: slurmd may have skipped the prolog (see `agent.wake_peers`)


def render(
    *,
    job: int,
    restart: int,
    nodelist: str,
    hosts: Sequence[str],
    noderanks: Mapping[str, int],
    host: str,
    master_port: int,
    socket_path: str,
    agent_port: int,
    epoch: int,
    map_hash: str,
) -> str:
    """Return the text of the map file.

    `hosts` are the nodes that train, in the order of Slurm's node list, which `nodelist` compresses. A spare has
    the node rank "spare".
    """
    by_rank = {rank: name for name, rank in noderanks.items()}
    lines = {
        "job": job,
        "restart": restart,
        "nodes": len(hosts),
        "nodelist": nodelist,
        "noderanks": ",".join(str(noderanks[h]) for h in hosts),
        "noderank": noderanks.get(host, "spare"),
        "master_addr": by_rank[0],
        "master_port": master_port,
        "socket": socket_path,
        "agent_port": agent_port,
        "epoch": epoch,
        "hash": map_hash,
    }
    return "GEMINI_MAP 1\n" + "".join(f"{k}={v}\n" for k, v in lines.items())


def write(directory: str, text: str) -> None:
    """Put the file in place atomically."""
    temporary = os.path.join(directory, f".{NAME}.{os.getpid()}")
    with open(temporary, "w", encoding="ascii") as f:
        f.write(text)
    os.replace(temporary, os.path.join(directory, NAME))
    end_wait(directory)


def remove(directory: str) -> None:
    """Remove the map: the job runs as under plain Slurm."""
    with suppress(OSError):  # the map is missing, or its directory is gone
        os.unlink(os.path.join(directory, NAME))


def begin_wait(directory: str) -> None:
    """Remove the map and mark that the agent has no notice of the next incarnation yet."""
    remove(directory)
    with suppress(OSError), open(os.path.join(directory, WAITING), "w", encoding="ascii"):
        pass


def end_wait(directory: str) -> None:
    """Remove the mark of `begin_wait`: the decision on the map has been made."""
    with suppress(OSError):
        os.unlink(os.path.join(directory, WAITING))
