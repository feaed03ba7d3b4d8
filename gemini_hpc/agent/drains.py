"""Saving sealed versions to the tier, in the background (DESIGN section 3).

The root chooses a version right when it seals it, and tells all agents. Each copies the shards whose home it is into
slots of their own, which takes less than the training needs until it may write there again (two versions later, R1);
a copy that came too late is noticed by its digest. A process of its own then writes the node's file, slowly, and the
root is told; when it has heard of every rank it has the index and the manifest written. Nothing here is waited for
by the training, and what fails is told, dropped, and tried again with a newer version.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemini_hpc.agent import tierwork
from gemini_hpc.agent.memory import Memfd, NoMemory
from gemini_hpc.agent.store import Shard
from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import orders
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import bounds, peer, picture
from gemini_hpc.wire.stored import NodeFile

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent
    from gemini_hpc.agent.trainingset import TrainingSet

_COPY_BYTES = 16 << 20
_AGAIN_S = 5.0  # after a failure, or the interval if that is less
_GATHER_S = 3600.0
_FLUSH_TRIES = 3
_LEAVE_S = 10.0


@dataclass
class Gathering:
    """At the root: a version that is on its way to the tier. done: when it is there, "", or why it will not be."""

    stamp: Stamp
    world: int
    attempt: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)))
    began: float = field(default_factory=time.monotonic)
    files: dict[str, NodeFile] = field(default_factory=dict)
    done: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def whole(self) -> bool:
        return {s.rank for file in self.files.values() for s in file.shards} == set(range(self.world))

    def end(self, reason: str = "") -> None:
        """Tell those who wait."""
        if not self.done.done():
            self.done.set_result(reason)


class Drains:
    """One agent's part in it; it lives as long as the agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._copies: dict[tuple[str, int], Memfd] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, peer.DrainDown] = {}  # what is being saved here, or was last,
        self._told: dict[str, peer.DrainUp] = {}  # and what became of it
        self._gathering: dict[str, Gathering] = {}
        self._due: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._through: dict[str, int] = {}
        self._tidy: dict[str, asyncio.Task[None]] = {}  # at the root: removes what a life before has left half done
        self._ends_at = math.inf  # by Slurm's word (monotonic)
        self._before_end: dict[str, float] = {}  # at the root: the end before which a version has been saved
        self._took_s: dict[str, float] = {}  # the last save
        self.last = False  # the job has ended here, and its last version is wanted on the tier
        self.unreadable: set[tuple[str, bounds.Stamp]] = set()  # versions of which a shard could not be read
        self.saved: dict[str, tuple[Stamp, float]] = {}  # at the root: the newest on the tier, and when (Unix time)

    @property
    def tier(self) -> str:
        """The directory; empty: none."""
        attach = self._agent.attached_as
        return attach.tier if attach is not None else ""

    @property
    def interval_s(self) -> float:
        """From the beginning of one save to that of the next."""
        attach = self._agent.attached_as
        return float((attach.tier_interval if attach is not None else 0) or self._agent.settings.tier_interval_s)

    def freeze(self) -> None:
        """A round begins: what is on its way will not become whole."""
        self.last = False
        for gathering in self._gathering.values():
            gathering.end("a recovery round came between")
        self._gathering.clear()
        self._tidy.clear()

    @property
    def busy(self) -> bool:
        """Whether something is being written here, or waited for."""
        return bool(self._gathering) or any(not task.done() for task in self._saving.values())

    def progress(self, name: str) -> int:
        """Bytes of a set that are on the tier, as far as the root knows: what it has written itself, and the files of
        nodes that are done."""
        gathering = self._gathering.get(name)
        others = () if gathering is None else (f.bytes for h, f in gathering.files.items() if h != self._agent.node)
        return self._through.get(name, 0) + sum(others)

    def state(self, name: str) -> picture.TierState | None:
        """For `inspect`: what the root knows of a set."""
        rounds = self._agent.rounds
        if not self.tier or rounds is None or rounds.parent is not None:
            return None
        stored, at = self.saved.get(name, (None, 0.0))
        gathering = self._gathering.get(name)
        return picture.TierState(
            directory=self.tier,
            stored=None if stored is None else (stored.epoch, stored.version),
            time=at,
            saving=None if gathering is None else (gathering.stamp.epoch, gathering.stamp.version),
            written=self.progress(name) if gathering is not None else 0,
            problem=self._said.get(name, "") or self._said.get("", ""),
        )

    def close(self) -> None:
        """Free everything; processes end."""
        for task in self._saving.values():
            task.cancel()
        for memory in self._copies.values():
            memory.close()
        self._copies.clear()

    async def leave(self) -> None:
        """The agent ends: a version that is on its way will not become whole. For a few seconds."""
        begun = dict(self._gathering)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for name, gathering in begun.items():
                    if gathering.whole:  # its manifest is being written
                        await asyncio.wait([gathering.done])
                    else:  # a newer one may be another incarnation's
                        await self._clean(name, Stamp(gathering.stamp.epoch, gathering.stamp.version + 1))

    async def stored(self, without: Iterable[tuple[str, bounds.Stamp]]) -> tuple[Manifest, ...]:
        """The newest whole version of each set on the tier, but for these. Asked until there is an answer: who goes
        on without one starts from nothing."""
        order = orders.Look(self.tier, self._agent.job, "", tuple(without))
        while True:
            try:
                found = await tierwork.carry_out(order)
                self._said.pop("", None)
                manifests = found.manifests if isinstance(found, orders.Found) else ()
                self.saved.update({m.set: (Stamp(*m.stamp), m.time) for m in manifests})
                return manifests
            except TierFailed as error:
                self._say("", 0, f"what is on the tier cannot be seen: {error}")
            await asyncio.sleep(_AGAIN_S)

    def _say(self, name: str, version: int, reason: str) -> None:
        if self._said.get(name) != reason:
            self._said[name] = reason
            self._agent.log("not_saved" if name else "tier_silent", version=version, detail=reason)

    # ---- the root --------------------------------------------------------------------------------------

    def sealed(self, training: TrainingSet, number: int, stamp: Stamp) -> None:
        """The root has sealed a version: is it one to save?"""
        name, now = training.name, time.monotonic()
        if not self.tier or stamp.epoch != self._agent.epoch:
            return
        due = now >= self._due.setdefault(name, now + self.interval_s) or self._near_end(name, now)
        if self._under_way(name) is None and self._tidied(name).done() and due:
            self._begin(training, number, stamp)

    def ends_in(self, left_s: int | None) -> None:
        """Slurm ends the job in so many seconds; None: it sets no time."""
        self._ends_at = math.inf if left_s is None else time.monotonic() + left_s

    def _near_end(self, name: str, now: float) -> bool:
        """Whether it is time for the save before the job's time limit."""
        ahead_s = self._agent.settings.tier_before_end_s
        if not ahead_s or self._before_end.get(name) == self._ends_at:
            return False
        return now >= self._ends_at - max(ahead_s, 2 * self._took_s.get(name, 0.0))

    def _tidied(self, name: str) -> asyncio.Task[None]:
        """Ends when what was begun before, and has not become whole, is gone; nothing is written until then."""
        if name not in self._tidy:
            self._tidy[name] = self._agent.spawn(self._clean(name))
        return self._tidy[name]

    async def _clean(self, name: str, before: Stamp | None = None) -> None:
        limit = None if before is None else (before.epoch, before.version)
        try:
            await tierwork.carry_out(orders.Clean(self.tier, self._agent.job, name, limit))
        except TierFailed as error:
            self._say(name, 0, f"half versions cannot be removed: {error}")

    def _under_way(self, name: str) -> Gathering | None:
        found = self._gathering.get(name)
        if found is not None and time.monotonic() - found.began >= _GATHER_S:
            self._failed(name, found, f"not all nodes have written it within {_GATHER_S:.0f} s")
            return None
        return found

    def _begin(self, training: TrainingSet, number: int, stamp: Stamp) -> Gathering:
        name = training.name
        now = time.monotonic()
        self._due[name] = now + self.interval_s
        if self._near_end(name, now):
            self._before_end[name] = self._ends_at
        gathering = self._gathering[name] = Gathering(stamp, training.world)
        agent = self._agent
        message = peer.DrainDown(number, name, (stamp.epoch, stamp.version), gathering.attempt)
        agent.spawn(self._ask(message, gathering))
        return gathering

    async def _ask(self, message: peer.DrainDown, gathering: Gathering) -> None:
        """All agents, again and again: one that has died meanwhile has forgotten it, and says so."""
        while not gathering.whole and self._under_way(message.set) is gathering:
            self.wanted(message)
            await asyncio.wait([gathering.done], timeout=_AGAIN_S)

    async def flush(self, training: TrainingSet) -> tuple[Stamp, str]:
        """The root brings the newest sealed version to the tier now: which one, and why it is not there or "". A
        training that goes on may overtake a version before it is copied: then the next one is tried."""
        reason, wanted = "", training.sealed
        for _ in range(_FLUSH_TRIES):
            rounds, stamp = self._agent.rounds, training.sealed
            if rounds is None or rounds.parent is not None or stamp is None or wanted is None:
                return stamp or Stamp(0, 0), reason or "nothing of it has been sealed yet"
            kept = self.saved.get(training.name)
            if kept is not None and kept[0] >= wanted:
                return kept[0], ""
            await asyncio.wait([self._tidied(training.name)])
            gathering = self._under_way(training.name) or self._begin(training, rounds.round, stamp)
            reason = await asyncio.shield(gathering.done)
            if not reason and gathering.stamp >= wanted:
                return gathering.stamp, ""
        return wanted or Stamp(0, 0), reason

    def detached(self) -> None:
        """The job has ended here, without success: the newest version goes to the tier before the memory is freed."""
        agent, rounds = self._agent, self._agent.rounds
        sealed = [training for training in agent.sets if training.sealed is not None]
        self.last = bool(self.tier and agent.settings.tier_flush_s and rounds is not None and sealed)
        if self.last and rounds is not None and rounds.parent is None:
            for training in sealed:
                agent.spawn(self._last(training))

    async def _last(self, training: TrainingSet) -> None:
        stamp, reason = await self.flush(training)
        if reason:
            self._agent.log("not_saved", version=stamp.version, detail=reason)

    def heard(self, message: peer.DrainUp) -> None:
        """From an agent, or through one: it goes up to the root, which counts."""
        rounds = self._agent.rounds
        if rounds is None or message.round != rounds.round:
            return
        if rounds.parent is not None:
            self._agent.send(rounds.parent, message)
            return
        gathering = self._gathering.get(message.set)
        if gathering is None or (gathering.stamp, gathering.attempt) != (Stamp(*message.stamp), message.attempt):
            return
        if message.file is None:
            self._failed(message.set, gathering, f"{message.host}: {message.reason}")
            return
        gathering.files[message.host] = message.file
        if gathering.whole:
            self._agent.spawn(self._finish(message.set, gathering))

    def _failed(self, name: str, gathering: Gathering, reason: str) -> None:
        if self._gathering.get(name) is gathering:
            del self._gathering[name]
            self._due[name] = min(self._due.get(name, 0.0), time.monotonic() + _AGAIN_S)
            self._tidy.pop(name, None)
        self._say(name, gathering.stamp.version, reason)
        gathering.end(reason)

    async def _finish(self, name: str, gathering: Gathering) -> None:
        agent, settings, stamp = self._agent, self._agent.settings, gathering.stamp
        files = tuple(sorted(gathering.files.values(), key=lambda f: f.name))
        order = orders.Finish(
            self.tier,
            agent.job,
            name,
            (stamp.epoch, stamp.version),
            gathering.world,
            files,
            settings.tier_keep_last,
            settings.tier_keep_every,
        )
        try:
            done = await tierwork.carry_out(order)
        except TierFailed as error:
            self._failed(name, gathering, str(error))
            return
        if self._gathering.get(name) is gathering:
            del self._gathering[name]
        gathering.end()
        trouble = done.trouble if isinstance(done, orders.Finished) else ""
        if trouble:
            self._say(name, stamp.version, trouble)
        else:
            self._said.pop(name, None)
        self.saved[name] = stamp, time.time()
        size, took = sum(f.bytes for f in files), time.monotonic() - gathering.began
        self._took_s[name] = took
        agent.log("saved", version=stamp.version, detail=f"{size} bytes in {len(files)} files in {took:.1f} s")

    # ---- every agent -----------------------------------------------------------------------------------

    def wanted(self, message: peer.DrainDown) -> None:
        """The root wants this version saved."""
        agent, rounds = self._agent, self._agent.rounds
        if rounds is None or message.round != rounds.round or not self.tier:
            return
        for child in rounds.children:
            agent.send(child, message)
        name, stamp = message.set, Stamp(*message.stamp)
        mine = agent.noderanks[agent.node]
        shards = [shard for shard in agent.store.of_set(name) if shard.home == mine]
        if not shards:
            return
        before, told = self._saving.get(name), self._told.get(name)
        if self._begun.get(name) == message:
            if told is not None and told.attempt == message.attempt:
                self.heard(told)  # again: it may have been lost with an agent on its way
        else:
            if before is not None:
                before.cancel()  # the root has given that version up, or there would be no other
            self._begun[name] = message
            self._saving[name] = agent.spawn(self._save(message, stamp, mine, shards, before))

    def _tell(self, message: peer.DrainDown, file: NodeFile | None, reason: str = "") -> None:
        told = peer.DrainUp(
            message.round, message.set, message.stamp, self._agent.node, file, reason, message.attempt
        )
        self._told[message.set] = told
        self.heard(told)

    async def _save(
        self,
        message: peer.DrainDown,
        stamp: Stamp,
        mine: int,
        shards: list[Shard],
        before: asyncio.Task[None] | None,
    ) -> None:
        agent = self._agent
        sources: list[orders.Source] = []
        if before is not None:  # it reads the copies that are made now
            await asyncio.wait([before])
        try:
            for shard in shards:
                sources.append(await self._copy(shard, stamp))
            order = orders.Write(
                self.tier,
                agent.job,
                message.set,
                message.stamp,
                mine,
                tuple(sources),
                agent.settings.tier_bytes_per_s,
                agent.settings.tier_compress,
            )
            self._through[message.set] = 0
            answer = await tierwork.carry_out(
                order, [source.fd for source in sources], lambda count: self._through.update({message.set: count})
            )
            if not isinstance(answer, orders.Written):
                raise TierFailed("its process has answered something else")
            self._tell(message, answer.file)
        except (TierFailed, NoMemory, OSError, ValueError) as error:
            self._tell(message, None, str(error))

    async def _copy(self, shard: Shard, stamp: Stamp) -> orders.Source:
        """The shard's version in a slot of its own. Raises `TierFailed`, `NoMemory`."""
        index = shard.pair.find(stamp)
        record = shard.record(index) if index is not None else None
        if index is None or record is None:
            raise TierFailed(f"rank {shard.rank} has gone past version {stamp.version}")
        if self._agent.detached:  # nobody writes there any more
            return orders.Source(
                shard.memory[index].fd, shard.rank, shard.home, shard.bytes, record.used, record.digest
            )
        memory = await self._memory(shard)
        await asyncio.to_thread(_copy, shard.memory[index].fd, memory, record.used)
        return orders.Source(memory.fd, shard.rank, shard.home, shard.bytes, record.used, record.digest)

    async def _memory(self, shard: Shard) -> Memfd:
        key, budget = (shard.set, shard.rank), self._agent.budget
        found = self._copies.get(key)
        if found is not None and found.size_bytes == shard.bytes:
            return found
        if found is not None:
            del self._copies[key]
            found.close()
            budget.give(found.size_bytes)
        budget.take(shard.bytes, f"a third copy of the shard of rank {shard.rank}, for the tier")
        memory = Memfd(f"gemini:tier:{shard.rank}", shard.bytes)
        try:
            await asyncio.to_thread(memory.reserve, budget.left_bytes)
        except BaseException:
            memory.close()
            budget.give(shard.bytes)
            raise
        self._copies[key] = memory
        return memory


def _copy(fd: int, into: Memfd, used_bytes: int) -> None:
    """The first bytes of a slot, while others may write there; the GIL is free meanwhile. Raises OSError."""
    with into.view() as view:
        at = 0
        while at < used_bytes:
            count = os.preadv(fd, [view[at : min(used_bytes, at + _COPY_BYTES)]], at)
            if not count:
                raise TierFailed("a slot is shorter than it says")
            at += count
