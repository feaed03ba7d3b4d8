"""Which transport a training uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from gemini_hpc.client.agent_connection import AgentClient
    from gemini_hpc.train.transport.base import Transport

Kind = Literal["auto", "gloo", "host", "mpi", "nccl"]
# What "auto" takes, in order of preference. NCCL is not among them, also where all ranks could have it, until it has
# been measured on GPUs to be better than these.
AUTO: tuple[Kind, ...] = ("host", "gloo")
_NAMED = 5  # node ranks in a sentence


class Chosen(NamedTuple):
    """problem: why it is not what was asked for, in a sentence for the user; "": it is."""

    transport: Transport
    problem: str = ""


def make(
    kind: Kind, client: AgentClient, set_name: str, rank: int, homes: Sequence[int], protocols: Sequence[int]
) -> Chosen:
    """The transport of this kind, or of "auto" where this one cannot be had: the same on all ranks. Collective over
    the default process group. "auto" is the first of AUTO for which no agent is too old. "nccl" has the links
    of gloo, for what does not go from GPU to GPU. Of each training rank, homes: its node rank; protocols: what its
    agent speaks."""
    problem = ""
    if kind == "mpi":
        from gemini_hpc.train.transport.mpi import MpiTransport

        try:
            return Chosen(MpiTransport())
        except ValueError as error:
            problem = str(error)
    chosen: Transport | None = None
    ways: tuple[Kind, ...] = ("gloo",) if kind in ("gloo", "nccl") else AUTO
    if "host" in ways:
        too_old = _strangers_to_pushes(homes, protocols)
        if not too_old:
            from gemini_hpc.train.transport.host import HostTransport

            chosen = HostTransport(client, set_name, rank, homes)
        elif kind == "host":
            problem = too_old
    if chosen is None:
        from gemini_hpc.train.transport.gloo import GlooTransport

        chosen = GlooTransport()
    instead = f'transport="{kind}" cannot be used, the copies travel over {chosen.name}: {problem}'
    return Chosen(chosen, instead if problem else "")


def _strangers_to_pushes(homes: Sequence[int], protocols: Sequence[int]) -> str:
    """Whose agents are of a version that cannot bring the copies; "": nobody's. Each holder has ranks that speak for
    its agent."""
    from gemini_hpc.wire import peer, protocol

    wanted = protocol.SINCE[peer.PushAsk]
    nodes = sorted({home for home, speaks in zip(homes, protocols, strict=True) if speaks < wanted})
    if not nodes:
        return ""
    names = ", ".join(map(str, nodes[:_NAMED])) + (", ..." if len(nodes) > _NAMED else "")
    return (
        f"it needs agents that speak protocol {wanted}, and on node rank {names} they are older: install the same "
        "gemini-hpc on all hosts"
    )
