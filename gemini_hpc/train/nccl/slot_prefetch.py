"""Slots requested ahead for the next versions, because a launching thread has no time to talk to an agent.

A thread of its own requests the slot of the next version as soon as the version before is sealed or given up. A
launching thread waits for a missing slot, but `PATIENCE_S` at most, and only once until slots are available again. A
version without a slot is dropped on this rank.

The device writes into a slot from the time it is handed out until all of the version has arrived, even after the
agent has died. Nothing else may be written there meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import SlotRefused, SlotRequests
from gemini_hpc.train.device.memory import TensorShardOwner, TensorSlot
from gemini_hpc.train.device.pins import Pin, Pins
from gemini_hpc.wire.control_page import ControlPage

PATIENCE_S = 0.05  # longest wait of a launching thread for a slot
ANSWER_S = 0.2  # longest wait for a slot that the agent has yet to grant, once a head has arrived
HEAD_S = 0.1  # longest time from a version's arrival to its head; later its sender has voided the version
HEAD_LATE_S = 1.0  # the same before the next step() shows that the training has gone on
_SOON_S, _LATER_S = 0.001, 0.02  # a version may be free at any moment; otherwise the next step() wakes the thread


@dataclass
class Grant:
    """A slot that the agent behind `page` has granted for a version.

    Attributes:
        version: The version.
        index: Index of the slot in its pair.
        slot: The slot.
        page: Control page of the granting agent.
        handed: Whether the device may write into the slot.
        landed: Whether all bytes of the tensor area are in the slot.
        landed_at: Time of their arrival.
        over: Whether the version has been reported or given up.
    """

    version: int
    index: int
    slot: TensorSlot
    page: ControlPage | None
    handed: bool = False
    landed: bool = False
    landed_at: float = 0.0
    over: bool = False


@dataclass
class _PrefetchedShard:
    """The state of one rank's shard, whose memory `keeper` has.

    Attributes:
        keeper: Keeper of the memory.
        slots: Requests to the agent.
        grant: The newest grant.
        busy: Version that a thread of ours is about to report; 0 if none.
        refused: Versions up to here get no slot if they have no grant.
        linked: Newest version that came over the link; 0 where NCCL brings the next one.
        asked: Seals and abandonments at the agent's last refusal, and the time.
        writing: Grants that were handed out and whose bytes have not all arrived.
    """

    keeper: TensorShardOwner
    slots: SlotRequests
    grant: Grant | None = None
    busy: int = 0
    refused: int = 0
    linked: int = 0
    asked: tuple[Any, float] = (None, 0.0)
    writing: list[Grant] = field(default_factory=list)  # handed out, not all bytes arrived


class SlotPrefetch:
    """The slots of one rank's own shard and of the shards that it keeps."""

    def __init__(
        self,
        session: RankSession,
        find_area: Callable[[int], tuple[int, int]],
        pin: Callable[[torch.Tensor], Pin],
        on_unpinned: Callable[[str], None],
    ) -> None:
        """Create a prefetcher; `open` starts its thread.

        Args:
            session: The rank's session with its agent.
            find_area: Returns offset and size in bytes of the tensor area of a rank's shard.
            pin: Pins memory.
            on_unpinned: Called once, with the reason, if memory cannot be pinned.
        """
        self._session, self._client, self._gate = session, session.require_agent(), session.gate
        self._find_area = find_area
        self._shards: dict[int, _PrefetchedShard] = {}
        self._pins = Pins(pin, on_unpinned)
        self._changed = threading.Condition()
        self._wanted = 0
        self._reached = 0
        self._met = -1
        self._tired = False
        self._lost = self._ended = False
        self._thread: threading.Thread | None = None

    def open(self, keepers: Mapping[int, TensorShardOwner]) -> None:
        """Start the thread; the memory is reserved, or will be."""
        self._shards = {
            rank: _PrefetchedShard(keeper, SlotRequests(self._session, rank)) for rank, keeper in keepers.items()
        }
        self._thread = threading.Thread(target=self._run, name="gemini-desk", daemon=True)
        self._thread.start()

    # ---- from the launching threads --------------------------------------------------------------------

    def set_wanted(self, version: int) -> None:
        """Set the next version that is saved, as far as is known; 0: none for now."""
        with self._changed:
            self._wanted = version
            self._changed.notify_all()

    def record_step(self, version: int) -> None:
        """Record the step() of a version that is saved."""
        with self._changed:
            self._reached = version
            for shard in self._shards.values():
                if shard.linked <= self._met < version:
                    shard.linked = 0
            self._wanted = max(self._wanted, version)
            self._changed.notify_all()

    def claim_slot(self, rank: int, version: int) -> Grant | None:
        """Hand a shard's slot to the device for the version whose step() is reached.

        Return None if there is no slot, which is final for this version.
        """
        with self._changed:
            shard = self._shards[rank]
            grant = self._wait_for_grant(shard, version) if not (self._lost or shard.linked) else None
            if grant is None:
                shard.refused = max(shard.refused, version)
            elif not grant.handed:
                grant.handed = True
                shard.writing.append(grant)
                if rank == self._session.rank:
                    shard.busy = version
            return grant

    def claim_destination(self, version: int, rank: int) -> torch.Tensor | None:
        """Return the destination of the bytes of a peer's tensor area, see `exchange.Save`."""
        grant = self.claim_slot(rank, version) if rank in self._shards else None
        if grant is None:
            return None
        offset, size = self._find_area(rank)
        return grant.slot.bytes[offset : offset + size]

    def _wait_for_grant(self, shard: _PrefetchedShard, version: int) -> Grant | None:
        if (grant := self._find_valid_grant(shard, version)) is not None or shard.refused >= version:
            return grant
        if self._tired or self._gate.degraded:
            return None
        self._changed.wait_for(lambda: self._ended or self._find_valid_grant(shard, version) is not None, PATIENCE_S)
        grant = self._find_valid_grant(shard, version)
        self._tired = grant is None
        return grant

    def _find_valid_grant(self, shard: _PrefetchedShard, version: int) -> Grant | None:
        """Return the shard's grant if it is for this version and still valid, else None.

        Another agent does not know the grant. Where larger slots have replaced its slot, the agent means one of
        these.
        """
        grant = shard.grant
        if grant is None or grant.version != version or self._ended or self._client.lost:
            return None
        return grant if grant.page is self._client.page and not self._is_outgrown(shard, grant) else None

    @staticmethod
    def _is_outgrown(shard: _PrefetchedShard, grant: Grant) -> bool:
        return shard.keeper.shard is None or grant.slot not in shard.keeper.shard.slots

    # ---- from the threads that report versions ---------------------------------------------------------

    def commit(self, rank: int, version: int) -> Grant | None:
        """Return the slot of a version whose head has arrived; None if there is none, which is final.

        The slot's bytes arrive later or have arrived. The call waits for `ANSWER_S` at most.
        """
        with self._changed:
            shard = self._shards[rank]
            self._changed.wait_for(
                lambda: self._lost or shard.refused >= version or self._find_valid_grant(shard, version) is not None,
                ANSWER_S,
            )
            grant = self._find_valid_grant(shard, version) if not self._lost else None
            if grant is None:
                shard.refused = max(shard.refused, version)
            else:
                shard.busy = version
            return grant

    def claim_for_link(self, rank: int, version: int) -> int | None:
        """Return the index of the slot already granted for a version that does not go over NCCL; None if none is."""
        with self._changed:
            shard = self._shards[rank]
            shard.refused = max(shard.refused, version)  # no slot for it is handed to the device any more
            shard.busy = version
            shard.linked = version  # a slot requested ahead would take away the next version's slot
            grant = self._find_valid_grant(shard, version)
            return grant.index if grant is not None else None

    def hold_for_link(self, rank: int, version: int) -> None:
        """Request no later slot until `record_end`, because this version is about to go over the link.

        The agent would otherwise refuse this version, because a slot does not go back to an earlier version.
        """
        with self._changed:
            shard = self._shards[rank]
            shard.busy = max(shard.busy, version)

    def allow_nccl(self, version: int) -> None:
        """Record that all ranks are well: versions after this one come over NCCL again."""
        with self._changed:
            self._met = version

    def wait_until_quiet(self, rank: int, timeout_s: float) -> bool:
        """Wait until the device writes into no slot of this shard. Return False on timeout."""
        with self._changed:
            shard = self._shards[rank]
            return self._changed.wait_for(lambda: not shard.writing, timeout_s)

    def wait_until_arrived(self, grant: Grant) -> bool:
        """Wait until all of the version is in the slot. Return False if it never will be."""
        with self._changed:
            self._changed.wait_for(
                lambda: grant.landed or grant.over or self._ended or (self._lost and not grant.handed)
            )
            return grant.landed

    def move_on(self, rank: int, version: int) -> None:
        """Begin the next version of a shard, before `record_end`.

        This holder has lost a version that it had begun, and other holders may have it. Only a later version begun
        here shows them that it never comes. Until then they begin none.

        Raises:
            AgentLost: If the agent is gone.
            AgentRefused: If the agent refuses, or is past this version already.
        """
        shard = self._shards[rank]
        page, memory = self._client.page, shard.keeper.shard
        index = shard.slots.begin(version + 1)
        if memory is None or memory is not shard.keeper.shard:
            return  # the version counts as begun, but it is unknown which memory the slot belongs to
        slot = memory.slots[index]
        slot.content = Content()
        with self._changed:
            shard.grant = Grant(version + 1, index, slot, page)
            self._changed.notify_all()

    def record_end(self, rank: int, version: int) -> None:
        """Record that this version has been reported or given up; the next slot may be requested."""
        with self._changed:
            shard = self._shards[rank]
            shard.busy = shard.busy if shard.busy > version else 0  # the next version may wait behind this one
            if shard.linked <= self._met <= version:
                shard.linked = 0
            if shard.grant is not None and shard.grant.version == version:
                shard.grant.over = True
            self._changed.notify_all()

    # ---- from the thread that polls the device ---------------------------------------------------------

    def record_landing(self, version: int, rank: int) -> None:
        """Record that all bytes of a version's tensor area are in the slot from `claim_slot`."""
        with self._changed:
            shard = self._shards[rank]
            for grant in shard.writing:
                if grant.version == version:
                    grant.landed, grant.landed_at = True, clock.monotonic()
            shard.writing = [grant for grant in shard.writing if grant.version > version]
            self._changed.notify_all()

    def record_failure(self, *, drained: bool) -> None:
        """Record that bytes that have not arrived never will. If not `drained`, the device may still write."""
        with self._changed:
            self._lost = True
            for rank, shard in self._shards.items():
                if rank == self._session.rank:
                    continue  # the own copy needs no other rank, so it ends by itself
                for grant in shard.writing:
                    grant.over = True
                if drained:
                    shard.writing = []
            self._changed.notify_all()

    # ---- the end ---------------------------------------------------------------------------------------

    def end(self) -> None:
        """End all waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self, *, drained: bool) -> None:
        """Join the thread and unpin the memory, after `end`.

        If not `drained`, the device may still write, so the memory stays pinned.
        """
        if self._thread is not None:
            self._thread.join(1.0)
        if drained:
            self._pins.close()

    # ---- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended:
            missing = False
            for shard in self._shards.values():
                try:
                    missing = self._request_slot(shard) or missing
                except (AgentLost, AgentRefused):
                    missing = True
            with self._changed:
                if not self._ended:
                    self._changed.wait(_SOON_S if missing else _LATER_S)

    def _request_slot(self, shard: _PrefetchedShard) -> bool:
        """Request the slot of the wanted version if possible. Return whether a slot is still missing."""
        memory, page = shard.keeper.shard, self._client.page
        with self._changed:
            version = self._wanted
            if not version or memory is None or self._lost or shard.linked or shard.refused >= version:
                return False
            if self._find_valid_grant(shard, version) is not None:
                return False
            if not self._may_request(shard, version):
                return True
            stale = shard.grant if shard.grant is not None and self._is_outgrown(shard, shard.grant) else None
        if stale is not None:  # the agent may have meant the larger slots
            if not shard.slots.abort(stale.version, stale.index):
                return True
            with self._changed:
                shard.grant = None if shard.grant is stale else shard.grant
        if not self._pins.add(memory.slots):
            raise AgentRefused(self._pins.problem)
        word = (page.sealed, page.abandoned) if page is not None else None
        if word == shard.asked[0] and clock.monotonic() - shard.asked[1] < _LATER_S:
            return True
        try:
            index = shard.slots.begin(version)
        except SlotRefused:
            shard.asked = word, clock.monotonic()
            return True
        shard.asked = None, 0.0
        if memory is not shard.keeper.shard:
            shard.slots.abort(version, index)
            return True
        slot = memory.slots[index]
        slot.content = Content()
        with self._changed:
            shard.grant = Grant(version, index, slot, page)
            self._tired = False
            self._changed.notify_all()
        return False

    def _may_request(self, shard: _PrefetchedShard, version: int) -> bool:
        """Return whether a request takes no slot away from a version still in transfer."""
        grant = shard.grant
        if shard.busy:
            return False
        if grant is None or grant.over or grant.page is not self._client.page or self._is_outgrown(shard, grant):
            return True
        if grant.version >= version:
            return False
        if (self._session.epoch, grant.version) <= self._gate.sealed:
            return True
        # a version in transfer must not lose its slot to the next, or none would ever be complete again
        alone_s = clock.monotonic() - grant.landed_at if grant.landed else 0.0
        return alone_s > HEAD_LATE_S or (grant.version < self._reached and (not grant.handed or alone_s > HEAD_S))
