"""The agent: one process per (job, node), as the job's owner, that owns the replicas' memory.

It lives from the prolog of the job's first incarnation on this node to the job's end: attached while an
incarnation runs here, detached (but keeping what it holds) between them. All state is changed on one event
loop; digests, page reservation and bulk transfers run in threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gemini_hpc.agent import mapfile, outside, pull, summons
from gemini_hpc.agent.local import Client, LocalServer, Reply
from gemini_hpc.agent.memory import Budget
from gemini_hpc.agent.mesh import Mesh
from gemini_hpc.agent.network import interface_address
from gemini_hpc.agent.picture import inspect_part
from gemini_hpc.agent.ports import candidates, master_port
from gemini_hpc.agent.pulls import Pulls
from gemini_hpc.agent.reporter import Reporter
from gemini_hpc.agent.rounds import Rounds
from gemini_hpc.agent.sealing import REGISTERED, RESUMED, Sealing, from_wire, to_wire
from gemini_hpc.agent.selffence import SelfFence
from gemini_hpc.agent.service import Service
from gemini_hpc.agent.store import Store
from gemini_hpc.agent.trainingset import TrainingSet
from gemini_hpc.config import Settings
from gemini_hpc.core import hostlist, placement
from gemini_hpc.core.seal import Word
from gemini_hpc.core.slots import Stamp
from gemini_hpc.operators import Operators
from gemini_hpc.wire import local, page, peer
from gemini_hpc.wire.allowance import Allowance
from gemini_hpc.wire.frames import FrameError
from gemini_hpc.wire.handshake import Greeting, HandshakeError
from gemini_hpc.wire.link import Link, LinkClosed, accept
from gemini_hpc.wire.lobby import Lobby

MAX_EVENTS = 1000
MAX_SETS = 64
SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_MAX_CALLERS = 512
_MAX_STRANGERS = 256  # connections that have not been authenticated yet
_STATE = "state"
_TICK_S = 0.2
_EMPTY_S = 30.0


class State(msgspec.Struct, frozen=True):
    """What a successor needs after this process's death in mid-incarnation."""

    attach: local.Attach
    plan: peer.PlanDown


