"""What a training would resume from, before anything of it is built."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from gemini_hpc.client import joining
from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.train import arguments
from gemini_hpc.train.meeting import Meetings
from gemini_hpc.train.state import collectives
from gemini_hpc.wire.stored import Tier


def peek(name: str = "default", *, tier: str | Tier = "", process_group: dist.ProcessGroup | None = None) -> int:
    """The version that `resume()` is about to restore; 0 where there is none, or no agent.

    For a script that builds something else after so many steps: further layers, another parameter group. Call it on
    every rank, after `init_process_group` where there are several: it is collective. The arguments are those of
    `Checkpointer`. `resume()` says the final word: a copy that turns out damaged there leads to an older version.
    """
    path = os.environ.get(joining.SOCKET_ENV, "")
    ranks = arguments.ranks(process_group)
    distributed = ranks.group is not None
    rank = ranks.rank if distributed else _number("RANK", 0)
    world = ranks.world if distributed else _number("WORLD_SIZE", 1)
    found, why = 0, ""
    Meetings(ranks, name, _say).meet("peek()")
    if path:
        local_rank = _number("LOCAL_RANK", _number("SLURM_LOCALID", 0))
        hello = joining.hello(name, rank, world, local_rank, Tier.of(tier))
        client = AgentClient(path, lambda welcome, exchange: False, lambda: None)
        try:
            found = client.hello(hello, lambda waited_s, why: None).chosen_version
        except (AgentLost, AgentRefused) as error:
            found, why = -1, str(error)
        finally:
            client.close()
    if distributed and world > 1:  # also so that nobody begins another round before all have been answered
        everywhere = collectives.gather_word(found, ranks.group)
        found = found if all(other == found for other in everywhere) else -1
    if found < 0:
        if why or rank == 0:
            text = why or "the agents do not agree, or one could not be reached"
            _say(f"rank {rank}: cannot tell what there is to resume from: {text}")
        return 0
    return found


def _say(text: str) -> None:
    print(f"gemini-hpc: {text}", file=sys.stderr, flush=True)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else otherwise
