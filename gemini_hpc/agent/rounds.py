"""Recovery rounds: how the agents of one incarnation agree on map, epoch and version before training goes on (R4).

A round runs along the tree over the positions of the host list; position 0 coordinates it:
collect (freeze, void what is half filled, verify, report) -> plan (void all but the chosen versions, take the
map) -> acknowledged by everyone -> go. The first round of an incarnation starts with its attach, later ones with
a new launch of the training in the same allocation. Every message names its round; a parent tells a child that
comes late, or comes back, where the round stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol

import msgspec

from gemini_hpc.agent.tierwork import TierFailed
from gemini_hpc.core import noderank, recovery
from gemini_hpc.core.seal import children, parent
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier.version import Manifest
from gemini_hpc.wire import bounds, peer, protocol
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Tier

_NO_TIER = Tier()


class Host(Protocol):
    """What the rounds need of the agent that they serve."""

    @property
    def job(self) -> int:
        """The job's id."""

    @property
    def restart(self) -> int:
        """The incarnation that the agent is in."""

    @property
    def replicas(self) -> int:
        """Holders of a shard."""

    def send(self, host: str, message: Message) -> bool:
        """To one peer, if there is a link."""

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers of other launches, void what is half filled."""

    async def inventory(self) -> peer.InventoryRecord:
        """Verify what is held, and tell."""

    async def outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """What agents hold on nodes that the job has left."""

    @property
    def tier(self) -> bool:
        """Whether the job has a tier."""

    @property
    def chosen(self) -> Tier:
        """What the program has chosen of it."""

    def choose(self, tier: Tier) -> bool:
        """Take what a program has chosen; False where it changes nothing."""

    async def stored(self, without: Iterable[tuple[str, bounds.Stamp]], *, launched: bool) -> tuple[Manifest, ...]:
        """The newest version of each set on the tier, but for these. launched: ranks wait for it, else the prologs.
        Raises `TierFailed` where it cannot be seen in time."""

    def apply(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch."""

    def live(self, plan: peer.PlanDown) -> None:
        """Everyone has acknowledged."""

    def bound(self, plan: peer.PlanDown) -> None:
        """The round now serves this launch of the training."""

    def log(self, name: str, *, version: int = 0, detail: str = "") -> None:
        """One event."""


