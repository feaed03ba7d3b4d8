"""From the first `step()` to protection: plan who owns what, reserve the memory, start the threads; and stop them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from gemini_hpc.client.agent import AgentLost, AgentRefused
from gemini_hpc.client.slots import Content
from gemini_hpc.core import directory
from gemini_hpc.core.manifest import Layout
from gemini_hpc.train import collective, ownership, pins, streams, telling
from gemini_hpc.train.arguments import Choices
from gemini_hpc.train.capture import Capture
from gemini_hpc.train.council import Council
from gemini_hpc.train.membership import ARMED, ARMING, REFUSED, Membership
from gemini_hpc.train.nccl.courier import StreamedReceiver, StreamedReplicator
from gemini_hpc.train.nccl.driver import Driver
from gemini_hpc.train.nccl.joint import JointPlanner
from gemini_hpc.train.nccl.meeting import Joined, Proposal, meet
from gemini_hpc.train.ownership import Entry
from gemini_hpc.train.pacer import Pacer
from gemini_hpc.train.pins import Pins
from gemini_hpc.train.planner import LEAST_CHUNK_BYTES, Planner
from gemini_hpc.train.receiver import Receiver, Reserved
from gemini_hpc.train.replicator import Replicator, register, small_capacity
from gemini_hpc.train.rhythm import Rhythm
from gemini_hpc.train.shared import Keeper, Shard
from gemini_hpc.train.teller import Teller
from gemini_hpc.train.tree import Leaf, StateTree, local
from gemini_hpc.train.watch import Watch


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others in the first `step()`: its tensors, then the size of its slot."""

    ready: bool = True
    problem: str = ""
    entries: list[Entry] = []
    total_bytes: int = 0
    proposal: Proposal = Proposal()


