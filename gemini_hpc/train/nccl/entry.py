"""Entry to copies over NCCL for the engine; imported only where `transport="nccl"` is requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from gemini_hpc.client.session import RankSession
from gemini_hpc.format.slot_header import SlotLayout
from gemini_hpc.train.nccl.driver import Driver
from gemini_hpc.train.nccl.gloo_links import GlooLinks, MessageOutbox
from gemini_hpc.train.nccl.joint_planner import JointPlanner
from gemini_hpc.train.nccl.negotiation import Joined, negotiate
from gemini_hpc.train.nccl.receiver import Receiver
from gemini_hpc.train.nccl.streamed_replicator import StreamedReplicator
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state.capture import Capture


def join(
    session: RankSession,
    tensors: Sequence[torch.Tensor],
    layout: SlotLayout,
    all_ranks: Callable[[bytes], list[bytes]],
    within: dist.ProcessGroup | None,
) -> tuple[OverNccl | None, str]:
    """Use NCCL on all ranks or on none. Collective. Return this rank's end, or None and the reason.

    Args:
        session: The rank's session.
        tensors: Tensors that this rank protects.
        layout: Layout of its shard.
        all_ranks: Gives every rank the data of all ranks.
        within: Process group of the ranks; None: the default group.
    """
    joined, reason = negotiate(session.rank, tensors, layout, session.targets, all_ranks)
    return (OverNccl(session, joined, GlooLinks(within)), "") if joined is not None else (None, reason)


class OverNccl:
    """A rank's end of the communicator, and its links for the data that do not go from GPU to GPU."""

    driver: Driver

    def __init__(self, session: RankSession, joined: Joined, links: GlooLinks) -> None:
        self._session, self._joined, self._links = session, joined, links

    def drive(self, traffic: Traffic, capture: Capture, pacer: Pacer) -> Driver:
        """Create the driver; called once."""
        self.driver = Driver(self._joined, traffic, self._session, capture, pacer)
        return self.driver

    def build_outboxes(self) -> dict[int, MessageOutbox]:
        """Create the links to the holders of this rank's shard."""
        return {rank: self._links.build_outbox(rank) for rank in self._session.outgoing}

    @property
    def replicator(self) -> Callable[..., StreamedReplicator]:
        """Return the factory that replaces `Replicator`."""
        return partial(StreamedReplicator, driver=self.driver)

    def build_receivers(self) -> list[Receiver]:
        """Create the receivers of the shards that this rank holds for other ranks."""
        session, links = self._session, self._links
        return [Receiver(session, links.build_inbox(rank), rank, self.driver) for rank in session.incoming]

    def install_planner(self, monitor: CollectiveMonitor) -> Callable[..., JointPlanner]:
        """Return the factory that replaces `Planner`. The driver sees the training's collectives from now on."""
        self.driver.install_hooks(monitor)
        return partial(JointPlanner, driver=self.driver, watch=monitor)

    def interrupt(self) -> None:
        """End all waits on the links. Thread-safe."""
        self._links.interrupt()
