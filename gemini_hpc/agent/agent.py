"""The agent: one process per (job, node), as the job's owner, that owns the replicas' memory.

It lives from the prolog of the job's first incarnation on this node to the job's end: attached while an
incarnation runs here, detached (but keeping what it holds) between them. All state is changed on one event
loop; digests, page reservation and bulk transfers run in threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from gemini_hpc import clock
from gemini_hpc.agent import mapfile, summons
from gemini_hpc.agent.callers import Callers
from gemini_hpc.agent.drains import Drains
from gemini_hpc.agent.filling import Filling
from gemini_hpc.agent.incoming import Incoming
from gemini_hpc.agent.keeps import Keeps
from gemini_hpc.agent.local import Client, LocalServer, Reply
from gemini_hpc.agent.member import Member
from gemini_hpc.agent.memory import Budget
from gemini_hpc.agent.mesh import Mesh
from gemini_hpc.agent.network import interface_address
from gemini_hpc.agent.outgoing import Outgoing
from gemini_hpc.agent.pledges import Pledges
from gemini_hpc.agent.pulls import Pulls
from gemini_hpc.agent.rejections import Rejections
from gemini_hpc.agent.reporter import Reporter
from gemini_hpc.agent.rounds import Rounds
from gemini_hpc.agent.scavenge import Scavenge
from gemini_hpc.agent.selffence import SelfFence
from gemini_hpc.agent.service import Service
from gemini_hpc.agent.sets import Sets
from gemini_hpc.agent.store import Store
from gemini_hpc.agent.successor import StateFile
from gemini_hpc.agent.tellings import Tellings
from gemini_hpc.config import Settings
from gemini_hpc.core import hostlist
from gemini_hpc.wire import local, peer, picture, protocol
from gemini_hpc.wire.allowance import Allowance
from gemini_hpc.wire.message import Message

MAX_EVENTS = 1000
_SCAVENGES = (peer.ScavengeHave, peer.ScavengeAsk, peer.ScavengeWrite, peer.ScavengeWrote, peer.ScavengeOver)
_TICK_S = 0.2
_EMPTY_S = 30.0
_SPILL_FLOOR = 0.5  # while the last version is being written, so much of the floor is enough


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
        self.doubt = False
        self.detached = True
        self.port = 0
        self.address, self.interface = interface_address(settings.interface)
        self.sets = Sets(self)
        self.events: list[picture.EventRecord] = []
        self.budget = Budget(settings)
        self.store = Store(self.budget)
        self.tellings = Tellings()
        self.pulls = Pulls(self)
        self.filling = Filling(self)
        self.pledges, self.rejections = Pledges(directory), Rejections(self)
        self.drains, self.keeps = Drains(self), Keeps(self)
        self.scavenge = Scavenge(self)
        self.outgoing, self.incoming = Outgoing(self), Incoming(self)
        self.service = Service(self)
        self.state = StateFile(directory)
        self.member = Member(self)
        self.reporter = Reporter(self)
        self._fence = SelfFence(self)
        self.mesh: Mesh | None = None
        self.rounds: Rounds | None = None
        self.attached_as: local.Attach | None = None
        self.again = again  # another one has died here
        self._local: LocalServer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._callers = Callers(self)
        self.detached_at = clock.monotonic()
        self.waits = False  # detached, and the job is pending
        self._unwanted_since: float | None = None  # its memory is to be freed
        self._leaving = False
        self._stopped = asyncio.Event()
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
        server, self.port = await self._callers.listen()
        mapfile.settle(self.directory)
        if self.again:
            self._take_over(None)
        if self.settings.interface and not self.interface:
            self.log("error", detail=f"interface {self.settings.interface} has no address: listening on all")
        self._local = LocalServer(
            f"{self.directory}/agent.sock", self.uid, self._handle_local, self.service.gone, self.complain
        )
        self.reporter.start()
        self.spawn(self._tick())
        await self._stopped.wait()
        await self.reporter.told()
        server.close()
        self._local.close()
        self.reporter.close()
        if self.mesh is not None:
            self.mesh.close()
        self.drains.close()
        await self.drains.leave()
        await self.member.cease()
        self.sets.close()
        self.store.clear()
        mapfile.remove(self.directory)
        mapfile.settle(self.directory)
        self.state.remove()
        self.pledges.remove()

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

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = clock.monotonic()
            self.reporter.beat()
            self._fence.look()
            self.sets.beat()
            if not self.detached:
                if self.rounds is not None:
                    self.rounds.tick(now)
                self.member.tend()
                self.keeps.tend()
                self.detached_at, self._unwanted_since = now, None
                continue
            alone_s = now - self.detached_at
            flushing = self._flushing() and not self.scavenge.due(last=True)  # which it would be from then on
            short = bool(self.budget.taken_bytes) and self.budget.below_floor(_SPILL_FLOOR if flushing else 1.0)
            if self.drains.succeeded and not flushing:  # but for what was to be kept it would have ended then
                self.release("the training succeeded")
            elif not self.budget.taken_bytes and alone_s > _EMPTY_S and not flushing:
                self.release("it holds nothing")
            elif short and flushing:
                self.release("the node's free memory has fallen far below the floor")
            elif short:
                self._let_go("the node's free memory has fallen below the floor")
            elif alone_s > self.kept_s and not flushing:
                waited = f"the job has been held, or has waited, for {self.kept_s:g} s" if self.waits else ""
                self._let_go(waited or f"the retention time of {self.kept_s:g} s is over")
            elif alone_s > self.settings.tier_scavenge_s > 0 and self.scavenge.due():
                self.scavenge.begin()

    @property
    def kept_s(self) -> float:
        """For how long what is held stays after the job's end here. With a tier the last version is saved there."""
        settings = self.settings
        longer = self.waits and not self.drains.tier
        return max(settings.retention_s, settings.held_retention_s) if longer else settings.retention_s

    def _let_go(self, reason: str) -> None:
        """Free everything, unless it has first to be saved."""
        self._save_last()
        if not self._flushing():
            self.release(reason)

    def _save_last(self) -> None:
        """The memory is to be freed: what nobody has saved is saved now, or never."""
        if self._unwanted_since is None:
            self._unwanted_since = clock.monotonic()
        if self.scavenge.due(last=True):
            self.scavenge.begin(last=True)

    def release(self, reason: str) -> None:
        """Free everything and end."""
        if not self._stopped.is_set():
            self._log_end("released", reason)
            self._stopped.set()

    async def release_on_word(self, reason: str, *, save: bool = False) -> None:
        """The controller knows that this incarnation is over: what still trains here is ended first. save: so is the
        job, and what nobody has saved is saved before."""
        if not self.detached and self._fence.ranks():
            self.log("self_fenced", detail=f"{reason}; ranks still ran here")
            await self._fence.end_ranks()
        if self.detached and save:
            self._save_last()
        if not self._kept(save):
            self.release(reason)
        elif not self._leaving:
            self._leaving = True
            self.spawn(self._release_when_flushed(reason, save))

    def _kept(self, save: bool) -> bool:
        """Whether this agent stays for what is to be saved; without `save` only for what is being written."""
        return self.detached and self._flushing() and (save or self.drains.busy)

    async def _release_when_flushed(self, reason: str, save: bool) -> None:
        while self._kept(save) and not self._stopped.is_set():
            if save:
                self._save_last()
            await asyncio.sleep(_TICK_S)
        self._leaving = False
        if self.detached:
            self.release(reason)

    def _flushing(self) -> bool:
        """Whether what is held here is on its way to the tier since the job ended, or may soon be."""
        since_s = clock.monotonic() - max(self.detached_at, self._unwanted_since or 0.0)
        waits = self.drains.last or self.drains.busy or self.scavenge.busy
        return waits and since_s < self.settings.tier_flush_s

    def _log_end(self, name: str, detail: str) -> None:
        """An end of this incarnation, and what was sealed in it: when the agent has gone, the log alone knows."""
        found = [(s.name, s.sealed) for s in self.sets if s.sealed is not None]
        words = [f"sealed {name} {stamp.epoch}:{stamp.version}" for name, stamp in found[:8]]
        newest = max((stamp.version for _, stamp in found), default=0)
        self.log(name, version=newest, detail="; ".join([detail, *words]))

    def log(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        """One line of the job's event log."""
        event = picture.EventRecord(
            t=clock.time() if t is None else t,
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
            self._print(clock.time(), "complaint", 0, text[:300] + more)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.complain(f"{context.get('message', 'failed')}: {context.get('exception')!r}")

    def _print(self, t: float, name: str, version: int, detail: str) -> None:
        with suppress(OSError):  # the job's directory is full: its owner's doing
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
            self.member.attach(m)
            assert self.rounds is not None
            if self.rounds.parent is None:
                self.rounds.begin("")
                if m.restart == 0 and self.drains.tier:
                    self.spawn(self.drains.glance())
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
        self.scavenge.reset()
        self.service.drop_others("")
        mapfile.remove(self.directory)
        self.restart, self.hosts, self.nodelist = m.restart, hosts, m.nodelist
        self.replicas = max(1, min(m.replicas, len(hosts)))
        self.attached_as = m
        self.detached = self.waits = self.drains.succeeded = False
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
        self.rounds = Rounds(self.member, self.node, hosts, self.spawn)
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
        state = self.state.read()
        if state is None:
            return
        m = state.attach
        if wanted is not None and (m.restart, m.nodelist, m.node) != (wanted.restart, wanted.nodelist, wanted.node):
            return
        try:
            hosts = tuple(hostlist.expand(m.nodelist))
            known = set(hosts) if state.plan is None else set(state.plan.noderanks)
            if self.node not in hosts or known != set(hosts) or len(known) != len(hosts):
                raise ValueError(f"{self.node} has no place in it")
        except ValueError as exc:
            self.log("error", detail=f"the file `state` in {self.directory} cannot be used: {exc}")
            return
        self._enter(m, hosts)
        self.log("restarted", detail="waiting for the trainers to hand their memory back")
        self.member.succeed(state)
        if not state.live:
            self.spawn(summons.call(self, m))

    def _epilog(self, m: local.Epilog) -> local.Message:
        if m.job != self.job:
            return local.Error(f"this is the agent of job {self.job}")
        if m.restart < self.restart:
            return local.Ok("detached")
        hold = first = False
        if not self.detached:
            self.detached = True
            self.detached_at = clock.monotonic()
            if self.mesh is not None:
                self.mesh.watching = False
                alive = [h for h in self.hosts if h not in self.mesh.dead]
                hold = bool(self.mesh.dead) and alive[:1] == [self.node] and not self.reporter.connected
            mapfile.wait(self.directory)
            self.state.remove()
            self._log_end("detached", f"exit code {m.exit_code or 'unknown'}")
            first = True
        trained = [s for s in self.sets if s.greeted]
        dead = self.mesh is not None and bool(self.mesh.dead)  # then the job may be on its way to a new incarnation
        if trained and all(s.succeeded for s in trained) and m.exit_code in ("", "0") and not dead:
            self.drains.succeeded = True
            if not any(self.keeps.of_set(s.name) and s.sealed is not None for s in trained) or not self.drains.tier:
                self.drains.ended()
                self.release("the training succeeded")
                return local.Ok("released")
        if first:
            self.drains.detached(dead=dead)
        return local.Ok("hold" if hold else "detached", self.restart)

    # ---- peers -----------------------------------------------------------------------------------------

    def send(self, host: str, message: Message) -> bool:
        """To one peer, if there is a link."""
        return self.mesh is not None and self.mesh.send(host, message)

    def address_of(self, host: str) -> str:
        """Where a peer is dialled."""
        return self.settings.address_of(host)

    def _on_link(self, name: str) -> None:
        rounds = self.rounds
        assert rounds is not None
        rounds.on_link(name)
        self.sets.on_link(name)

    def _on_message(self, name: str, message: protocol.AnyMessage) -> None:
        rounds = self.rounds
        assert rounds is not None
        if rounds.on_message(name, message):
            return
        if isinstance(message, (peer.VoteUp, peer.WordDown)):
            self.sets.on_message(name, message)
        elif isinstance(message, peer.DrainDown) and name == rounds.parent:
            self.drains.wanted(message)
        elif isinstance(message, peer.DrainUp) and name in rounds.children:
            self.drains.heard(message)
        elif isinstance(message, peer.DrainOver) and name == rounds.parent and message.round == rounds.round:
            self.drains.ended()
        elif isinstance(message, (peer.KeepWish, peer.KeepDone)):
            self.keeps.on_message(name, message)
        elif isinstance(message, _SCAVENGES):
            self.scavenge.on_message(name, message)

    def _on_dead(self, host: str, witnesses: tuple[str, ...], known: bool) -> None:
        if self.detached or self.mesh is None:
            return
        self.sets.show_dead()
        if not known:
            self.log("detected", detail=f"{host} is silent; witnesses {', '.join(witnesses)}")
        self.reporter.report(host, witnesses)

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
        sealed = max((s.sealed for s in self.sets if s.sealed is not None), default=(0, 0))
        begun = max((s.begun for s in self.sets), default=0)
        dead, suspect = tuple(sorted(mesh.dead)), tuple(sorted(silent - mesh.dead))
        return local.Verdict(dead, suspect, alive[:1000], (sealed[0], sealed[1]), begun)


def serve(settings: Settings, *, job: int, uid: int, node: str, directory: str, again: bool) -> int:
    """Run an agent in this process until it is released; the exit status."""

    async def run() -> None:
        await Agent(settings, job=job, uid=uid, node=node, directory=directory, again=again).run()

    asyncio.run(run())
    sys.stdout.flush()
    return 0
