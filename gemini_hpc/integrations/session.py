"""The part of one rank in versions that another stack saves as a whole, one after the other.

A session handles the agent, the slots and the transfers to the other holders. `save` blocks its caller. The captures
and timing of the torch front are not used here.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.client.session import RankSession
from gemini_hpc.client.slot_requests import SlotRequests
from gemini_hpc.core.slots import Stamp
from gemini_hpc.format import shard_manifest
from gemini_hpc.format.shard_manifest import ShardManifest
from gemini_hpc.format.slot_header import PAGE_BYTES, Header, SlotLayout, pack_header
from gemini_hpc.train.device.memory import TensorShardOwner, register
from gemini_hpc.train.replication.reserved import Reserved
from gemini_hpc.train.state import collectives
from gemini_hpc.train.state.restore import SavedShard, fetch_shard
from gemini_hpc.train.transport.base import Head, LinkBroken, Outbox
from gemini_hpc.train.transport.host import HostTransport
from gemini_hpc.wire.stored import Tier

NOTE = ".note"  # key of a row with a few bytes that all ranks need
T = TypeVar("T")
IMPORTED_AT = clock.time()
_ATTEMPTS = 3
_POLL_S = 0.0005  # short beside a seal, which takes milliseconds at least
_SLACK_BYTES = 256 << 10  # room because encoded values vary in length from save to save


@dataclass(frozen=True)
class VersionPart:
    """A rank's contribution to a version.

    `store` fills the tensor area (bytes on the CPU) as the manifest describes.
    """

    manifest: ShardManifest
    store: Callable[[torch.Tensor], None]


class ShardDescription(msgspec.Struct, frozen=True, array_like=True):
    """The description of one shard, for all ranks.

    `small` is filled for shard 0 only. `note` is the shard's row `NOTE`, if it has one.
    """

    header: Header
    manifest: ShardManifest
    small: bytes
    note: bytes


class Refusal(Exception):
    """Raised if a version is not saved, with the reason. `rank` is the rank where the save failed."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class StackSession:
    """The session of one training in this process. Creating it is collective.

    Without an agent it reports so once and saves nothing.

    Attributes:
        active: True while versions are saved.
        saved_since: True if a version was saved since the agents chose the version that `list_shards` returns.

    Raises:
        SystemExit: There is a version in memory that this launch cannot load (`Session.try_again`).
    """

    def __init__(self, name: str, seal_timeout_s: float, tier: Tier) -> None:
        self._session = RankSession(
            collectives.TorchRanks(), name, tier, seal_timeout_s=seal_timeout_s, imported_at=IMPORTED_AT
        )
        self._session.keepers = lambda: [self._own, *self._reserved]
        self._own, self._reserved = TensorShardOwner(), list[Reserved]()
        self._boxes: dict[int, Outbox] = {}
        self._group: dist.ProcessGroup | None = None
        self._one_at_a_time = threading.Lock()
        self.active = self.saved_since = False
        self.notes: list[bytes] = []  # notes of the ranks that have one, in the version that `list_shards` returned
        self._session.join()
        self._enter()

    def _enter(self) -> None:
        session = self._session
        session.verdict.awaited = False  # each save has its own verdict of all ranks
        self.active, self.saved_since = session.protected, False
        if not self.active:
            return
        self._slots = SlotRequests(session, session.rank)
        if session.world > 1 and self._group is None:
            self._group = collectives.build_own_group()
        if not self._boxes:
            transport = HostTransport(session)
            self._boxes = {rank: transport.build_outbox(rank) for rank in session.outgoing}
        session.state = "protected"
        session.version = session.welcome.chosen_version
        if session.welcome.notice:
            session.say_once(session.welcome.notice)

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self._session.rank

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self._session.world

    @property
    def chosen_version(self) -> int:
        """Return the version that `list_shards` returns; 0 if there is none."""
        return self._session.welcome.chosen_version if self.active else 0

    def _run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks, and return its result on this rank (collective).

        Raises:
            Refusal: The work failed on some rank; raised on all ranks.
        """
        problem, result = "", list[T]()
        try:
            result.append(work())
        except (AgentLost, AgentRefused, LinkBroken) as error:
            problem = str(error) or type(error).__name__
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        words = self._gather_words(problem.encode()[:500])
        for rank, word in enumerate(words):
            if word:
                raise Refusal(rank, word.decode(errors="replace"))
        return result[0]

    def _gather_words(self, word: bytes) -> list[bytes]:
        return collectives.gather_bytes(word, self._group) if self.world > 1 else [word]

    # ---- saving ----------------------------------------------------------------------------------------

    def save(self, make: Callable[[], VersionPart]) -> int:
        """Save the next version, and return its number when it is sealed (collective).

        Calls may come from any thread, one at a time. If the version is not sealed, the result is 0 and one line
        gives the reason. `make` returns this rank's part and may raise.
        """
        with self._one_at_a_time:
            if not self.active:
                return 0
            self._session.version += 1
            try:
                self._save(make)
                sealed = all(word == b"1" for word in self._gather_words(b"1" if self._wait_for_seal() else b"0"))
            except Refusal as refusal:
                if refusal.rank == self._session.rank:
                    self._report_skipped(str(refusal))
                return 0
            except Exception as error:  # our own failure must not stop the training
                self._report_skipped(f"rank {self._session.rank}: {type(error).__name__}: {error}")
                return 0
            if sealed:
                with suppress(AgentLost, AgentRefused):
                    self._catch_up()
                return self._session.version
            if self._session.rank == 0:
                waited = f"{self._session.seal_timeout_s:g} s"
                self._report_skipped(
                    f"all copies are there, but the agents have not sealed the version within {waited}"
                )
            return 0

    def _report_skipped(self, why: str) -> None:
        self._session.say(f"version {self._session.version} is not saved: {why}")
        if self._session.client is not None:
            self._session.client.queue_event("skipped", self._session.version, why)

    def _save(self, make: Callable[[], VersionPart]) -> None:
        """Save this rank's part and send it to the holders.

        Raises:
            Refusal: The save failed on some rank; raised on all ranks.
        """
        part, packed, least = self._run_on_all(lambda: _measure_part(make()))
        if self._own.shard is None:
            totals = [int(word) for word in self._gather_words(str(_compute_slot_size(least.total)).encode())]
            try:
                self._run_on_all(lambda: self._register(totals))
            except Refusal:  # perhaps another rank failed: the next save retries on all ranks
                self._forget()
                raise
        begun: list[int] = []
        try:
            layout = self._run_on_all(lambda: self._fill(part, packed, least, begun))
            self._run_on_all(lambda: self._spread(begun[0], layout))
        except BaseException:
            for index in begun:
                self._slots.abort(self._session.version, index)
            raise
        self.saved_since = True

    def _wait_for_seal(self) -> bool:
        """Wait until the version is sealed, and return whether it is.

        All ranks' copies are at their holders and must be verified. The wait ends after `seal_timeout_s` seconds.
        """
        session = self._session
        wanted, deadline = (session.epoch, session.version), clock.monotonic() + session.seal_timeout_s
        while session.gate.sealed < wanted:
            page = session.client.page if session.client is not None else None
            gone = not session.protected or (page is not None and page.abandoned >= wanted)
            if gone or clock.monotonic() > deadline:
                return False
            clock.sleep(_POLL_S)
        return True

    def _register(self, totals: list[int]) -> None:
        """Register the memory of this rank's shard, and of those that its node keeps for others.

        Raises:
            AgentLost, AgentRefused: The agent does not provide the memory.
        """
        session = self._session
        own = register(session, session.rank, totals[session.rank])
        try:
            own.populate()
            for rank in session.incoming:
                keeper = Reserved(session, rank)
                keeper.start(register(session, rank, totals[rank], pushed=True))
                self._reserved.append(keeper)
        except BaseException:
            own.close()
            self._forget()
            raise
        self._own.outgrow(own)

    def _fill(self, part: VersionPart, packed: bytes, least: SlotLayout, begun: list[int]) -> SlotLayout:
        """Write everything into a slot of our own, and record the slot in `begun`.

        Raises:
            AgentLost, AgentRefused: The agent does not provide a slot. Errors of `store` are raised too.
        """
        session, shard = self._session, self._own.shard
        session.require_agent()
        self._catch_up()
        assert shard is not None
        if least.total > shard.total_bytes:
            shard = register(session, session.rank, _compute_slot_size(least.total))
            shard.populate()
            self._own.outgrow(shard)
        layout = SlotLayout.plan(least.manifest_bytes, least.tensor_bytes, shard.total_bytes - least.small_offset)
        index = self._slots.begin(session.version)
        begun.append(index)
        self._own.release(session.gate.sealed)
        slot = shard.slots[index]
        slot.content = Content()
        slot.put(layout.manifest_offset, packed)
        with torch.no_grad():
            part.store(slot.bytes[layout.tensor_offset : layout.tensor_offset + layout.tensor_bytes])
        slot.put(0, pack_header(layout, 0, Stamp(session.epoch, session.version), session.rank, session.world))
        return layout

    def _catch_up(self) -> None:
        """Map larger slots that the agent may have made for other ranks' shards.

        Raises:
            AgentLost, AgentRefused: The agent does not provide them.
        """
        for keeper in self._reserved:
            keeper.catch_up()

    def _spread(self, index: int, layout: SlotLayout) -> None:
        """Send the slot to all holders and report this to the agent.

        Raises:
            AgentLost, AgentRefused, LinkBroken: The version cannot be sent or reported.
        """
        assert self._own.shard is not None
        session, slot, used = self._session, self._own.shard.slots[index], layout.small_offset
        for rank, box in self._boxes.items():
            if not box.offer(Head(session.version, used, layout.total)):
                raise AgentRefused(f"the node of rank {rank} could not take the version")
            box.finish("")
        slot.content = Content(session.epoch, session.version, used)  # no digest: the record will have it
        self._slots.report_landed(session.version, index, used)

    # ---- loading ---------------------------------------------------------------------------------------

    def list_shards(self) -> list[SavedShard]:
        """Return all shards of the version to load, by rank; none if there is no version (collective).

        Shards that this rank need not read fetch their tensors on request.
        """
        if self.active and self.saved_since:
            self._reconnect()
        for attempt in itertools.count(1):
            if not self.active or not self._session.welcome.chosen_version:
                return []
            welcome = self._session.welcome
            if self._session.rank == 0:
                for line in welcome.lost:
                    self._session.say(f"not loaded from memory: {line}")
            own_ranks = range(self._session.rank, welcome.chosen_world, self._session.world)
            try:
                found = self._run_on_all(lambda: {rank: self._fetch(rank) for rank in own_ranks})  # noqa: B023
                break
            except Refusal as refusal:
                if refusal.rank == self._session.rank:
                    self._session.say(f"version {welcome.chosen_version} cannot be loaded: {refusal}")
                if attempt == _ATTEMPTS:
                    self._session.try_again(f"version {welcome.chosen_version} cannot be read on every rank")
            self._reconnect()
        own = [
            ShardDescription(s.header, s.manifest, s.small_raw if rank == 0 else b"", _read_note(s))
            for rank, s in found.items()
        ]
        gathered = [
            facts
            for word in self._gather_words(msgspec.msgpack.encode(own))
            for facts in msgspec.msgpack.decode(word, type=list[ShardDescription])
        ]
        gathered.sort(key=lambda facts: facts.manifest.rank)
        self.notes = [facts.note for facts in gathered if facts.note]
        return [found.get(facts.manifest.rank) or self._defer_shard(facts) for facts in gathered]

    def _fetch(self, rank: int) -> SavedShard:
        """Return a shard from the agents.

        Raises:
            AgentLost, AgentRefused, OSError, ValueError: The shard cannot be fetched or is not the expected one.
        """
        self._session.require_agent()
        return fetch_shard(self._session, rank)[0]

    def _defer_shard(self, facts: ShardDescription) -> SavedShard:
        """Return a shard that is fetched when one of its tensors is requested."""
        fetched = functools.cache(lambda: self._fetch(facts.manifest.rank))
        return SavedShard(facts.header, facts.manifest, lambda piece: fetched().read_bytes(piece), facts.small)

    def _reconnect(self) -> None:
        """Reconnect to the agents on all ranks (collective).

        The agents verify their copies and choose a version again.
        """
        if self._session.client is not None:
            self._session.client.close()
        self._forget()
        self._session.join_again()
        self._enter()

    def _forget(self) -> None:
        """Release the memory of this round."""
        for keeper in self._session.keepers():
            keeper.close()
        self._own, self._reserved = TensorShardOwner(), []

    # ---- the end ---------------------------------------------------------------------------------------

    def close(self, *, success: bool) -> None:
        """End the session. With `success` the copies are no longer needed."""
        if self._session.client is None:
            return
        for box in self._boxes.values():
            box.announce_end()
        self._session.finish(success=success)
        self.active = False
        self._session.verdict.withdraw()
        self._forget()


def _measure_part(part: VersionPart) -> tuple[VersionPart, bytes, SlotLayout]:
    """Return the part with its manifest as stored, and the smallest layout.

    Raises:
        ValueError: The sizes are invalid.
    """
    packed = shard_manifest.pack(part.manifest)
    return part, packed, SlotLayout.plan(len(packed), part.manifest.count_tensor_bytes(), 0)


def _compute_slot_size(total_bytes: int) -> int:
    """Return the size of a slot for `total_bytes` plus some reserve, in whole pages."""
    wanted = total_bytes + total_bytes // 16 + _SLACK_BYTES
    return wanted - wanted % PAGE_BYTES


def _read_note(saved: SavedShard) -> bytes:
    rows = saved.manifest.rows
    found = [piece for piece in saved.manifest.pieces if rows[piece.row].key == NOTE]
    return saved.read_bytes(found[0]).numpy().tobytes() if found else b""
