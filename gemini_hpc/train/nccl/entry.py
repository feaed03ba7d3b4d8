"""Copies over NCCL as the engine has them made: imported only where `transport="nccl"` is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from gemini_hpc.client.session import Session
from gemini_hpc.format.slot_header import Layout
from gemini_hpc.train.nccl.driver import Driver
from gemini_hpc.train.nccl.gloo_links import GlooLinks
from gemini_hpc.train.nccl.joint_planner import JointPlanner
from gemini_hpc.train.nccl.messages import MessageOutbox
from gemini_hpc.train.nccl.negotiation import Joined, Proposal, meet
from gemini_hpc.train.nccl.streamed_replicator import StreamedReceiver, StreamedReplicator
from gemini_hpc.train.replication.registration import Identity
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.traffic import Traffic
from gemini_hpc.train.state.capture import Capture

Exchange = Callable[[bytes], list[bytes]]


def join(
    session: Session,
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    all_ranks: Exchange,
    within: dist.ProcessGroup | None,
) -> tuple[OverNccl | None, str]:
    """Take NCCL on all ranks, or on none, and say why. Collective. all_ranks: gives every rank what each of them
    says. within: the ranks; None: those of the default process group."""

    def proposals(mine: Proposal) -> list[Proposal]:
        return [msgspec.msgpack.decode(word, type=Proposal) for word in all_ranks(msgspec.msgpack.encode(mine))]

    joined, reason = meet(session.rank, tensors, layout, session.targets, proposals)
    return (OverNccl(session, joined, GlooLinks(within)), "") if joined is not None else (None, reason)


class OverNccl:
    """One rank's end of the communicator, and its links for what does not go from GPU to GPU."""

    driver: Driver

    def __init__(self, session: Session, joined: Joined, links: GlooLinks) -> None:
        self._session, self._joined, self._links = session, joined, links

    def drive(self, traffic: Traffic, me: Identity, capture: Capture, pacer: Pacer) -> Driver:
        """Make the driver, once."""
        session = self._session
        assert session.client is not None
        self.driver = Driver(
            self._joined,
            traffic,
            me,
            session.client,
            capture,
            session.gate,
            pacer,
            session.say,
            session.lose,
        )
        return self.driver

    def outboxes(self) -> dict[int, MessageOutbox]:
        """Make the links to the holders of this rank's shard."""
        return {rank: self._links.outbox(rank) for rank in self._session.outgoing}

    @property
    def replicator(self) -> Callable[..., StreamedReplicator]:
        """Return what is made in place of a `Replicator`."""
        return partial(StreamedReplicator, driver=self.driver)

    def receivers(self, me: Identity) -> list[StreamedReceiver]:
        """Make what takes the shards of other ranks that this one has to hold."""
        session = self._session
        assert session.client is not None
        return [
            StreamedReceiver(
                me,
                session.client,
                self._links.inbox(rank),
                rank,
                session.homes[rank],
                session.gate,
                seal_timeout_s=session.seal_timeout_s,
                say=session.note,
                driver=self.driver,
            )
            for rank in session.incoming
        ]

    def planner(self, monitor: CollectiveMonitor) -> Callable[..., JointPlanner]:
        """Return what is made in place of a `Planner`, and show the driver the training's collectives from now on."""
        self.driver.hook(monitor)
        return partial(JointPlanner, driver=self.driver, watch=monitor)

    def interrupt(self) -> None:
        """End all waits on the links. From any thread."""
        self._links.interrupt()
