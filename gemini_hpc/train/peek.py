"""The version that a training would resume from, before any of the training is built."""

from __future__ import annotations

import os

import torch.distributed as dist

from gemini_hpc import lines
from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.train import arguments
from gemini_hpc.train.meeting import Meetings
from gemini_hpc.train.state import collectives
from gemini_hpc.wire.stored import Tier


def peek(name: str = "default", *, tier: str | Tier = "", process_group: dist.ProcessGroup | None = None) -> int:
    """Return the version that `resume()` is about to restore, or 0 without a version or an agent.

    Use it in a script that builds something else after so many steps: further layers, another parameter group. Call
    it on every rank, after `init_process_group` if there are several ranks: it is collective. The arguments equal
    those of `Checkpointer`. The version of `resume()` is the final one: a copy found damaged there leads to an older
    version.
    """
    path = os.environ.get(joining.SOCKET_ENV, "")
    ranks = arguments.build_ranks(process_group)
    distributed = ranks.group is not None
    rank = ranks.rank if distributed else parse_number(os.environ.get("RANK", ""))
    world = ranks.world if distributed else parse_number(os.environ.get("WORLD_SIZE", ""), 1)
    found, why = 0, ""
    Meetings(ranks, name, lines.write_line).meet("peek()")
    if path:
        local_rank = parse_number(os.environ.get("LOCAL_RANK", ""), parse_number(os.environ.get("SLURM_LOCALID", "")))
        hello = joining.build_hello(name, rank, world, local_rank, Tier.from_argument(tier))
        client = AgentClient(path, lambda welcome, exchange: False, lambda: None)
        try:
            found = client.join_training(hello, lambda waited_s, why: None).chosen_version
        except (AgentLost, AgentRefused) as error:
            found, why = -1, str(error)
        finally:
            client.close()
    if distributed and world > 1:  # also keeps ranks from beginning another round before all have an answer
        everywhere = collectives.gather_word(found, ranks.group)
        found = found if all(other == found for other in everywhere) else -1
    if found < 0:
        if why or rank == 0:
            text = why or "the agents do not agree, or one could not be reached"
            lines.write_line(f"rank {rank}: cannot find out what there is to resume from: {text}")
        return 0
    return found
