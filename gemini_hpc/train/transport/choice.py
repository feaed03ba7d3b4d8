"""Which transport a training uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist

    from gemini_hpc.client.agent_connection import AgentClient
    from gemini_hpc.train.transport.base import Transport

Kind = Literal["auto", "gloo", "host", "mpi", "nccl"]


class Chosen(NamedTuple):
    """problem: why it is not what was asked for, in a sentence for the user; "": it is."""

    transport: Transport
    problem: str = ""


def make(
    kind: Kind,
    client: AgentClient,
    set_name: str,
    rank: int,
    homes: Sequence[int],
    within: dist.ProcessGroup | None = None,
) -> Chosen:
    """The transport of this kind, or "host" where this one cannot be had: the same on all ranks. Collective over the
    training's ranks: those of `within`, None: of the default process group. "auto" is "host": NCCL has not been
    measured on GPUs to be better. "nccl" has the links of gloo, for what does not go from GPU to GPU. homes: the node
    rank of each training rank."""
    if kind in ("gloo", "nccl"):
        from gemini_hpc.train.transport.gloo import GlooTransport

        return Chosen(GlooTransport(within=within))
    from gemini_hpc.train.transport.host import HostTransport

    problem = ""
    if kind == "mpi":
        from gemini_hpc.train.transport.mpi import MpiTransport

        try:
            return Chosen(MpiTransport(within=within))
        except ValueError as error:
            problem = f'transport="mpi" cannot be used, the copies travel over host: {error}'
    return Chosen(HostTransport(client, set_name, rank, homes, within), problem)
