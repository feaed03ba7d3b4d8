"""Salvage for a job that has lost a node and does not come back.

The surviving nodes save its newest sealed version to the tier before their memory is freed. A normal save goes along
the tree of the incarnation, and each node writes the shards whose home it is. A missing node breaks the tree, and no
node would write the missing node's shards, although its placement group has copies. In a salvage the first reachable
host of the list therefore leads.

`salvage_rules` decides. This module sends messages, writes files and reads the tier.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

from gemini_hpc import clock
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.round_events import Heard, Log, Send
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.replicas.store import Store
from gemini_hpc.agent.replicas.training import Training
from gemini_hpc.agent.tier import salvage_events as events
from gemini_hpc.agent.tier.node_writer import NodeWriter, WantedVersion
from gemini_hpc.agent.tier.salvage_rules import SalvageRules
from gemini_hpc.agent.tier.save_progress import SaveProgress
from gemini_hpc.agent.tier.saver import Saver
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.errors import TierFailed
from gemini_hpc.wire import peer
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import NodeFile

_TICK_S = 0.2  # interval of `Tick` events during a salvage


class Salvage:
    """An agent's part in the salvage. It lives as long as the agent, and concerns one incarnation at a time."""

    def __init__(
        self,
        context: AgentContext,
        trainings: Iterable[Training],
        store: Store,
        rejections: Rejections,
        saver: Saver,
        writer: NodeWriter,
    ) -> None:
        self._node, self._membership = context.node, context.membership
        self._log, self._spawn = context.log, context.spawn
        self._trainings, self._store, self._rejections = trainings, store, rejections
        self._saver, self._writer = saver, writer
        self._decides = SalvageRules(context.node)
        self._events: deque[events.Event] = deque()
        self._stepping = False
        self._clock: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # effects of the current try in progress

    # ---- state and events ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether a salvage is in progress."""
        return self._decides.busy

    @property
    def saved(self) -> bool:
        """Return whether all sealed versions are on the tier."""
        return self._decides.saved

    @property
    def reason(self) -> str:
        """Return the reason of the last failure, or ""."""
        return self._decides.reason

    @property
    def gathering(self) -> dict[str, SaveProgress]:
        """Return the saves that this agent has begun as the leader, by training."""
        return self._decides.gathering

    def is_due(self, now: float, *, last: bool = False) -> bool:
        """Return whether a salvage is due: a node is missing, and the last versions are not reported as saved.

        Args:
            now: Current time in seconds.
            last: Memory is to be freed. One more try is made for this at once.
        """
        wanted = self._membership.detached and self._saver.last and self._can_salvage()
        return wanted and self._decides.is_due(now, last=last) and self._misses_node(now)

    def serves(self, now: float) -> bool:
        """Return whether a salvage saves the surviving copies, or has saved them: the root alone cannot."""
        return (
            self._membership.detached and self._can_salvage() and (self.saved or self.busy or self._misses_node(now))
        )

    def _can_salvage(self) -> bool:
        return bool(self._saver.tier) and self._membership.incarnation is not None

    def _misses_node(self, now: float) -> bool:
        """Return whether a node is missing. All agents stay until they learn that the last versions are saved."""
        incarnation = self._membership.incarnation
        return incarnation is not None and incarnation.is_incomplete(now)

    def begin_try(self, *, last: bool = False, asked: bool = False) -> None:
        """Begin a try.

        Args:
            last: Memory is to be freed.
            asked: The try is requested by hand. It resets the gap between automatic tries instead of doubling it.
        """
        self._process_event(events.Begin(last, asked))

    def reset(self) -> None:
        """Stop the salvage: another incarnation or round needs the memory."""
        if self._decides.leader or self._membership.detached:  # the writer may read slots written from now on
            self._writer.cancel()
        self._process_event(events.Reset())

    def on_message(self, host: str, message: Message) -> None:
        """Handle a message of a peer of this incarnation."""
        if self._can_salvage():
            self._process_event(Heard(host, message))

    # ---- facts for the decisions -----------------------------------------------------------------------

    def _collect_facts(self, incarnation: Incarnation) -> events.SalvageFacts:
        mesh, membership = incarnation.mesh, self._membership
        sealed = [(training.name, training.sealed) for training in self._trainings if training.sealed is not None]
        return events.SalvageFacts(
            incarnation.hosts,
            mesh.dead,
            mesh.last_heard,
            membership.noderanks,
            self._describe_holdings(),
            bool(sealed) and all(self._rejections.is_rejected(name, stamp) for name, stamp in sealed),
            self._rejections.is_rejected,
            membership.detached,
            int.from_bytes(os.urandom(4)),
        )

    def _describe_holdings(self) -> peer.SalvageHave:
        """Return the seals that this agent knows and the copies that it holds.

        A training that has grown since its seal is included with its former size.
        """
        sealed: list[peer.Sealed] = []
        held: list[peer.Held] = []
        for training in self._trainings:
            shards = [shard for shard in self._store if shard.training == training.name]
            last, world = training.sealed, training.world
            for shard in shards:
                stamps = shard.pair.list_complete_stamps()
                world = shard.world if last in stamps else world
                held += [peer.Held(training.name, shard.rank, shard.home, s) for s in sorted(stamps)]
            if last is not None and world and not self._rejections.is_rejected(training.name, last):
                sealed.append(peer.Sealed(training.name, last, world))
        return peer.SalvageHave(tuple(sealed), tuple(held))

    # ---- decisions and effects -------------------------------------------------------------------------

    def _process_event(self, event: events.Event) -> None:
        """Step through events in sequence, including events caused by the effects of earlier events."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._stepping = False
        if self.busy and (self._clock is None or self._clock.done()):
            self._clock = self._spawn(self._run_clock())

    def _step(self, event: events.Event) -> None:
        incarnation = self._membership.incarnation
        if incarnation is None:
            return
        for effect in self._decides.step(event, self._collect_facts(incarnation), clock.monotonic()):
            self._perform_effect(incarnation, effect)

    async def _run_clock(self) -> None:
        while self.busy:
            await asyncio.sleep(_TICK_S)
            self._process_event(events.Tick())

    def _perform_effect(self, incarnation: Incarnation, effect: events.Effect) -> None:
        match effect:
            case Send():
                incarnation.send(effect.host, effect.message)
            case events.Write():
                self._write(effect.order, effect.leader)
            case Log(name, detail, version):
                self._log(name, version=version, detail=detail)
            case events.Failed():
                self._saver.say(effect.name, effect.stamp.version, effect.reason)
            case events.Saved():
                self._saver.record_last_stored()
            case events.Halt():
                for task in self._tasks:
                    task.cancel()
            case _:
                self._start(effect.run, self._perform_slow_effect(incarnation, effect))

    def _start(self, run: int, work: Coroutine[Any, Any, events.Event]) -> None:
        """Perform a slow effect and report its outcome."""

        async def report_outcome() -> None:
            try:
                event = await work
            except Exception:
                self._process_event(events.Broken(run))
                raise
            self._process_event(event)

        task = self._spawn(report_outcome())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform_slow_effect(
        self,
        incarnation: Incarnation,
        effect: events.Reach | events.Settle | events.Look | events.Publish | events.Clean,
    ) -> events.Event:
        match effect:
            case events.Reach():
                is_linked = await incarnation.mesh.ensure_link(effect.host, effect.within_s)
                return events.Reached(effect.run, effect.host, is_linked)
            case events.Settle():
                await self._saver.wait_idle(effect.stalled_s)
                return events.Settled(effect.run)
            case events.Look():
                try:
                    stored = await self._saver.find_stored((), effect.within_s)
                except TierFailed as error:  # the failure has been logged already
                    return events.Looked(effect.run, None, str(error))
                return events.Looked(effect.run, {m.training: m.stamp for m in stored})
            case events.Publish():
                return events.Published(effect.run, await self._saver.publish(effect.name, effect.gathering))
            case events.Clean():
                await self._saver.clean(effect.name, Stamp(effect.stamp.epoch, effect.stamp.version + 1))
                return events.Cleaned(effect.run)

    def _write(self, order: peer.SalvageWrite, leader: str) -> None:
        """Write this node's part, and report to the leader as often as it asks."""

        def report_written(files: tuple[NodeFile, ...], reason: str) -> None:
            done = peer.SalvageWrote(order.training, order.stamp, files, reason, order.attempt)
            if leader == self._node:
                self._process_event(Heard(leader, done))
            else:
                self._membership.send(leader, done)

        what = WantedVersion(order.training, order.stamp, order.attempt, frozenset(order.homes))
        if not self._writer.begin_save(what, self._saver.tier, report_written):
            report_written((), f"this node no longer holds version {order.stamp[1]}")
