"""Another rank's shard, filled with what this rank has as well.

Where the state is replicated over nodes (DDP, HSDP), a holder of a shard has most of it in its own tensors. It copies
these into its slot with the same version, beside its own copy; only the rest comes over the network, and the digest
that was made at the shard's home. A copy that is not bit for bit what the home has does not count, and is told: the
replicas have drifted apart, or memory has failed somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gemini_hpc.client.agent_connection import AgentClient, AgentLost, AgentRefused
from gemini_hpc.core.ranges import Range, largest, merged
from gemini_hpc.train.device.memory import Shard
from gemini_hpc.train.replication import overlap
from gemini_hpc.train.replication.overlap import Piece
from gemini_hpc.train.replication.reserved import Reserved
from gemini_hpc.train.state.capture import Capture, Job
from gemini_hpc.train.state.ownership import Own
from gemini_hpc.wire import local


@dataclass
class _Writing:
    """The slot that is being filled."""

    version: int
    index: int
    grants: int  # see `Keeper.writing`
    whole: bool = True


class Replica:
    """Of one shard of which this rank keeps the memory. From the thread that saves. differs(why): told when no more
    of it is filled here, for good."""

    def __init__(
        self, set_name: str, client: AgentClient, keeper: Reserved, epoch: int, differs: Callable[[str], None]
    ) -> None:
        self._pin: Callable[[Shard], None] | None = None
        self._set, self._client, self._keeper, self._epoch, self._differs = set_name, client, keeper, epoch, differs
        self._own: Mapping[str, Own] = {}
        self._since = 0
        self._given_up = False
        self._shard: Shard | None = None  # for which `_pieces` are right
        self._pieces: list[Piece] = []
        self._writing: _Writing | None = None
        self._pairs: dict[int, tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._places: list[Range] = []
        self._eager = 0

    @property
    def shards(self) -> list[Shard]:
        """Memory that may be written to."""
        shard = self._keeper.shard
        return [*self._keeper.former, *([shard] if shard is not None else [])]

    def pins(self, pin: Callable[[Shard], None] | None) -> None:
        """How memory is pinned that a device copies to; None: by nobody."""
        self._pin = pin

    def follow(self, own: Mapping[str, Own], since: int) -> None:
        """The state is dealt out anew with the version after `since`. own: what this rank shares, by key."""
        self._own, self._since, self._shard = own, since, None

    def begin(self, job: Job, capture: Capture) -> bool:
        """Whether this version is filled here. Asks the agent for a slot."""
        self._writing = None
        if self._given_up or not self._own or not self._planned(capture):
            return False
        grants = self._keeper.grants
        message = local.Fill(set=self._set, rank=self._keeper.rank, version=job.version)
        try:
            reply, _ = self._client.request(message)
        except AgentLost:
            return False
        except AgentRefused as error:  # in a recovery round, say; or by an agent that knows no fills
            if str(error).startswith(local.UNLIKE):
                self._given_up = True
                self._differs(f"the shard of rank {self._keeper.rank} is sent as a whole from now on: {error}")
            return False
        if isinstance(reply, local.Begun) and reply.slot in (0, 1):
            self._writing = _Writing(job.version, reply.slot, grants)
        return self._writing is not None

    def copy(self, job: Job, capture: Capture) -> float:
        """Fill the slot with what is here. Seconds that it took."""
        writing, shard = self._writing, self._shard
        if writing is None or shard is None:
            return 0.0
        try:
            with self._keeper.writing:
                if self._keeper.grants == writing.grants:
                    return capture.bring(job, self._bound(job, shard, writing.index))
                writing.whole = False  # the memory is another agent's now
                return 0.0
        except (KeyError, ValueError, RuntimeError):  # a tensor is not what it was
            writing.whole = False
            return 0.0

    def end(self, job: Job, *, unchanged: bool) -> None:
        """Tell the agent. unchanged: the tensors are what they were at step()."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        there = tuple(self._places) if unchanged and writing.whole else ()
        message = local.Filled(set=self._set, rank=self._keeper.rank, version=job.version, there=there)
        try:
            self._client.request(message)
        except (AgentLost, AgentRefused):
            return

    # ---- what of the shard is here ---------------------------------------------------------------------

    def _planned(self, capture: Capture) -> bool:
        """Whether it is known, from a version that has come as a whole, what goes where."""
        shard = self._keeper.shard
        if shard is None:
            return False
        if self._shard is shard and self._eager == len(capture.eager_since):
            return bool(self._pieces)
        for slot in shard.slots:
            known = slot.known()
            if known.digest and known.epoch == self._epoch and known.version > self._since:
                try:
                    layout, manifest = overlap.directory(slot.bytes)
                except ValueError:
                    continue
                if self._shard is not shard and self._pin is not None:
                    shard.populate()
                    self._pin(shard)
                self._shard, self._eager, self._pairs = shard, len(capture.eager_since), {}
                here = overlap.pieces(manifest, layout, self._own)
                self._pieces = [piece for piece in here if piece.key not in capture.eager_since]
                self._places = largest(merged(((p.at, p.end) for p in self._pieces), overlap.GAP_BYTES))
                return bool(self._pieces)
        return False

    def _bound(self, job: Job, shard: Shard, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(to, from) of every piece. Raises KeyError, ValueError, RuntimeError where the state is another one."""
        tensors = job.memory
        ptrs = [tensors[piece.key].data_ptr() for piece in self._pieces]
        known = self._pairs.get(index)
        if known is not None and known[0] == ptrs:
            return known[1]
        pairs = overlap.pairs(self._pieces, self._own, tensors, shard.slots[index].bytes)
        self._pairs[index] = ptrs, pairs
        return pairs
