"""Which transport a training uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from gemini_hpc.train.client import AgentClient
    from gemini_hpc.train.transport.base import Transport

Kind = Literal["auto", "gloo", "host", "mpi", "nccl"]
_NAMED = 5  # node ranks in a sentence


class Chosen(NamedTuple):
    """problem: why it is not what was asked for, in a sentence for the user; "": it is."""

    transport: Transport
    problem: str = ""


def make(
    kind: Kind, client: AgentClient, set_name: str, rank: int, homes: Sequence[int], protocols: Sequence[int]
) -> Chosen:
    """The transport of this kind, or of "auto" where this one cannot be had: the same on all ranks. Collective over
    the default process group. "nccl" has the links of gloo, for what does not go from GPU to GPU. Of each training
    rank, homes: its node rank; protocols: what its agent speaks."""
    problem = ""
    if kind == "host":
        problem = _strangers_to_pushes(homes, protocols)
        if not problem:
            from gemini_hpc.train.transport.host import HostTransport

            return Chosen(HostTransport(client, set_name, rank, homes))
    elif kind == "mpi":
        from gemini_hpc.train.transport.mpi import MpiTransport

        try:
            return Chosen(MpiTransport())
        except ValueError as error:
            problem = str(error)
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
