"""What the agent does for training ranks: one method a request of `wire.local`."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from gemini_hpc import clock
from gemini_hpc.agent import fills
from gemini_hpc.agent.local import Client, Reply
from gemini_hpc.agent.memory import NoMemory, adopt
from gemini_hpc.agent.pledges import Wish
from gemini_hpc.agent.pull import PullFailed
from gemini_hpc.agent.store import Shard
from gemini_hpc.agent.trainingset import TrainingSet
from gemini_hpc.core import placement, ranges
from gemini_hpc.core.record import Committed
from gemini_hpc.core.slots import Refused, Stamp
from gemini_hpc.wire import local, version
from gemini_hpc.wire.allowance import Allowance

if TYPE_CHECKING:
    from gemini_hpc.agent.agent import Agent

_MAX_SHARDS = 4096  # on one node, all sets together; each takes two descriptors
_OTHER_LAUNCH_S = 5.0
_ROUND_S = 100.0
_CHOICE_S = 10.0
_LEAVE_S = 2.0
_REJOIN_S = 5.0  # until a round that has been agreed on is live again behind a new agent
_MAX_STEP = 64
_TOLD = 8  # rejected versions
_EVENTS_PER_S, _EVENTS_BURST = 2.0, 200.0


class Rejected(Exception):
    """A request that cannot be served; the text is for the user. later: it may be, later."""

    def __init__(self, text: str, *, later: bool = False) -> None:
        super().__init__(text)
        self.later = later


class Service:
    """Requests of training ranks, on behalf of the agent that owns sets and store."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._clients: dict[Client, tuple[str, str, int]] = {}
        self._fills: dict[tuple[str, int, int], Client] = {}
        self._keepers: dict[tuple[str, int], Client] = {}
        self._events = Allowance(_EVENTS_PER_S, _EVENTS_BURST)

    # ---- bookkeeping -----------------------------------------------------------------------------------

    def gone(self, client: Client) -> None:
        """A connection has ended: what it was filling is void."""
        who = self._clients.pop(client, None)
        self._void(client)
        self._keepers = {key: keeper for key, keeper in self._keepers.items() if keeper is not client}
        self._agent.outgoing.gone(client)
        if writing := fills.gone(client, list(self._agent.store)):
            self._agent.spawn(fills.ended(client, writing))
        if who is not None:
            training = self._agent.sets.get(who[1])
            if training is not None and training.present.get(who[2]) is client:
                del training.present[who[2]]

    def steps(self) -> set[str]:
        """Launches whose training ranks are connected now."""
        return {step for step, _, _ in self._clients.values()}

    def drop_others(self, step: str) -> None:
        """A new round: connections of earlier launches (or of this one, which must say hello again) end."""
        for client in list(self._clients):
            client.drop()
        self._fills.clear()

    def _training(self, client: Client, name: str) -> TrainingSet:
        who = self._clients.get(client)
        training = self._agent.sets.get(name)
        if who is None or who[1] != name or training is None:
            raise Rejected("say hello first")
        rounds = self._agent.rounds
        if rounds is None or rounds.stage != "live":
            raise Rejected("a recovery round is on")
        return training

    def _shard(self, client: Client, name: str, rank: int) -> tuple[TrainingSet, Shard]:
        training = self._training(client, name)
        shard = self._agent.store.get(name, rank)
        if shard is None:
            raise Rejected(f"shard of rank {rank} is not registered here")
        return training, shard

    def _keep(self, client: Client, m: local.Register | local.HandBack) -> TrainingSet:
        """The set, where this client may write the shard: each shard has one writer on a node, and is one that
        this node keeps, of a training that is as large as its ranks said."""
        agent = self._agent
        training = self._training(client, m.set)
        if m.world != training.world or m.rank >= m.world or m.home >= len(agent.hosts):
            raise Rejected(f"shard of rank {m.rank} of {m.world}, home {m.home} cannot be")
        if agent.noderanks[agent.node] not in placement.holders(m.home, len(agent.hosts), agent.replicas):
            raise Rejected(f"node rank {agent.noderanks[agent.node]} keeps nothing of node rank {m.home}")
        keeper = self._keepers.get((m.set, m.rank))
        if keeper is not None and keeper is not client and not keeper.closed.is_set():
            raise Rejected(f"shard of rank {m.rank} is written by process {keeper.pid} here")
        if (m.set, m.rank) not in agent.store.shards and len(agent.store.shards) >= _MAX_SHARDS:
            raise Rejected(f"a node keeps at most {_MAX_SHARDS} shards")
        return training

    # ---- requests --------------------------------------------------------------------------------------

    async def handle(self, client: Client, request: local.Request, fds: list[int]) -> Reply:
        """Answer one request of a training rank; takes the descriptors."""
        try:
            if isinstance(request, local.HandBack):
                return await self._hand_back(client, request, fds)
            if isinstance(request, local.Hello):
                return await self._hello(client, request)
            if isinstance(request, local.Register):
                return await self._register(client, request)
            if isinstance(request, local.Begin):
                return self._begin(client, request)
            if isinstance(request, local.Fill):
                return self._fill(client, request)
            if isinstance(request, local.Filled):
                return self._filled(client, request)
            if isinstance(request, local.Landed):
                return self._landed(client, request)
            if isinstance(request, local.Abort):
                return self._abort(client, request)
            if isinstance(request, local.Fetch):
                return await self._fetch(client, request)
            if isinstance(request, local.OpenPush):
                return self._open_push(client, request)
            if isinstance(request, local.Event):
                self._heard(client, request)
                if self._events.take():
                    name, detail = _plain(request.name, 40), request.detail[:300]
                    self._agent.log(name, version=request.version, detail=detail, t=request.t)
                else:
                    self._agent.complain(f"process {client.pid} has more events to tell than are kept")
                return local.Ok(), []
            if isinstance(request, local.Finished):
                self._own(client, request)
                training = self._training(client, request.set)
                training.finished.add(request.rank)
                return local.Ok(), []
            if isinstance(request, local.Reject):
                self._own(client, request)
                training = self._training(client, request.set)
                if training.chosen is None or training.chosen.version != request.version:
                    raise Rejected(f"version {request.version} is not what the ranks have loaded")
                if why := self._agent.rejections.reject(training, request.reason, fresh=request.fresh):
                    raise Rejected(why)
                return local.Ok(), []
            if isinstance(request, local.KeepVersion):
                self._own(client, request)
                if why := self._agent.keeps.ask(Wish(request.set, request.name, request.version)):
                    raise Rejected(why)
                return local.Ok(), []
            if isinstance(request, (local.Traffic, local.Timeline, local.Keep, local.Recall)):
                return self._told(client, request), []
        except (Rejected, NoMemory) as exc:
            return local.Error(str(exc), isinstance(exc, Rejected) and exc.later), []
        finally:
            for fd in fds:
                os.close(fd)
        return local.Error("not a request of a training rank"), []

    async def _hello(self, client: Client, m: local.Hello) -> Reply:
        agent = self._agent
        proto = version.common(m.proto, m.most)
        if not proto:
            raise Rejected(f"the training process speaks {version.mismatch(m.proto, m.most)}")
        if not agent.sets.may_have(m.set) or m.rank >= m.world or not 0 < len(m.step) <= _MAX_STEP:
            raise Rejected(f"set {m.set[:64]!r}, rank {m.rank} of {m.world} cannot be")
        if client in self._clients:
            raise Rejected("this connection has said hello before")
        rounds = agent.rounds
        if rounds is None or agent.detached:
            raise Rejected("this node has no part in a running incarnation of the job")
        await self._alone(m)
        if not m.rejoin:
            try:
                async with asyncio.timeout(_ROUND_S):
                    await self._round_for(m)
            except TimeoutError:
                why = f": {rounds.trouble}" if rounds.trouble else "; see gemini-hpc inspect"
                raise Rejected(f"the agents did not agree in time{why}") from None
            if rounds.unseen:
                raise Rejected(rounds.unseen, later=True)
        elif not await self._goes_on(m):
            raise Rejected("the job has gone on without this process")
        if client.closed.is_set():
            raise Rejected("closed")
        training = agent.sets.named(m.set)
        if training.greeted and m.world != training.world:
            raise Rejected(f"rank {m.rank} says that {m.world} ranks train, others said {training.world}")
        training.greeted.add(m.rank)
        if not m.rejoin:
            agent.tellings.begun(m.set, m.rank)
        training.finished.discard(m.rank)
        training.left.pop(m.rank, None)
        training.present[m.rank] = client
        training.world = m.world
        self._clients[client] = (m.step, m.set, m.rank)
        chosen = training.chosen or Stamp(0, 0)
        welcome = local.Welcome(
            job=agent.job,
            restart=agent.restart,
            epoch=agent.epoch,
            node_rank=agent.noderanks[agent.node],
            nodes=len(agent.hosts),
            replicas=agent.replicas,
            chosen_epoch=chosen.epoch,
            chosen_version=chosen.version,
            chosen_world=training.chosen_world,
            stored=training.stored,
            lost=training.lost[:100],
            notice="; ".join(filter(None, (agent.notice, agent.drains.problem))),
            proto=proto,
            rejected=agent.rejections.sentences(m.set)[-_TOLD:],
            fresh=agent.rejections.fresh(m.set),
        )
        return welcome, [training.page_fd()]

    def _heard(self, client: Client, m: local.Event) -> None:
        """A rank that says that it is not protected is believed, for what all are told."""
        who = self._clients.get(client)
        training = self._agent.sets.get(who[1]) if who is not None else None
        if who is None or training is None or training.present.get(who[2]) is not client:
            return
        if m.name == "skipped":  # versions that are not saved are steps, too
            training.pace.reached(m.version)
            for (name, rank), keeper in self._keepers.items():
                shard = self._agent.store.get(name, rank)
                if keeper is client and shard is not None and not shard.pushed:
                    self._agent.filling.passed(shard, m.version)
        elif m.name == "degraded":
            training.complain(f"rank {who[2]}: {m.detail[:300]}")
        elif m.name == "unprotected":  # such a rank tells of no step
            training.pace.reset()
            training.left[who[2]] = m.detail[:300]
            self._void(client)

    def _void(self, client: Client) -> None:
        """What this process was filling is not filled any more."""
        for (name, rank, index), filler in list(self._fills.items()):
            if filler is client:
                del self._fills[name, rank, index]
                shard = self._agent.store.get(name, rank)
                if shard is not None and shard.pair.slots[index].state == "filling":
                    shard.pair.void(index)
                    self._agent.sets.recount(name)

    def _told(
        self, client: Client, m: local.Traffic | local.Timeline | local.Keep | local.Recall
    ) -> local.Ok | local.Kept:
        """Of a rank by itself only."""
        self._own(client, m)
        tellings = self._agent.tellings
        if isinstance(m, local.Recall):
            return local.Kept(tellings.recall(m.set, m.rank, m.key))
        if isinstance(m, local.Keep):
            tellings.keep(m.set, m.rank, m.key, m.data)
        elif isinstance(m, local.Traffic):
            tellings.traffic(m.set, m.rank, m.state)
        else:
            tellings.timeline(m.set, m.rank, m.timeline)
        return local.Ok()

    def _own(self, client: Client, m: local.OfRank) -> None:
        if self._training(client, m.set).present.get(m.rank) is not client:
            raise Rejected(f"rank {m.rank} is not this process's")

    async def _alone(self, m: local.Hello) -> None:
        """Wait, for a moment, until an earlier process of this rank has left; it may just have been killed."""
        deadline = clock.monotonic() + _LEAVE_S
        while True:
            training = self._agent.sets.get(m.set)
            other = training.present.get(m.rank) if training is not None else None
            if other is None or other.closed.is_set() or self._clients.get(other, ("",))[0] != m.step:
                return
            if clock.monotonic() > deadline:
                raise Rejected(
                    f"rank {m.rank} of set {m.set!r} trains here already (process {other.pid}); "
                    "several trainings in one job need names: Checkpointer(name=...)"
                )
            await asyncio.sleep(0.02)

    async def _goes_on(self, m: local.Hello) -> bool:
        """Whether the round that a process trains in is live. An agent that has just been started may know that it
        was agreed on, and have to be told by its peers that everybody knows."""
        rounds = self._agent.rounds
        assert rounds is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_REJOIN_S):
                while rounds.stage == "planned":
                    await rounds.changed()
        return rounds is self._agent.rounds and rounds.stage == "live" and rounds.step == m.step

    async def _round_for(self, m: local.Hello) -> None:
        """Wait for the round that serves this launch; ask for one where it is a new launch."""
        agent = self._agent
        rounds = agent.rounds
        assert rounds is not None
        await rounds.wait_live(None)
        training = agent.sets.get(m.set)
        again = training is not None and m.rank in training.greeted
        chooses = agent.drains.heeds(m.tier)
        if rounds.step == m.step and not again and not rounds.unseen and not chooses:
            return
        deadline = clock.monotonic() + _OTHER_LAUNCH_S
        while others := self.steps() - {m.step}:
            if clock.monotonic() > deadline:
                raise Rejected(f"another training of this job is running (step {', '.join(sorted(others))})")
            await asyncio.sleep(0.02)
        before = rounds.round
        need_new = again or chooses or bool(rounds.step or rounds.unseen)
        patient_until = clock.monotonic() + _CHOICE_S
        while True:
            if chooses and clock.monotonic() > patient_until:  # a root of a version that knows nothing of it
                chooses, need_new = False, again or bool(rounds.unseen)
            if rounds.stage == "live" and rounds.step == m.step and (rounds.round > before or not need_new):
                return
            if rounds.stage == "live":
                rounds.need(rounds.round, m.step, again, m.tier)
            if rounds.stage == "live" and rounds.step == m.step and not need_new:
                return
            try:
                async with asyncio.timeout(1.0):  # the wish may be lost with a link: ask again
                    await rounds.changed()
            except TimeoutError:
                continue

    async def _register(self, client: Client, m: local.Register) -> Reply:
        agent = self._agent
        training = self._keep(client, m)
        size_bytes = m.bytes
        if m.pushed and not size_bytes and (known := agent.store.get(m.set, m.rank)) is not None:
            size_bytes = known.bytes
        if not size_bytes:
            raise Rejected("a shard of 0 bytes cannot be")
        assert agent.rounds is not None
        number = agent.rounds.round
        try:
            shard = await agent.store.make(m.set, m.rank, m.world, m.home, size_bytes)
        except NoMemory as exc:
            training.note = str(exc)
            agent.log("refused", detail=str(exc))
            raise
        if agent.rounds is None or agent.rounds.round != number:
            raise Rejected("a recovery round is on")
        self._keep(client, m)
        self._keepers[m.set, m.rank] = client
        shard.registered_round, shard.pushed, shard.unlike, shard.half_back = number, m.pushed, "", False
        fills.release(shard)
        agent.sets.recount(m.set)
        return local.Slots(shard.bytes), [os.dup(memory.fd) for memory in shard.memory]

    def _begin(self, client: Client, m: local.Begin) -> Reply:
        agent = self._agent
        training, shard = self._shard(client, m.set, m.rank)
        if shard.registered_round != (agent.rounds.round if agent.rounds else 0) or training.sealing is None:
            raise Rejected(f"shard of rank {m.rank} is not registered in this round")
        if self._keepers.get((m.set, m.rank)) is not client:
            raise Rejected(f"shard of rank {m.rank} is not registered by this process")
        if shard.pushed:
            raise Rejected(f"shard of rank {m.rank} is filled by the agent of its home")
        training.pace.reached(m.version)
        if training.present.get(who := self._clients[client][2]) is client and who in training.left:
            return local.Refused(f"rank {who} has given its protection up"), []
        try:
            index = agent.filling.begin(training, shard, m.version)
        except Refused as exc:
            agent.filling.passed(shard, m.version)
            return local.Refused(exc.reason), []
        self._fills[m.set, m.rank, index] = client
        training.begun = max(training.begun, m.version)
        return local.Begun(index, agent.drains.troubles.note(m.set)), []

    def _fill(self, client: Client, m: local.Fill) -> Reply:
        agent = self._agent
        training, shard = self._shard(client, m.set, m.rank)
        if shard.registered_round != (agent.rounds.round if agent.rounds else 0) or not shard.pushed:
            raise Rejected(f"shard of rank {m.rank} is not pushed here in this round")
        if self._keepers.get((m.set, m.rank)) is not client:
            raise Rejected(f"shard of rank {m.rank} is not registered by this process")
        if shard.unlike:
            raise Rejected(shard.unlike)
        try:
            return local.Begun(fills.begin(agent.filling, client, training, shard, m.version, agent.epoch)), []
        except Refused as exc:
            return local.Refused(exc.reason), []

    def _filled(self, client: Client, m: local.Filled) -> Reply:
        _, shard = self._shard(client, m.set, m.rank)
        if reason := ranges.fault(m.there, shard.bytes):
            fills.end(client, shard, m.version, ())
            raise Rejected(reason)
        if not fills.end(client, shard, m.version, m.there):
            raise Rejected(f"version {m.version} of rank {m.rank} is not being filled by this process")
        return local.Ok(), []

    def _filling(self, client: Client, name: str, rank: int, index: int, version: int) -> Shard | None:
        _, shard = self._shard(client, name, rank)
        if index not in (0, 1) or self._fills.get((name, rank, index)) is not client:
            return None
        slot = shard.pair.slots[index]
        if slot.state != "filling" or slot.stamp != Stamp(self._agent.epoch, version):
            return None
        return shard

    def _landed(self, client: Client, m: local.Landed) -> Reply:
        shard = self._filling(client, m.set, m.rank, m.slot, m.version)
        if shard is None:
            return local.Error(f"slot {m.slot} of rank {m.rank} is not being filled with version {m.version}"), []
        if not 0 < m.used <= shard.bytes:
            raise Rejected(f"{m.used} bytes used of a slot of {shard.bytes}")
        del self._fills[m.set, m.rank, m.slot]
        self._agent.filling.landed(shard, m.slot, Committed(Stamp(self._agent.epoch, m.version), m.used, m.digest))
        return local.Ok(), []

    def _open_push(self, client: Client, m: local.OpenPush) -> Reply:
        agent = self._agent
        _, shard = self._shard(client, m.set, m.rank)
        mine, n = agent.noderanks[agent.node], len(agent.hosts)
        if self._keepers.get((m.set, m.rank)) is not client or shard.pushed:
            raise Rejected(f"shard of rank {m.rank} is not filled by this process")
        if shard.home != mine or m.holder not in placement.holders(mine, n, agent.replicas)[1:]:
            raise Rejected(f"node rank {m.holder} keeps nothing of the shard of rank {m.rank} here")
        host = next(name for name, rank in agent.noderanks.items() if rank == m.holder)
        return local.Ok(), [agent.outgoing.open(client, shard, host)]

    def _abort(self, client: Client, m: local.Abort) -> Reply:
        shard = self._filling(client, m.set, m.rank, m.slot, m.version)
        if shard is not None:
            del self._fills[m.set, m.rank, m.slot]
            self._agent.filling.void(shard, m.slot)
            self._agent.filling.passed(shard, m.version)
        return local.Ok(), []

    async def _fetch(self, client: Client, m: local.Fetch) -> Reply:
        agent = self._agent
        training = self._training(client, m.set)
        copy = training.chosen_copies.get(m.rank)
        if copy is None:
            raise Rejected(f"shard {m.rank} is not part of the chosen version")
        try:
            memory = await agent.pulls.obtain(training, copy)
        except PullFailed as exc:
            agent.log("unserved", version=copy.stamp[1], detail=f"shard {m.rank}: {exc}")
            raise Rejected(f"shard {m.rank} of version {copy.stamp[1]} could not be had: {exc}") from None
        reply = local.Copy(copy.stamp[0], copy.stamp[1], copy.bytes, copy.used, copy.digest)
        return reply, [memory.read_only_fd()]

    async def _hand_back(self, client: Client, m: local.HandBack, fds: list[int]) -> Reply:
        agent = self._agent
        training = self._keep(client, m)
        if len(fds) != 1 or m.slot not in (0, 1) or m.bytes == 0:
            raise Rejected("a hand-back needs one descriptor and a slot")
        shard = agent.store.get(m.set, m.rank)
        taken = shard is not None and (shard.bytes != m.bytes or shard.pair.slots[m.slot].state != "empty")
        if taken or m.epoch > agent.epoch:
            raise Rejected(f"slot {m.slot} of rank {m.rank} cannot take version {m.version} back")
        try:
            memory = adopt(fds[0], m.bytes)
        except (ValueError, OSError) as exc:
            raise Rejected(str(exc)) from None
        try:
            shard = await agent.store.make(m.set, m.rank, m.world, m.home, m.bytes, reserve=False)
            if self._keep(client, m) and shard.pair.slots[m.slot].state != "empty":
                raise Rejected(f"slot {m.slot} of rank {m.rank} is no longer empty")
        except BaseException:
            memory.close()
            raise
        shard.memory[m.slot].close()
        shard.memory[m.slot] = memory
        self._keepers[m.set, m.rank] = client
        assert agent.rounds is not None
        rounds, number = agent.rounds, agent.rounds.round
        shard.registered_round, shard.pushed = number, m.pushed
        shard.half_back = True
        if m.digest and 0 < m.used <= m.bytes:
            digest = await asyncio.to_thread(memory.digest, m.used)
            self._keep(client, m)
            if agent.rounds is not rounds or rounds.round != number:
                raise Rejected("a recovery round came between")
            stamp = Stamp(m.epoch, m.version)
            free = shard.pair.slots[m.slot].state == "empty" and shard.pair.find(stamp) is None
            if digest == m.digest and free:
                shard.pair.restore(m.slot, stamp, digest, m.used)
                shard.since[m.slot] = shard.verified[m.slot] = clock.time()
                memory.commit(Committed(stamp, m.used, digest))
            else:
                agent.log("damaged", version=m.version, detail=f"shard {m.rank}: handed back with another digest")
        if training.sealing is not None:
            training.sealing.voted |= shard.pair.complete_stamps()
        shard.handed_back |= {m.slot}
        shard.half_back = shard.handed_back != {0, 1}
        agent.sets.recount(m.set)
        return local.Ok(), []


def _plain(text: str, limit: int) -> str:
    return "".join(c for c in text[:limit] if c.isascii() and (c.isalnum() or c in "_-")) or "unnamed"
