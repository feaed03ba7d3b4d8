"""From the first `step()` to protection: plan who owns what, reserve the memory, start the threads; and stop them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch

from gemini_hpc import clock
from gemini_hpc.client.agent_connection import AgentLost, AgentRefused
from gemini_hpc.client.mapped_slots import Content
from gemini_hpc.format.slot_header import Layout
from gemini_hpc.train.device import pins, streams
from gemini_hpc.train.device.memory import Keeper, Shard
from gemini_hpc.train.device.pins import Pins
from gemini_hpc.train.membership import ARMED, ARMING, REFUSED, Membership
from gemini_hpc.train.nccl.driver import Driver
from gemini_hpc.train.nccl.joint_planner import JointPlanner
from gemini_hpc.train.nccl.negotiation import Joined, Proposal, meet
from gemini_hpc.train.nccl.streamed_replicator import StreamedReceiver, StreamedReplicator
from gemini_hpc.train.replication.receiver import Receiver, Reserved
from gemini_hpc.train.replication.registration import register
from gemini_hpc.train.replication.replica import Replica
from gemini_hpc.train.replication.replicator import Replicator
from gemini_hpc.train.schedule import stats_messages
from gemini_hpc.train.schedule.async_collectives import AsyncCollectives
from gemini_hpc.train.schedule.choices import Choices
from gemini_hpc.train.schedule.collective_monitor import CollectiveMonitor
from gemini_hpc.train.schedule.interval_controller import IntervalController
from gemini_hpc.train.schedule.pacer import Pacer
from gemini_hpc.train.schedule.planner import LEAST_CHUNK_BYTES, Planner
from gemini_hpc.train.schedule.replanning import Replanning
from gemini_hpc.train.schedule.stats_reporter import StatsReporter
from gemini_hpc.train.state import collectives, ownership
from gemini_hpc.train.state.capture import Capture
from gemini_hpc.train.state.divergence import Divergence
from gemini_hpc.train.state.layout import Draft, Plan, lay_out
from gemini_hpc.train.state.lifted import LEAST_BYTES
from gemini_hpc.train.state.ownership import Entry
from gemini_hpc.train.state.source import StateChangedError
from gemini_hpc.train.state.tree import Leaf, StateTree, local


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: its tensors, and in the first `step()` also the size of its slot."""

    ready: bool = True
    problem: str = ""
    entries: list[Entry] = []
    total_bytes: int = 0
    proposal: Proposal = Proposal()


class _OfferError(Exception):
    """A rank cannot take part in a new plan."""