class Arming(Membership):
    """The layer of the checkpointer that makes and ends the threads that copy, send and receive."""

    def __init__(self, tree: StateTree, choices: Choices, unsupported: str) -> None:
        """unsupported: why this rank's state cannot be captured, or ""."""
        super().__init__(choices.name, choices.seal_timeout_s, choices.hold_s, choices.transport, choices.tier)
        self._unsupported = unsupported
        self._tree, self._choices = tree, choices
        self._pacer = Pacer(choices.chunk_bytes or LEAST_CHUNK_BYTES, choices.buffers)
        self._rhythm: Rhythm | None = None
        self._driver: Driver | None = None
        self._resumed_at = 0
        self._capture: Capture | None = None
        self._replicator: Replicator | None = None
        self._receivers: list[Receiver | Reserved] = []
        self._arming: threading.Thread | None = None
        self._listening = False
        self._kept_capacity = 0
        self._own_copy = Content()

    def _lose(self, reason: str) -> None:
        super()._lose(reason)
        if self._driver is not None and not self._protected:
            self._driver.fail(reason)

    def _keepers(self) -> list[Keeper]:
        return [*([self._replicator] if self._replicator else []), *self._receivers]

    def _catch_up(self) -> None:
        for receiver in self._receivers:
            if isinstance(receiver, Reserved):
                with suppress(AgentLost, AgentRefused):  # there will be another version
                    receiver.catch_up()

    def _plan(
        self, leaves: list[Leaf], odd: dict[tuple[int, str, str], Any], failure: Exception | None, *, ready: bool
    ) -> bool:
        """Collective, in each `step()` until every rank is ready (optimizer state exists after a real step only): who
        owns what, and the layout. A rank that fails says so, or the others would wait for it: then all ranks raise.
        failure: of what came before, on this rank."""
        ready = ready or bool(self._resumed_at)
        rows: list[directory.Row] = []
        entries: list[Entry] = []
        if failure is None:
            try:
                for leaf in leaves:
                    row, entry = self._tree.describe(leaf, self._world)
                    rows.append(row)
                    entries.append(entry)
            except Exception as error:
                failure = error
        shared_entries = [e for e, r in zip(entries, rows, strict=False) if r.shared] if ready else []
        offers = self._all(_Offer(ready=ready, entries=shared_entries), failure)
        if not all(o.ready for o in offers):
            return False
        layout = Layout.plan(0, 0, 0)
        try:
            capture, packed, layout = self._lay_out(leaves, odd, rows, entries, [o.entries for o in offers])
        except Exception as error:
            failure = error
        totals = [o.total_bytes for o in self._all(_Offer(total_bytes=layout.total), failure)]
        self._capture = capture
        for recorder in self._tree.ddps:
            recorder.stop()
        joined = self._meet(leaves, layout) if self._kind == "nccl" and self._transport else None
        try:
            self._start(packed, layout, totals, joined)
        except Exception as error:  # the others go on to `_arm`
            self._lose(f"{type(error).__name__}: {error}")
        return True

    def _meet(self, leaves: list[Leaf], layout: Layout) -> Joined | None:
        """Collective: NCCL on all ranks, or on none."""

        def all_ranks(proposal: Proposal) -> list[Proposal]:
            return [offer.proposal for offer in self._all(_Offer(proposal=proposal), None)]

        joined, reason = meet(self._rank, [local(leaf.tensor) for leaf in leaves], layout, self._targets, all_ranks)
        if reason:
            self._findings.append(f"transport: {reason}")
            if self._rank == 0:
                self._say(f"copies go over gloo, not over NCCL: {reason}")
        return joined

    def _lay_out(
        self,
        leaves: list[Leaf],
        odd: dict[tuple[int, str, str], Any],
        rows: list[directory.Row],
        entries: list[Entry],
        gathered: list[list[Entry]],
    ) -> tuple[Capture, bytes, Layout]:
        """This rank's part of what all ranks have: the capture of it, its manifest, the layout of a slot."""
        alone = ownership.unequal(gathered)
        dealt = ownership.deal(
            [[e for e in part if e.key not in alone] for part in gathered], self._choices.ownership
        )
        shared = [i for i, row in enumerate(rows) if row.shared and row.key not in alone]
        blocks = [msgspec.structs.replace(b, entry=shared[b.entry]) for b in dealt[self._rank]]
        for i in sorted(set(range(len(rows))) - set(shared)):  # a local part that stands for itself
            size = entries[i].size
            rows[i] = msgspec.structs.replace(rows[i], shared=False, shape=size)
            entries[i] = msgspec.structs.replace(entries[i], offset=(0,) * len(size))
            blocks.append(ownership.Block(i, entries[i].offset, size))
        blocks = [b for b in blocks if math.prod(b.size)]
        pieces = directory.place(tuple(rows), [(b.entry, b.offset, b.size) for b in blocks])
        manifest = directory.Manifest(self._rank, self._world, tuple(rows), pieces, self._tree.aliases)
        packed = directory.pack(manifest)
        small_bytes = len(self._tree.encode_small(odd, [], self._world))
        layout = Layout.plan(len(packed), manifest.tensor_bytes(), small_capacity(small_bytes, self._kept_capacity))
        return Capture(manifest, leaves, entries, blocks), packed, layout

    def _all(self, offer: _Offer, failure: Exception | None) -> list[_Offer]:
        """Collective: what every rank offers. Raises on every rank where one has a failure to tell of."""
        if failure is not None:
            offer = _Offer(problem=f"rank {self._rank}: {failure}")
        offers = [offer]
        if self._world > 1:
            parts = collective.gather_bytes(msgspec.msgpack.encode(offer), self._control_group())
            offers = [msgspec.msgpack.decode(part, type=_Offer) for part in parts]
        if failure is not None:
            raise failure
        problem = next((o.problem for o in offers if o.problem), "")
        if problem:
            raise RuntimeError(problem)
        return offers

    def _start(self, packed: bytes, layout: Layout, totals: list[int], joined: Joined | None) -> None:
        assert self._client is not None and self._capture is not None
        transport = self._transport
        replicates: Callable[..., Replicator] = Replicator
        receives: Callable[..., Receiver] = Receiver
        if joined is not None:
            self._driver = Driver(
                joined,
                self._choices,
                self._me,
                self._client,
                self._capture,
                self._gate,
                self._pacer,
                self._say,
                self._lose,
            )
            replicates = partial(StreamedReplicator, driver=self._driver)
            receives = partial(StreamedReceiver, driver=self._driver)
        self._replicator = replicates(
            self._me,
            self._client,
            self._capture,
            packed,
            layout,
            {rank: transport.outbox(rank) for rank in self._outgoing} if transport else {},
            self._gate,
            self._pacer,
            max_repeated=self._choices.max_repeated,
            say=self._note,
            broken=self._lose,
            catch_up=self._catch_up,
            pins=self._pins() if joined is None else None,
        )
        self._make_rhythm(packed, layout)
        if transport and transport.pushed:
            self._receivers = [
                Reserved(self._me, self._client, rank, self._homes[rank], self._gate) for rank in self._incoming
            ]
        elif transport:
            self._receivers = [
                receives(
                    self._me,
                    self._client,
                    transport.inbox(rank),
                    rank,
                    self._homes[rank],
                    self._gate,
                    seal_timeout_s=self._seal_timeout_s,
                    say=self._note,
                )
                for rank in self._incoming
            ]
        if self._driver is not None:
            keepers = {r.rank: r for r in self._receivers}
            self._driver.open({self._rank: self._replicator, **keepers})
        self._arming = threading.Thread(
            target=self._reserve, args=(layout.total, totals), name="gemini-arming", daemon=True
        )
        self._arming.start()

    def _pins(self) -> Pins | None:
        """Where copies come from a device. (For those over NCCL the driver has its own.)"""
        pin = pins.of_training(self._capture.device if self._capture is not None else None)

        def refused(reason: str) -> None:
            told = f"rank {self._rank}: copies from the device are slow, they are staged in other memory: {reason}"
            self._findings.append(told)
            self._say(told)

        return Pins(pin, refused) if pin is not None else None

    def _make_rhythm(self, packed: bytes, layout: Layout) -> None:
        """Not while another thread is inside a collective: from `step()`."""
        assert self._client is not None
        group = self._control_group()
        homes = self._homes
        # by places, not by names: a replacement is a node of the same kind, and if not, the profile does not hold
        over = "nccl " if self._driver is not None else ""
        key = telling.profile_key(over + packed.hex(), map(str, homes))
        on_device = self._capture is not None and self._capture.on_device
        watch = Watch(
            lambda ranks: len({homes[rank] for rank in ranks if rank < len(homes)}) != 1,
            device=streams.of_training(on_device),
        )
        pushed = self._transport is not None and self._transport.pushed
        on_host = self._capture is not None and not on_device
        planner: Callable[..., Planner] = partial(Planner, whole=pushed, on_host=on_host)
        if self._driver is not None:
            planner = partial(JointPlanner, driver=self._driver, watch=watch)
            self._driver.hook(watch)
        self._rhythm = Rhythm(
            self._choices,
            self._rank,
            self._outgoing,
            layout.small_offset + layout.small_capacity // 2,
            Council(group, watch.follow, watch.caught_up) if group is not None and self._outgoing else None,
            watch,
            self._pacer,
            Teller(self._client, self._name, self._rank, key),
            self._say,
            planner,
            self._driver,
            transport=self._transport.name if self._transport is not None else "none",
        )

    def _reserve(self, own_bytes: int, totals: list[int]) -> None:
        """In the background: reserve and map the memory of all shards that this rank fills."""
        assert self._client is not None and self._replicator is not None
        try:
            shards = [register(self._client, self._me, self._rank, self._node_rank, own_bytes)]
            for receiver in self._receivers:
                rank, pushed = receiver.rank, isinstance(receiver, Reserved)
                shards.append(register(self._client, self._me, rank, self._homes[rank], totals[rank], pushed=pushed))
            for shard in shards:
                if not shard.pushed:
                    shard.populate()
            self._replicator.pin(shards[0])
            self._recognise(shards[0])
        except Exception as error:
            self._listen([])
            known = isinstance(error, (AgentLost, AgentRefused, ValueError, OSError))
            self._lose(str(error) if known else f"{type(error).__name__}: {error}")
            return
        if self._listen(shards):
            with self._fate:
                if self._armed == ARMING:
                    self._armed = ARMED

    def _listen(self, shards: list[Shard]) -> bool:
        """Start the threads, unless the end came first: a thread that begins to wait for others after that would
        still be blocked when Python exits, which aborts the process."""
        assert self._replicator is not None
        with self._fate:
            if self._ending:
                return False
            if shards:
                self._replicator.start(shards[0])
            for number, receiver in enumerate(self._receivers, 1):
                receiver.start(shards[number] if shards else None)
            self._listening = True
        return True

    def _recognise(self, shard: Shard) -> None:
        """After a resume the memory found again may hold the version resumed from: know it, for a hand-back."""
        known = self._own_copy
        for slot in shard.slots:
            if known.digest and slot.bytes.numel() >= known.used:
                from gemini_hpc.core.manifest import HEADER_BYTES, parse_header

                try:
                    header = parse_header(slot.bytes[:HEADER_BYTES].numpy().tobytes(), slot.bytes.numel())
                except ValueError:
                    continue
                if (header.stamp.epoch, header.stamp.version) == (known.epoch, known.version):
                    slot.content = Content(known.epoch, known.version, known.used, known.digest)

    def _arm(self) -> bool:
        """Collective, in each `step()` until memory is reserved everywhere, so that all ranks begin with the same
        version (a version that some ranks skip can never be sealed)."""
        word = self._armed
        states = [word]
        if self._world > 1:
            states = collective.gather_word(word, self._control_group())
        if all(state == ARMED for state in states):
            with self._fate:
                self._undecided = False
                late, self._armed = self._armed, ARMED
                self._protected = late == ARMED  # what went wrong after `word` was given ends protection here only
            if self._protected:
                self._state = "protected"
            return self._protected
        if REFUSED in states:
            with self._fate:
                self._undecided = self._protected = False
                told, self._armed = self._armed == REFUSED, REFUSED
            self._state = "unprotected"
            if not told:
                self._findings.append(f"rank {states.index(REFUSED)} could not reserve its memory")
        return False

    def _shut_down(self, patience_s: float) -> bool:
        """Stop the threads: first in peace (the other ranks say goodbye too), then by cutting the links. Whether all
        of them have ended."""
        deadline = time.monotonic() + patience_s
        if self._driver is not None:
            self._driver.finish(in_peace=patience_s > 0)
        if self._arming is not None:
            self._arming.join(patience_s)
        with self._fate:
            self._ending = True
            quiet = patience_s > 0 and (self._arming is None or self._listening)
        self._pacer.end()
        if self._replicator is not None:
            quiet = self._replicator.stop(max(0.0, deadline - time.monotonic())) and quiet
        for receiver in self._receivers:
            quiet = receiver.join(max(0.0, deadline - time.monotonic())) and quiet
        if not quiet:
            if self._transport is not None:
                self._transport.interrupt()
            if self._driver is not None:
                self._driver.interrupt()
            if self._replicator is not None:
                self._replicator.stop(1.0)
            for receiver in self._receivers:
                receiver.join(1.0)
        ended = self._arming is None or not self._arming.is_alive()
        ended = (self._replicator is None or self._replicator.stop(0.0)) and ended
        if self._driver is not None:
            self._driver.close()
        return all(receiver.join(0.0) for receiver in self._receivers) and ended