class Agent:
    """See the module. `run` returns when everything has been freed."""

    def __init__(self, settings: Settings, *, job: int, uid: int, node: str, directory: str, again: bool) -> None:
        self.settings = settings
        self.job, self.uid, self.node, self.directory = job, uid, node, directory
        self.instance = os.urandom(8).hex()
        self.restart = -1
        self.notice = ""
        self.replicas = 1
        self.hosts: tuple[str, ...] = ()
        self.nodelist = ""
        self.noderanks: dict[str, int] = {}
        self.map_restart = -1
        self.epoch = 0
        self.detached = True
        self.port = 0
        self.address, self.interface = interface_address(settings.interface)
        self.sets: dict[str, TrainingSet] = {}
        self.events: list[peer.EventRecord] = []
        self.budget = Budget(settings)
        self.store = Store(self.budget)
        self.pulls = Pulls(self)
        self.service = Service(self)
        self.reporter = Reporter(self)
        self._fence = SelfFence(self)
        self.mesh: Mesh | None = None
        self.rounds: Rounds | None = None
        self._attach_message: local.Attach | None = None
        self._again = again
        self._local: LocalServer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._callers = 0
        self._lobby = Lobby(_MAX_STRANGERS)
        self._operators = Operators(settings.operators, (0, uid, *settings.slurm_uids()))
        self._detached_at = time.monotonic()
        self._stopped = asyncio.Event()
        self._recounts: set[str] = set()
        self._complaints = Allowance(per_s=1.0, burst=1.0)

    # ---- life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until released."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # the prolog and the supervisor started one at the same time: one is enough
        server = await self._listen()
        mapfile.settle(self.directory)
        if self._again:
            self._take_over(None)
        if self.settings.interface and not self.interface:
            self.log("error", detail=f"interface {self.settings.interface} has no address: listening on all")
        self._local = LocalServer(
            f"{self.directory}/agent.sock", self.uid, self._handle_local, self.service.gone, self.complain
        )
        self.reporter.start()
        self.spawn(self._tick())
        await self._stopped.wait()
        server.close()
        self._local.close()
        self.reporter.close()
        if self.mesh is not None:
            self.mesh.close()
        await self.pulls.cease()
        for training in self.sets.values():
            self.drop_guests(training)
            training.close()
        self.store.clear()
        mapfile.remove(self.directory)
        mapfile.settle(self.directory)
        with suppress(FileNotFoundError):
            os.unlink(self._state_path)

    @property
    def _state_path(self) -> str:
        return f"{self.directory}/{_STATE}"

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside everything else; a failure is logged and ends nothing."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log("error", detail=repr(task.exception())[:300])

    async def _listen(self) -> asyncio.Server:
        failure: OSError | None = None
        for port in candidates(self.settings, self.job):
            try:
                server = await asyncio.start_server(self._call, self.address or "0.0.0.0", port, backlog=256)
            except OSError as exc:
                failure = exc
                continue
            self.port = port
            return server
        raise SystemExit(f"gemini-hpc: no port of {candidates(self.settings, self.job)} is free: {failure}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self.reporter.beat()
            self._fence.look()
            missing = self.mesh is not None and bool(self.mesh.silent() | self.mesh.dead)
            for training in self.sets.values():
                training.page.set_beat_ns(time.monotonic_ns())
                training.page.set_dead_nodes(len(self.mesh.dead) if self.mesh is not None else 0)
                if training.sealing is not None and not self.detached:
                    training.sealing.miss(missing)
                    self._show_state(training)
            if not self.detached:
                self._detached_at = now
            elif not self.budget.taken_bytes and now - self._detached_at > _EMPTY_S:
                self.release("it holds nothing")
            elif now - self._detached_at > self.settings.retention_s:
                self.release("the retention time is over")
            elif self.budget.taken_bytes and self.budget.below_floor():
                self.release("the node's free memory has fallen below the floor")

    def release(self, reason: str) -> None:
        """Free everything and end."""
        if not self._stopped.is_set():
            self.log("released", detail=reason)
            self._stopped.set()

    async def release_on_word(self, reason: str) -> None:
        """The controller knows that this incarnation is over: what still trains here is ended first."""
        if not self.detached and self._fence.ranks():
            self.log("self_fenced", detail=f"{reason}; ranks still ran here")
            await self._fence.end_ranks()
        self.release(reason)

    def log(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        """One line of the job's event log."""
        event = peer.EventRecord(
            t=time.time() if t is None else t,
            name=name,
            host=self.node,
            restart=max(self.restart, 0),
            version=version,
            detail=detail[:500],
        )
        self.events.append(event)
        del self.events[:-MAX_EVENTS]
        self.reporter.tell(event)
        self._print(event.t, name, version, event.detail)

    def complain(self, text: str) -> None:
        """What a stranger can cause: a line in the agent's own log, at most one a second, and no event."""
        if self._complaints.take():
            missed = self._complaints.settle()
            more = f" (and {missed} others before)" if missed else ""
            self._print(time.time(), "complaint", 0, text[:300] + more)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.complain(f"{context.get('message', 'failed')}: {context.get('exception')!r}")

    def _print(self, t: float, name: str, version: int, detail: str) -> None:
        print(
            f"t={t:.3f} job={self.job} restart={self.restart} node={self.node} event={name} "
            f"version={version} detail={detail!r}",
            flush=True,
        )

    # ---- incarnations ----------------------------------------------------------------------------------

    async def attach(self, m: local.Attach) -> local.Message:
        """Enter an incarnation, on the word of the prolog or of a peer; answers when the agents agree, or do not."""
        if m.job != self.job or m.node != self.node:
            return local.Error(f"this is the agent of job {self.job} on {self.node}")
        if self.restart < 0:
            self._take_over(m)
        if m.restart < self.restart:
            return local.Error(f"restart {m.restart} is over, {self.restart} is on")
        if m.restart > self.restart or self.mesh is None or m.nodelist != self.nodelist:
            try:
                hosts = tuple(hostlist.expand(m.nodelist))
                if self.node not in hosts or len(set(hosts)) != len(hosts):
                    raise ValueError(f"{self.node} is not in the node list, or a node is there twice")
            except ValueError as exc:
                return local.Error(f"node list: {exc}")
            if m.replicas > len(hosts):
                self.log("refused", detail=f"{m.replicas} replicas on {len(hosts)} nodes")
            self._enter(m, hosts)
            assert self.rounds is not None
            if self.rounds.parent is None:
                self.rounds.begin("")
            self.spawn(summons.call(self, m))
        self.detached = False
        assert self.rounds is not None
        bound_s = max(0.2, self.settings.attach_timeout_s - 0.5)
        try:
            async with asyncio.timeout(bound_s):
                await self.rounds.wait_live(None)
        except TimeoutError:
            mapfile.settle(self.directory)
            self.log("unmapped", detail=f"not all agents of {len(self.hosts)} nodes agreed within {bound_s:g} s")
            return local.Ready("unmapped")
        return local.Ready("mapped")

    def _enter(self, m: local.Attach, hosts: tuple[str, ...]) -> None:
        """A new incarnation: new links, new rounds; what is held stays."""
        if self.mesh is not None:
            self.mesh.close()
        if self.rounds is not None:
            self.rounds.close()
        self.service.drop_others("")
        mapfile.remove(self.directory)
        self.restart, self.hosts, self.nodelist = m.restart, hosts, m.nodelist
        self.replicas = max(1, min(m.replicas, len(hosts)))
        self._attach_message = m
        self.detached = False
        self.mesh = Mesh(
            self.settings,
            job=self.job,
            restart=m.restart,
            uid=self.uid,
            host=self.node,
            instance=self.instance,
            hosts=hosts,
            on_link=self._on_link,
            on_message=self._on_message,
            on_dead=self._on_dead,
            complain=self.complain,
        )
        self.rounds = Rounds(self, self.node, hosts, self.spawn)
        self.mesh.want(self.mesh.ring())
        self.mesh.want(self.rounds.children)
        if self.rounds.parent is not None:
            self.mesh.want([self.rounds.parent])
        paid = f", memory counted in {self.budget.cgroup_path}" if self.budget.cgroup_path else ""
        self.log("attached", detail=f"{len(hosts)} nodes, {m.replicas} replicas{paid}")
        self.reporter.register()

    def _take_over(self, wanted: local.Attach | None) -> None:
        """Go on where this agent's dead predecessor was; its trainers hand the memory back.

        wanted: only if it was in this very incarnation (the prolog may be faster than the supervisor).
        """
        try:
            state = msgspec.json.decode(Path(self._state_path).read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError):
            return
        m, plan = state.attach, state.plan
        if wanted is not None and (m.restart, m.nodelist, m.node) != (wanted.restart, wanted.nodelist, wanted.node):
            return
        self._enter(m, tuple(hostlist.expand(m.nodelist)))
        self._adopt(plan)
        assert self.rounds is not None
        self.rounds.resume(plan)
        self._write_map(plan)
        for training in self.sets.values():
            self._open_seal(training)
        self.log("restarted", detail="waiting for the trainers to hand their memory back")

    def _epilog(self, m: local.Epilog) -> local.Message:
        if m.job != self.job:
            return local.Error(f"this is the agent of job {self.job}")
        if m.restart < self.restart:
            return local.Ok("detached")
        hold = False
        if not self.detached:
            self.detached = True
            self._detached_at = time.monotonic()
            if self.mesh is not None:
                self.mesh.watching = False
                alive = [h for h in self.hosts if h not in self.mesh.dead]
                hold = bool(self.mesh.dead) and alive[:1] == [self.node] and not self.reporter.connected
            mapfile.wait(self.directory)
            with suppress(FileNotFoundError):
                os.unlink(self._state_path)
            self.log("detached", detail=f"exit code {m.exit_code or 'unknown'}")
        trained = [s for s in self.sets.values() if s.greeted]
        dead = self.mesh is not None and bool(self.mesh.dead)  # then the job may be on its way to a new incarnation
        if trained and all(s.succeeded for s in trained) and m.exit_code in ("", "0") and not dead:
            self.release("the training succeeded")
            return local.Ok("released")
        return local.Ok("hold" if hold else "detached", self.restart)

    # ---- the rounds' host ------------------------------------------------------------------------------

    def send(self, host: str, message: peer.Message) -> bool:
        """To one peer, if there is a link."""
        return self.mesh is not None and self.mesh.send(host, message)

    def freeze(self, step: str) -> None:
        """Stop sealing, drop the trainers, void what is half filled."""
        for training in self.sets.values():
            training.settled = training.sealed  # the root's last word goes into the inventory
            training.sealing = None
            training.page.set_state(page.STATE_FROZEN)
        self.service.drop_others(step)

    async def inventory(self, *, verify: bool = True) -> peer.InventoryRecord:
        """Verify what is held (unless whoever pulls it will), and tell."""
        await self.pulls.cease()
        for shard in list(self.store):
            shard.pair.void_filling()
            for index in (0, 1):
                record = shard.record(index)
                if record is None or not verify:
                    continue
                digest = await asyncio.to_thread(shard.memory[index].digest, record.used)
                if not shard.settle(index, digest):
                    self.log("damaged", version=record.stamp[1], detail=f"shard {record.rank}: copy dropped")
        sealed = ((s.name, s.sealed) for s in self.sets.values())
        return peer.InventoryRecord(
            host=self.node,
            noderanks=self.noderanks or None,
            map_restart=self.map_restart,
            max_epoch=self.epoch,
            copies=tuple(self.store.copies()),
            sealed=tuple((name, (s.epoch, s.version)) for name, s in sealed if s is not None),
            port=self.port,
            instance=self.instance,
        )

    async def outside(self, former: tuple[str, ...]) -> tuple[peer.InventoryRecord, ...]:
        """What agents hold on nodes that the job has left."""
        return await outside.inventories(self, former)

    def _adopt(self, plan: peer.PlanDown) -> None:
        assert self.mesh is not None
        self.noderanks, self.map_restart, self.epoch = dict(plan.noderanks), self.restart, plan.epoch
        self.mesh.ports.update({h: p for h, p in plan.ports.items() if h != self.node})
        by_rank = {rank: host for host, rank in self.noderanks.items()}
        mine, n = self.noderanks[self.node], len(self.hosts)
        group = set(placement.holders(mine, n, self.replicas)) | set(placement.holds_for(mine, n, self.replicas))
        self.mesh.want(by_rank[rank] for rank in group)
        planned = {s.name: s for s in plan.sets}
        for name in planned.keys() | self.sets.keys():
            self.drop_guests(self.training(name))
            self.training(name).plan(planned.get(name), plan.round)

    def apply(self, plan: peer.PlanDown) -> None:
        """Void all but the chosen versions, take map and epoch, begin to pull."""
        keep = {s.name: tuple(Stamp(*stamp) for stamp in s.keep) for s in plan.sets}
        for shard in self.store:
            shard.registered_round = shard.resumed_round = 0  # round numbers begin anew with each incarnation
            shard.pair.void_except(*keep.get(shard.set, ()))
        self._adopt(plan)
        mine = self.noderanks[self.node]
        for shard in self.store.shards.values():
            if mine in placement.holders(shard.home % len(self.hosts), len(self.hosts), self.replicas):
                shard.resumed_round = plan.round
        self._save_state(plan)
        self.pulls.start([o for o in plan.pulls if o.dest == self.node])

    def live(self, plan: peer.PlanDown) -> None:
        """Everyone has acknowledged: trainers may come."""
        for training in self.sets.values():
            self._open_seal(training)
            self.recount(training.name)
        self._write_map(plan)
        chosen = [f"{s.name}: version {s.chosen[1]}" for s in plan.sets if s.chosen is not None]
        lost = [f"{s.name}: {reason}" for s in plan.sets for reason in s.lost]
        version = max((s.chosen[1] for s in plan.sets if s.chosen is not None), default=0)
        self.log("agreed", version=version, detail="; ".join([f"epoch {plan.epoch}", *chosen, *lost]))

    def bound(self, plan: peer.PlanDown) -> None:
        """The round now serves this launch of the training."""
        self._save_state(plan)

    def _save_state(self, plan: peer.PlanDown) -> None:
        if self._attach_message is None:
            return
        temporary = f"{self._state_path}.new"
        with suppress(OSError):
            Path(temporary).write_bytes(msgspec.json.encode(State(self._attach_message, plan)))
            os.replace(temporary, self._state_path)

    def _write_map(self, plan: peer.PlanDown) -> None:
        text = mapfile.render(
            job=self.job,
            restart=self.restart,
            nodelist=self.nodelist,
            hosts=self.hosts,
            noderanks=plan.noderanks,
            host=self.node,
            master_port=master_port(self.job, self.restart),
            socket_path=f"{self.directory}/agent.sock",
            agent_port=self.port,
            epoch=plan.epoch,
            map_hash=plan.map_hash,
        )
        try:
            mapfile.write(self.directory, text)
        except OSError as exc:
            mapfile.settle(self.directory)
            self.log("unmapped", detail=f"the map file cannot be written: {exc.strerror}")

    # ---- sets and seals --------------------------------------------------------------------------------

    def may_have(self, name: str) -> bool:
        """Whether there is, or may be made, a set of this name."""
        return name in self.sets or (len(self.sets) < MAX_SETS and SET_NAME.fullmatch(name) is not None)

    def training(self, name: str) -> TrainingSet:
        """The set of this name, made at first use."""
        training = self.sets.get(name)
        if training is None:
            training = self.sets[name] = TrainingSet(name)
            if self.rounds is not None and self.rounds.stage == "live":
                training.plan(None, self.rounds.round)
                self._open_seal(training)
        return training

    def _open_seal(self, training: TrainingSet) -> None:
        rounds = self.rounds
        assert rounds is not None
        number, name, above = rounds.round, training.name, rounds.parent
        up: Callable[..., None] | None = None
        if above is not None:
            up = lambda ballot: void(self.send(above, to_wire(number, name, ballot)))  # noqa: E731
        training.sealing = Sealing(
            self.replicas,
            rounds.children,
            up,
            lambda word, degraded: self._sealed(training, number, word, degraded),
            training.settled,
        )

    def drop_guests(self, training: TrainingSet) -> None:
        """Free copies that were pulled for loading only."""
        for memory in training.guests.values():
            self.budget.give(memory.size_bytes)
            memory.close()
        training.guests.clear()

    def recount(self, set_name: str) -> None:
        """Something has changed in this set's slots: vote anew, once per turn of the loop."""
        if set_name not in self._recounts:
            self._recounts.add(set_name)
            asyncio.get_running_loop().call_soon(self._recount, set_name)

    def _recount(self, set_name: str) -> None:
        self._recounts.discard(set_name)
        training = self.sets.get(set_name)
        if training is None or training.sealing is None or self.rounds is None:
            return
        number = self.rounds.round
        shards = self.store.of_set(set_name)
        present = [s for s in shards if s.registered_round == number and s.world == training.world]
        kind, world = REGISTERED, training.world
        if not present:  # nobody has registered yet: the vote is on what the training resumes from
            kind, world = RESUMED, training.chosen_world
            present = [s for s in shards if s.resumed_round == number and s.world == world]
        training.sealing.recount([s.pair for s in present], world, kind)

    def _sealed(self, training: TrainingSet, number: int, word: Word, degraded: bool) -> None:
        rounds = self.rounds
        if rounds is None or number != rounds.round:
            return
        for child in rounds.children:
            self.send(child, _word_down(number, training.name, word, degraded))
        self._show_state(training)
        if word.abandoned:
            training.page.set_abandoned(*max(word.abandoned))
        if word.sealed is not None:
            training.page.set_sealed(*word.sealed)
            if word.sealed.epoch == self.epoch:
                self.store.drop_stale(training.name, number, training.world, word.sealed)
                self.drop_guests(training)
            self.pulls.overtaken(training.name, word.sealed)

    def _show_state(self, training: TrainingSet) -> None:
        """Tell the trainers whether a seal can come: they wait for one only then."""
        sealing, rounds, mesh = training.sealing, self.rounds, self.mesh
        if sealing is None or rounds is None or mesh is None or rounds.stage != "live":
            return
        cut_off = rounds.parent is not None and rounds.parent not in mesh.links
        if sealing.degraded or cut_off:
            state = page.STATE_DEGRADED
        else:
            state = page.STATE_ARMING if sealing.word.sealed is None else page.STATE_PROTECTED
        if training.page.state != state:
            training.page.set_state(state)

    # ---- peers -----------------------------------------------------------------------------------------

    def address_of(self, host: str) -> str:
        """Where a peer is dialled."""
        return self.settings.address_of(host)

    def _on_link(self, name: str) -> None:
        rounds = self.rounds
        assert rounds is not None
        rounds.on_link(name)
        for training in self.sets.values():
            if training.sealing is None:
                continue
            if name == rounds.parent:
                training.sealing.repeat()
            elif name in rounds.children:
                sealing = training.sealing
                self.send(name, _word_down(rounds.round, training.name, sealing.word, sealing.degraded))

    def _on_message(self, name: str, message: peer.PeerMessage) -> None:
        rounds = self.rounds
        assert rounds is not None
        if rounds.on_message(name, message):
            return
        if isinstance(message, (peer.VoteUp, peer.WordDown)):
            if message.round != rounds.round or rounds.stage != "live" or not self.may_have(message.set):
                return
            sealing = self.training(message.set).sealing
            if sealing is None:
                return
            if isinstance(message, peer.VoteUp):
                sealing.heard(name, from_wire(message))
            elif name == rounds.parent:
                sealed = None if message.sealed is None else Stamp(*message.sealed)
                sealing.hear(Word(sealed, frozenset(Stamp(*s) for s in message.abandoned)), message.degraded)

    def _on_dead(self, host: str, witnesses: tuple[str, ...], known: bool) -> None:
        if self.detached or self.mesh is None:
            return
        for training in self.sets.values():
            training.page.set_dead_nodes(len(self.mesh.dead))
        if not known:
            self.log("detected", detail=f"{host} is silent; witnesses {', '.join(witnesses)}")
        self.reporter.report(host, witnesses)

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = (writer.get_extra_info("peername") or ("somewhere",))[0]
        ticket = self._lobby.enter(address, writer.transport.abort)
        try:
            try:
                link = await accept(
                    reader,
                    writer,
                    self._admit,
                    host=self.node,
                    restart=lambda: max(self.restart, 0),
                    instance=self.instance,
                )
            finally:
                self._lobby.leave(address, ticket)
            if self._callers >= _MAX_CALLERS:
                return
            self._callers += 1
            try:
                await self._serve(link)
            finally:
                self._callers -= 1
        except (HandshakeError, LinkClosed, FrameError, TimeoutError, OSError) as exc:
            self.complain(f"a call from {address} has ended: {exc or type(exc).__name__}")
        finally:
            writer.close()

    async def _admit(self, greeting: Greeting) -> str:
        hello = greeting.hello
        if hello.cluster != self.settings.cluster_name or hello.job != self.job or hello.target != self.node:
            return f"this is job {self.job} on {self.node} of {self.settings.cluster_name}"
        if hello.purpose == "query":
            return "" if await self._operators.allows(greeting.uid) else "not yours"
        if greeting.uid != self.uid:
            return "not yours"
        if hello.purpose in ("inventory", "pull") and hello.restart > self.restart and self.detached:
            return ""  # a newer incarnation that went on elsewhere may read what is kept here
        if hello.purpose == "summons" and summons.may_summon(self, hello.restart):
            return ""
        if hello.purpose not in ("link", "pull") or hello.source not in self.hosts or hello.source == self.node:
            return "not a peer"
        if hello.restart != self.restart:
            return f"restart {self.restart} here"
        return ""

    async def _serve(self, link: Link) -> None:
        if link.session.purpose == "link" and link.session.peer_restart != self.restart:
            link.abort()
        elif link.session.purpose == "link" and self.mesh is not None:
            await self.mesh.serve(link.session.peer_host, link)
        elif link.session.purpose == "pull":
            await pull.serve(link, self._find)
        elif link.session.purpose == "summons":
            await summons.answer(self, link)
        elif link.session.purpose == "inventory":
            async with asyncio.timeout(5.0):
                if isinstance(await link.receive(), peer.Collect):
                    await link.flush(peer.InventoryUp(0, (await self.inventory(verify=False),)))
        elif link.session.purpose == "query":
            async with asyncio.timeout(5.0):
                message = await link.receive()
                if isinstance(message, peer.InspectAsk):
                    await link.flush(inspect_part(self, message.request))

    def _find(self, ask: peer.PullAsk) -> tuple[peer.CopyRecord, Any] | None:
        found = self.store.find(ask.set, ask.rank, Stamp(*ask.stamp))
        if found is None:
            return None
        record = found[0].record(found[1])
        return None if record is None else (record, found[0].memory[found[1]])

    # ---- the local socket ------------------------------------------------------------------------------

    async def _handle_local(self, client: Client, request: local.Request, fds: list[int]) -> Reply:
        if isinstance(request, (local.Attach, local.Epilog, local.VerdictRequest)):
            for fd in fds:
                os.close(fd)
            if isinstance(request, local.Attach):
                return await self.attach(request), []
            if isinstance(request, local.Epilog):
                return self._epilog(request), []
            return self._verdict(), []
        return await self.service.handle(client, request, fds)

    def _verdict(self) -> local.Verdict:
        mesh = self.mesh
        if mesh is None:
            return local.Verdict()
        silent = mesh.silent()
        alive = tuple(h for h in self.hosts if h not in mesh.dead and h not in silent)
        return local.Verdict(tuple(sorted(mesh.dead)), tuple(sorted(silent - mesh.dead)), alive[:1000])


def _word_down(number: int, set_name: str, word: Word, degraded: bool) -> peer.WordDown:
    sealed = None if word.sealed is None else (word.sealed.epoch, word.sealed.version)
    abandoned = tuple((s.epoch, s.version) for s in sorted(word.abandoned))
    return peer.WordDown(number, set_name, sealed, abandoned, degraded)


def void(_: object) -> None:
    """Nothing, whatever it is given."""


def serve(settings: Settings, *, job: int, uid: int, node: str, directory: str, again: bool) -> int:
    """Run an agent in this process until it is released; the exit status."""

    async def run() -> None:
        await Agent(settings, job=job, uid=uid, node=node, directory=directory, again=again).run()

    asyncio.run(run())
    sys.stdout.flush()
    return 0