class Arming(Membership):
    """The layer of the checkpointer that makes and ends the threads that copy, send and receive."""

    def __init__(self, tree: StateTree, choices: Choices, unsupported: str) -> None:
        """unsupported: why this rank's state cannot be captured, or ""."""
        super().__init__(choices.name, choices.seal_timeout_s, choices.hold_s, choices.transport, choices.tier)
        self._unsupported = unsupported
        self._tree, self._choices = tree, choices
        self._pacer = Pacer(choices.chunk_bytes or LEAST_CHUNK_BYTES, choices.buffers)
        self._rhythm: IntervalController | None = None
        self._driver: Driver | None = None
        self._resumed_at = 0
        self._capture: Capture | None = None
        self._replicator: Replicator | None = None
        self._receivers: list[Receiver | Reserved] = []
        self._arming: threading.Thread | None = None
        self._listening = False
        self._replanning: Replanning | None = None
        self._layout_bytes = 0  # of a slot, as planned
        self._apart: frozenset[str] = frozenset()  # what ranks have under one name, and not alike
        self._unlifted: set[str] = set()  # large tensors of the small state that do not keep their shape
        self._misfits: set[str] = set()  # other tensors that did not keep theirs
        self._unplanned: set[str] = set()  # and those that did not so twice: part of the small state
        self._draft: Draft | None = None  # that was offered for a new plan
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
        draft = Draft([], [], [], 0)
        if failure is None:
            try:
                draft = Draft.of(self._tree, leaves, odd, self._world, lifting=self._kind != "nccl")
            except Exception as error:
                failure = error
        offers = self._all(_Offer(ready=ready, entries=draft.shared if ready else []), failure)
        if not all(o.ready for o in offers):
            return False
        gathered = [o.entries for o in offers]
        total_bytes = 0
        try:
            plan = self._lay_out(draft, gathered)
            total_bytes = plan.layout.total
        except Exception as error:
            failure = error
        totals = [o.total_bytes for o in self._all(_Offer(total_bytes=total_bytes), failure)]
        self._capture, self._layout_bytes, self._apart = plan.capture, total_bytes, plan.alone
        for recorder in self._tree.ddps:
            recorder.stop()
        joined = self._meet(leaves, plan.layout) if self._kind == "nccl" and self._transport else None
        try:
            self._start(plan, gathered, totals, joined)
        except Exception as error:  # the others go on to `_arm`
            self._lose(f"{type(error).__name__}: {error}")
        return True

    def _lay_out(
        self,
        draft: Draft,
        gathered: list[list[Entry]],
        *,
        least_bytes: int = 0,
        apart: frozenset[str] = frozenset(),
    ) -> Plan:
        return lay_out(
            draft,
            gathered,
            self._rank,
            self._choices.ownership,
            self._tree.aliases,
            self._kept_capacity,
            least_bytes=least_bytes,
            apart=apart,
        )

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

    def _all(self, offer: _Offer, failure: Exception | None) -> list[_Offer]:
        """Collective: what every rank offers. Raises on every rank where one has a failure to tell of."""
        if failure is not None:
            offer = _Offer(problem=f"rank {self._rank}: {failure}")
        offers = [offer]
        if self._world > 1:
            parts = collectives.gather_bytes(msgspec.msgpack.encode(offer), self._control_group())
            offers = [msgspec.msgpack.decode(part, type=_Offer) for part in parts]
        if failure is not None:
            raise failure
        problem = next((o.problem for o in offers if o.problem), "")
        if problem:
            raise RuntimeError(problem)
        return offers

    def _start(self, plan: Plan, gathered: list[list[Entry]], totals: list[int], joined: Joined | None) -> None:
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
            plan,
            {rank: transport.outbox(rank) for rank in self._outgoing} if transport else {},
            self._gate,
            self._pacer,
            max_repeated=self._choices.max_repeated,
            say=self._note,
            broken=self._lose,
            catch_up=self._catch_up,
            pins=self._pins() if joined is None else None,
        )
        if self._driver is None:
            self._replanning = Replanning(
                Divergence(gathered, plan.alone, self._rank),
                offer=self._offer_anew,
                adopt=self._adopt,
                lose=self._lose,
                tensors=self._replicated,
            )
        self._make_rhythm(plan)
        if transport and transport.pushed:
            reserved = [
                Reserved(self._me, self._client, rank, self._homes[rank], self._gate) for rank in self._incoming
            ]
            self._receivers = [*reserved]
            self._replicator.share(
                [Replica(self._name, self._client, keeper, self._epoch, self._differs) for keeper in reserved]
            )
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
            target=self._reserve, args=(plan.layout.total, totals), name="gemini-arming", daemon=True
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

    def _profile_key(self, plan: Plan) -> str:
        """By places, not by names: a replacement is a node of the same kind; if not, the profile does not hold."""
        over = "nccl " if self._driver is not None else ""
        return stats_messages.profile_key(over + plan.packed.hex(), map(str, self._homes))

    def _copy_bytes(self, plan: Plan) -> int:
        """What one copy takes on the network."""
        stays = plan.frozen_bytes if self._transport is not None and self._transport.pushed else 0
        return plan.layout.small_offset + plan.layout.small_capacity // 2 - stays

    def _make_rhythm(self, plan: Plan) -> None:
        """Not while another thread is inside a collective: from `step()`."""
        assert self._client is not None and self._replicator is not None
        replicator = self._replicator
        group = self._control_group()
        homes = self._homes
        on_device = self._capture is not None and self._capture.on_device
        watch = CollectiveMonitor(
            lambda ranks: len({homes[rank] for rank in ranks if rank < len(homes)}) != 1,
            device=streams.of_training(on_device),
        )
        pushed = self._transport is not None and self._transport.pushed
        on_host = self._capture is not None and not on_device
        planner: Callable[..., Planner] = partial(Planner, whole=pushed, on_host=on_host)
        if self._driver is not None:
            planner = partial(JointPlanner, driver=self._driver, watch=watch)
            self._driver.hook(watch)
        self._rhythm = IntervalController(
            self._choices,
            self._rank,
            self._outgoing,
            self._copy_bytes(plan),
            AsyncCollectives(group, watch.follow, watch.caught_up) if group is not None and self._outgoing else None,
            watch,
            self._pacer,
            StatsReporter(self._client, self._name, self._rank, self._profile_key(plan)),
            self._say,
            planner,
            self._driver,
            self._replanning,
            lambda: replicator.copy_bytes,
            transport=self._transport.name if self._transport is not None else "none",
        )

    # ---- planning anew ---------------------------------------------------------------------------------

    def _plan_for(self, tensors: Iterable[torch.Tensor], misfits: Sequence[str] = ()) -> None:
        """These have no place in the present plan; misfits: what is wrong with others, without which no version can
        be captured. Raises StateChangedError where there is no way to another plan."""
        large = [t for t in tensors if t.numel() * t.element_size() >= LEAST_BYTES]
        able = self._world == 1 or (self._rhythm is not None and self._rhythm.agrees)
        if misfits and not (able and self._replanning is not None):
            raise StateChangedError(misfits[0])
        if self._replanning is not None and (large or misfits):
            self._replanning.want(self._version, at_once=bool(misfits))

    def _plan_alone(self) -> None:
        """A single rank need not ask."""
        if self._world == 1 and self._replanning is not None and self._replanning.wanted:
            self._replanning.hear([1])
            self._replanning.take([self._replanning.offer()], self._version)

    def _differs(self, why: str) -> None:
        """From the thread that saves: a copy that was made here is not what its home has."""
        self._note("differs", self._version, why)
        if self._replanning is not None:
            self._replanning.look_closely()

    def _replicated(self) -> dict[str, torch.Tensor]:
        leaves, _ = self._tree.leaves()
        return {leaf.key: local(leaf.tensor) for leaf in leaves}

    def _offer_anew(self, closely: bool) -> bytes:
        self._draft = None
        try:
            leaves, odd = self._tree.leaves()
            self._draft = Draft.of(
                self._tree,
                [leaf for leaf in leaves if leaf.key not in self._unplanned],
                odd,
                self._world,
                lifting=True,
                unlifted=self._unlifted,
                closely=closely,
            )
            offer = _Offer(entries=self._draft.shared)
        except Exception as error:  # all ranks hear of it
            offer = _Offer(problem=f"rank {self._rank}: {error}")
        return msgspec.msgpack.encode(offer)

    def _adopt(self, offered: Sequence[bytes]) -> None:
        """The new plan, from the version on that comes next. Never raises."""
        try:
            self._follow_plan(offered)
        except Exception as error:
            self._lose(f"{type(error).__name__}: {error}" if not isinstance(error, _OfferError) else str(error))

    def _follow_plan(self, offered: Sequence[bytes]) -> None:
        replicator, rhythm, replanning = self._replicator, self._rhythm, self._replanning
        assert replicator is not None and replanning is not None and self._layout_bytes
        draft, self._draft = self._draft, None
        offers = [msgspec.msgpack.decode(part, type=_Offer) for part in offered]
        problem = next((offer.problem for offer in offers if offer.problem), "")
        if problem or draft is None:
            raise _OfferError(problem or "it has made no offer for a new plan")
        gathered = [offer.entries for offer in offers]
        plan = self._lay_out(draft, gathered, least_bytes=self._layout_bytes, apart=self._apart)
        named = plan.alone != self._apart
        if replanning.differed and not named:  # where, does not show now: local steps have met
            apart = self._apart | ownership.printed(gathered)
            plan = self._lay_out(draft, gathered, least_bytes=self._layout_bytes, apart=apart)
        replanning.found(plan.alone - self._apart, named=named)
        plan = replace(plan, since=self._version - 1)
        if self._capture is not None:
            plan.capture.learn_from(self._capture)
        self._apart = plan.alone
        replicator.follow(plan)
        self._capture, self._layout_bytes = plan.capture, plan.layout.total
        replanning.follow(Divergence(gathered, plan.alone, self._rank))
        if rhythm is not None:
            rhythm.resize(self._copy_bytes(plan), self._profile_key(plan))
        self._findings.append(f"version {self._version}: planned anew: {replanning.reason}")
        if self._rank == 0:
            self._say(f"planned anew from version {self._version} on: {replanning.reason}")
        if self._client is not None:
            self._client.event("planned", self._version, f"rank {self._rank}: {replanning.reason}")

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
                from gemini_hpc.format.slot_header import HEADER_BYTES, parse_header

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
            states = collectives.gather_word(word, self._control_group())
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
        deadline = clock.monotonic() + patience_s
        if self._driver is not None:
            self._driver.finish(in_peace=patience_s > 0)
        if self._arming is not None:
            self._arming.join(patience_s)
        with self._fate:
            self._ending = True
            quiet = patience_s > 0 and (self._arming is None or self._listening)
        self._pacer.end()
        if self._replicator is not None:
            quiet = self._replicator.stop(max(0.0, deadline - clock.monotonic())) and quiet
        for receiver in self._receivers:
            quiet = receiver.join(max(0.0, deadline - clock.monotonic())) and quiet
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
