"""The shard of another rank, filled here with the state that this rank has as well.

Where the state is replicated over nodes (DDP, HSDP), a holder of a shard has most of it in its own tensors. The
holder copies these into its slot with the same version, beside its own copy. Only the rest comes over the network,
together with the digest made at the shard's home.

A copy that differs from the home's by any bit does not count and is reported: the replicas have drifted apart, or
memory has failed somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.session import RankSession
from gemini_hpc.core.ranges import Range, choose_largest, merge_ranges
from gemini_hpc.train.device.memory import TensorShard
from gemini_hpc.train.replication import overlap
from gemini_hpc.train.replication.overlap import Piece
from gemini_hpc.train.replication.reserved import Reserved
from gemini_hpc.train.state.capture import Capture, CaptureJob
from gemini_hpc.train.state.ownership import Own
from gemini_hpc.wire import local


@dataclass
class _Writing:
    """The slot that is being filled."""

    version: int
    index: int
    grants: int  # the keeper's count when the agent allowed writing, see `Keeper.writing`
    whole: bool = True


class Replica:
    """A shard whose memory this rank keeps, filled from this rank's own tensors.

    Methods are called from the thread that saves.
    """

    def __init__(self, session: RankSession, keeper: Reserved, on_difference: Callable[[str], None]) -> None:
        """Create the replica.

        Args:
            session: This rank's session with its agent.
            keeper: The shard's memory on this node.
            on_difference: Called with the reason when this rank stops filling the shard for good.
        """
        self._pin: Callable[[TensorShard], None] | None = None
        self._client, self._training_name, self._epoch = session.require_agent(), session.name, session.epoch
        self._keeper, self._on_difference = keeper, on_difference
        self._own: Mapping[str, Own] = {}
        self._since = 0
        self._given_up = False
        self._shard: TensorShard | None = None  # the shard to which `_pieces` apply
        self._pieces: list[Piece] = []
        self._writing: _Writing | None = None
        self._pairs: dict[int, tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._places: list[Range] = []
        self._eager = 0

    @property
    def shards(self) -> list[TensorShard]:
        """Return the shards whose memory may be written to."""
        shard = self._keeper.shard
        return [*self._keeper.former, *([shard] if shard is not None else [])]

    def pin_with(self, pin: Callable[[TensorShard], None] | None) -> None:
        """Set the function that pins memory to which a device copies; None for no pinning."""
        self._pin = pin

    def adopt_plan(self, own: Mapping[str, Own], since: int) -> None:
        """Adopt a new plan of the state.

        Args:
            own: The tensors that this rank shares with others, by key.
            since: The last version of the old plan.
        """
        self._own, self._since, self._shard = own, since, None

    def begin_fill(self, job: CaptureJob, capture: Capture) -> bool:
        """Ask the agent for a slot. Return whether this version is filled here."""
        self._writing = None
        if self._given_up or not self._own or not self._find_pieces(capture):
            return False
        grants = self._keeper.grants
        message = local.Fill(training=self._training_name, rank=self._keeper.rank, version=job.version)
        try:
            reply, _ = self._client.request(message)
        except AgentLost:
            return False
        except AgentRefused as error:  # during a recovery round, or an agent without fills
            if str(error).startswith(local.UNLIKE):
                self._given_up = True
                self._on_difference(f"the shard of rank {self._keeper.rank} is sent as a whole from now on: {error}")
            return False
        if isinstance(reply, local.Begun) and reply.slot in (0, 1):
            self._writing = _Writing(job.version, reply.slot, grants)
        return self._writing is not None

    def copy_pieces(self, job: CaptureJob, capture: Capture) -> float:
        """Fill the slot with this rank's pieces. Return the seconds that the copy took."""
        writing, shard = self._writing, self._shard
        if writing is None or shard is None:
            return 0.0
        try:
            with self._keeper.writing:
                if self._keeper.grants == writing.grants:
                    return capture.copy_pairs(job, self._list_pairs(job, shard, writing.index))
                writing.whole = False  # the memory now belongs to another agent
                return 0.0
        except (KeyError, ValueError, RuntimeError):  # a tensor has changed its shape or is gone
            writing.whole = False
            return 0.0

    def end_fill(self, job: CaptureJob, *, unchanged: bool) -> None:
        """Report to the agent the ranges that are filled.

        Args:
            job: The version.
            unchanged: The tensors are the same as at step(). Otherwise no range is reported.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        present = tuple(self._places) if unchanged and writing.whole else ()
        message = local.Filled(
            training=self._training_name, rank=self._keeper.rank, version=job.version, present=present
        )
        try:
            self._client.request(message)
        except (AgentLost, AgentRefused):
            return

    # ---- pieces of the shard on this rank ---------------------------------------------------------------------

    def _find_pieces(self, capture: Capture) -> bool:
        """Return whether the places of this rank's pieces are known and any piece is here.

        The places come from a version that has arrived as a whole.
        """
        shard = self._keeper.shard
        if shard is None:
            return False
        if self._shard is shard and self._eager == len(capture.eager_since):
            return bool(self._pieces)
        for slot in shard.slots:
            known = slot.read_content()
            if known.digest and known.epoch == self._epoch and known.version > self._since:
                try:
                    layout, manifest = overlap.read_directory(slot.bytes)
                except ValueError:
                    continue
                if self._shard is not shard and self._pin is not None:
                    shard.populate()
                    self._pin(shard)
                self._shard, self._eager, self._pairs = shard, len(capture.eager_since), {}
                pieces = overlap.find_pieces(manifest, layout, self._own)
                self._pieces = [piece for piece in pieces if piece.key not in capture.eager_since]
                self._places = choose_largest(
                    merge_ranges(((p.start, p.end) for p in self._pieces), overlap.GAP_BYTES)
                )
                return bool(self._pieces)
        return False

    def _list_pairs(self, job: CaptureJob, shard: TensorShard, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the (target, source) tensors of every piece.

        Raises:
            KeyError: The state no longer matches the pieces.
            ValueError: The state no longer matches the pieces.
            RuntimeError: The state no longer matches the pieces.
        """
        tensors = job.memory
        ptrs = [tensors[piece.key].data_ptr() for piece in self._pieces]
        known = self._pairs.get(index)
        if known is not None and known[0] == ptrs:
            return known[1]
        pairs = overlap.prepare_pairs(self._pieces, self._own, tensors, shard.slots[index].bytes)
        self._pairs[index] = ptrs, pairs
        return pairs