class Rounds:
    """One agent's part in the rounds of one incarnation."""

    def __init__(
        self,
        host: Host,
        name: str,
        hosts: tuple[str, ...],
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._host, self._name, self._hosts, self._spawn = host, name, hosts, spawn
        position = hosts.index(name)
        above = parent(position)
        self.parent = None if above is None else hosts[above]
        self.children = tuple(hosts[c] for c in children(position, len(hosts)))
        self.round = 0
        self.stage = "idle"
        self.step = ""
        self.plan: peer.PlanDown | None = None
        self._records: dict[str, tuple[peer.InventoryRecord, ...]] = {}
        self._acks: set[str] = set()
        self._searching = False
        self._changed = asyncio.Event()

    @property
    def unseen(self) -> str:
        """Why this round serves no launch: it is not known what the tier has."""
        return self.plan.unseen if self.plan is not None else ""

    async def wait_live(self, step: str | None) -> None:
        """Return once a round (for this launch, unless None) is over."""
        while not (self.stage == "live" and (step is None or self.step == step)):
            await self.changed()

    async def changed(self) -> None:
        """Return after the next change of stage."""
        await self._changed.wait()

    def _stage(self, stage: str) -> None:
        self.stage = stage
        self._changed.set()
        self._changed = asyncio.Event()

    def resume(self, plan: peer.PlanDown) -> None:
        """After this agent's own death: go on in the round that its predecessor was in."""
        self.round, self.step, self.plan = plan.round, plan.step, plan
        self._stage("live")

    # ---- starting a round ------------------------------------------------------------------------------

    def begin(self, step: str) -> None:
        """Coordinator only: start the next round."""
        self._enter(self.round + 1, step)

    def need(self, after_round: int, step: str, again: bool, tier: Tier = _NO_TIER) -> None:
        """A launch wants to be served by a round after `after_round` (or by that one, if it serves nobody yet)."""
        if self.parent is not None:
            self._host.send(self.parent, peer.NeedRound(after_round, step, again, tier))
        elif self.stage == "live" and after_round == self.round:
            if self._host.choose(tier) or self.unseen:
                self.begin(step)
            elif not self.step:
                self._bind(step)
            elif again or self.step != step:
                self.begin(step)

    def _bind(self, step: str) -> None:
        """The first launch after an attach needs no round of its own; everyone hears which launch it is."""
        assert self.plan is not None
        self.step, self.plan = step, msgspec.structs.replace(self.plan, step=step)
        for child in self.children:
            self._host.send(child, peer.Go(self.round, step))
        self._host.bound(self.plan)
        self._stage("live")

    def _enter(self, number: int, step: str) -> None:
        self.round, self.step, self.plan = number, step, None
        self._records.clear()
        self._acks.clear()
        self._searching = False
        self._host.freeze(step)
        self._stage("collect")
        for child in self.children:
            self._host.send(child, peer.Collect(number, step))
        self._spawn(self._collect_own(number))

    async def _collect_own(self, number: int) -> None:
        record = await self._host.inventory()
        if number == self.round and self.stage == "collect":
            self._records[self._name] = (record,)
            self._gathered()

    # ---- messages --------------------------------------------------------------------------------------

    def on_link(self, name: str) -> None:
        """A child that comes (back) hears where the round stands; a parent is told what it may have missed."""
        if name in self.children:
            if self.stage == "collect":
                self._host.send(name, peer.Collect(self.round, self.step))
            elif self.plan is not None:
                self._host.send(name, self.plan)
                if self.stage == "live":
                    self._host.send(name, peer.Go(self.round, self.step))
        elif name == self.parent:
            if self.stage == "collect":
                self._gathered()
            elif self.stage == "planned":
                self._acknowledged()

    def on_message(self, name: str, message: protocol.AnyMessage) -> bool:
        """Take a message of the rounds; False where it is of another kind."""
        if isinstance(message, peer.Collect):
            if name == self.parent and message.round > self.round:
                self._enter(message.round, message.step)
            elif name == self.parent and message.round == self.round and self.stage == "collect":
                self._gathered()
            elif name == self.parent:
                self._lost(message.round)
        elif isinstance(message, peer.InventoryUp):
            if name in self.children and message.round == self.round and self.stage == "collect":
                self._records[name] = message.records
                self._gathered()
        elif isinstance(message, peer.PlanDown):
            if name == self.parent and message.round == self.round and self.stage == "collect":
                self._take(message)
            elif name == self.parent and message.round == self.round and self.stage == "planned":
                self._acknowledged()
            elif name == self.parent and not (message.round == self.round and self.stage == "live"):
                self._lost(message.round)
        elif isinstance(message, peer.RoundLost):
            if name in self.children:
                self._restart(message.at, message.mine)
        elif isinstance(message, peer.PlanAck):
            same = self.plan is not None and message.map_hash == self.plan.map_hash
            if name in self.children and message.round == self.round and same:
                self._acks.add(name)
                self._acknowledged()
        elif isinstance(message, peer.Go):
            if name == self.parent and message.round == self.round:
                if self.stage == "planned":
                    self._go()
                if self.stage == "live" and message.step and not self.step:
                    self._bind(message.step)
        elif isinstance(message, peer.NeedRound):
            if name in self.children:
                self.need(message.after_round, message.step, message.again, message.tier)
        else:
            return False
        return True

    def _lost(self, at: int) -> None:
        if self.parent is not None:
            self._host.send(self.parent, peer.RoundLost(at, self.round))

    def _restart(self, at: int, theirs: int) -> None:
        if self.parent is not None:
            self._host.send(self.parent, peer.RoundLost(at, max(theirs, self.round)))
        elif at == self.round:
            self._host.log("round_lost", detail=f"round {at} does not fit an agent that is in round {theirs}")
            self.round = max(self.round, theirs)
            self.begin(self.step)

    def close(self) -> None:
        """A newer incarnation has begun: this one answers nothing any more."""
        self.round, self.stage = -1, "closed"

    def _gathered(self) -> None:
        if self._records.keys() != {self._name, *self.children}:
            return
        records = tuple(r for part in self._records.values() for r in part)
        if self.parent is not None:
            self._host.send(self.parent, peer.InventoryUp(self.round, records))
            return
        plan, sure = self._decide(records)
        if (sure and not any(r.doubt for r in records)) or (self._host.restart == 0 and self.round == 1):
            self._take(plan)
        elif not self._searching:
            self._searching = True
            self._spawn(self._search(self.round, records, plan))

    async def _search(self, number: int, records: tuple[peer.InventoryRecord, ...], plan: peer.PlanDown) -> None:
        """Coordinator: the nodes of this incarnation cannot serve, or only what is older than the last seal. In the
        first round of a restart, look on those that the job has left; then on the tier."""
        sure = False
        if self._host.restart > 0 and self.round == 1 and not any(s.chosen for s in plan.sets):
            former = {host for r in records for host in r.noderanks or {}}
            more = await self._host.outside(tuple(sorted(former)))
            if any(r.copies for r in more):
                self._host.log("found_outside", detail=f"copies on {', '.join(r.host for r in more)[:300]}")
            records = (*records, *more)
            plan, sure = self._decide(records)
        nothing = self._host.restart == 0 and all(r.unbroken and not r.sealed for r in records)  # was ever sealed
        # Who took a plan that was made without a look at the tier may have forgotten what was newer.
        seen = nothing or (sure and not any(r.doubt for r in records))
        if self._host.tier and not seen:
            without = {bad for record in records for bad in record.unreadable}
            try:
                stored = await self._host.stored(without, launched=bool(plan.step))
                plan, seen = from_tier(plan, stored, self._hosts), True
            except TierFailed as error:  # who went on without starts from nothing
                plan = msgspec.structs.replace(plan, unseen=str(error))
        if number == self.round and self.stage == "collect":
            self._take(msgspec.structs.replace(plan, doubt=not seen))

    def _take(self, plan: peer.PlanDown) -> None:
        self.plan, self.step = plan, plan.step
        self._host.apply(plan)
        self._stage("planned")
        for child in self.children:
            self._host.send(child, plan)
        self._acknowledged()

    def _acknowledged(self) -> None:
        if self.plan is None or not self._acks.issuperset(self.children):
            return
        if self.parent is not None:
            if self.stage == "planned":
                self._host.send(self.parent, peer.PlanAck(self.round, self.plan.map_hash))
        elif self.stage == "planned":
            self._go()

    def _go(self) -> None:
        assert self.plan is not None
        for child in self.children:
            self._host.send(child, peer.Go(self.round, self.step))
        self._host.live(self.plan)
        self._stage("live")

    # ---- the coordinator's decision --------------------------------------------------------------------

    def _decide(self, records: tuple[peer.InventoryRecord, ...]) -> tuple[peer.PlanDown, bool]:
        """The plan, and whether it is what was sealed last, of every set."""
        m = min(self._host.replicas, len(self._hosts))
        plan = recovery.plan(
            {r.host: _inventory(r) for r in records},
            self._hosts,
            m,
            min_epoch=recovery.first_epoch(self._host.restart),
        )
        for warning in plan.warnings:
            self._host.log("warning", detail=warning)
        sets, pulls = [], []
        for s in plan.sets:
            keepers = _keepers(records, s)
            copies = tuple((_record(shard), tuple(sorted(keepers[shard.rank]))) for shard in s.shards)
            lost = tuple(f"shard {x.rank}: {x.reason}" for x in s.lost)
            if s.outcome == "never-sealed":
                lost = ("no version had been sealed yet",)
            keep = tuple((stamp.epoch, stamp.version) for stamp in s.keep)
            sets.append(peer.SetPlan(s.set_name, _pair(s.chosen), keep, _pair(s.sealed), s.world, copies, lost))
            pulls += [peer.PullOrder(p.dest_host, _record(p.shard), p.sources) for p in s.pulls]
        if not plan.sets and not plan.survivable:
            reason = f"all copies are gone with {', '.join(plan.gone)}"
            sets.append(peer.SetPlan("default", None, (), None, 0, (), (reason,)))
        down = peer.PlanDown(
            round=self.round,
            step=self.step,
            epoch=plan.epoch,
            noderanks=plan.noderanks,
            map_hash=noderank.map_hash(plan.noderanks, self._host.job, self._host.restart),
            ports={r.host: r.port for r in records},
            sets=tuple(sets),
            pulls=tuple(pulls),
            tier=self._host.chosen,
        )
        # what agents of an older incarnation have is not the newest where those of the last are all gone
        known = plan.survivable and plan.latest >= self._host.restart - 1
        return down, known and bool(plan.sets) and all(s.newest for s in plan.sets)


def from_tier(plan: peer.PlanDown, stored: Iterable[Manifest], hosts: tuple[str, ...]) -> peer.PlanDown:
    """The plan, with the tier's version of each set of which memory has nothing as new. The home of a shard reads it;
    its other holders have something again when the next version is saved: until then the tier is what they were."""
    sets, pulls, epoch = {s.name: s for s in plan.sets}, list(plan.pulls), plan.epoch
    by_rank = {rank: host for host, rank in plan.noderanks.items()}
    for manifest in stored:
        known = sets.get(manifest.set)
        if known is not None and known.chosen is not None and known.chosen >= manifest.stamp:
            continue
        name, stamp = manifest.set, manifest.stamp
        copies = [
            peer.CopyRecord(name, s.rank, manifest.world, s.home, s.bytes, s.used, stamp, s.digest)
            for _, s in sorted(manifest.shards().values(), key=lambda found: found[1].rank)
        ]
        lost = known.lost if known is not None else ()
        sets[name] = peer.SetPlan(
            name, stamp, (stamp,), stamp, manifest.world, tuple((c, (peer.TIER,)) for c in copies), lost
        )
        pulls = [order for order in pulls if order.copy.set != name]
        pulls += [peer.PullOrder(by_rank[c.home % len(hosts)], c, (peer.TIER,)) for c in copies]
        epoch = max(epoch, stamp[0] + 1)
    if sets.keys() - {"default"}:  # its absence is told under this name when not even names are known
        sets = {n: s for n, s in sets.items() if n != "default" or s.chosen or s.world}
    return msgspec.structs.replace(plan, sets=tuple(sets.values()), pulls=tuple(pulls), epoch=epoch)


def _pair(stamp: Stamp | None) -> bounds.Stamp | None:
    return None if stamp is None else (stamp.epoch, stamp.version)


def _inventory(record: peer.InventoryRecord) -> recovery.Inventory:
    return recovery.Inventory(
        host=record.host,
        noderanks=record.noderanks,
        map_restart=record.map_restart,
        copies=tuple(
            recovery.CopyInfo(c.set, c.rank, c.world, c.home, c.bytes, c.used, Stamp(*c.stamp), c.digest)
            for c in record.copies
        ),
        max_epoch=record.max_epoch,
        sealed=tuple((name, Stamp(*stamp)) for name, stamp in record.sealed),
    )


def _record(copy: recovery.CopyInfo) -> peer.CopyRecord:
    return peer.CopyRecord(
        set=copy.set_name,
        rank=copy.rank,
        world=copy.world,
        home=copy.home,
        bytes=copy.bytes,
        used=copy.used,
        stamp=(copy.stamp.epoch, copy.stamp.version),
        digest=copy.digest,
    )


def _keepers(records: tuple[peer.InventoryRecord, ...], plan: recovery.SetPlan) -> dict[int, set[str]]:
    """rank -> hosts that hold the chosen copy with the trusted digest."""
    wanted = {shard.rank: shard.digest for shard in plan.shards}
    found: dict[int, set[str]] = {rank: set() for rank in wanted}
    for record in records:
        for c in record.copies:
            if (
                c.set == plan.set_name
                and plan.chosen is not None
                and c.stamp == (plan.chosen.epoch, plan.chosen.version)
                and wanted.get(c.rank) == c.digest
            ):
                found[c.rank].add(record.host)
    return found
