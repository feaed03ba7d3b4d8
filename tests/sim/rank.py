"""A training rank without torch: it asks the agent for what a checkpointer asks for, in a thread of its own process.

The state after step v of rank r is a chain of hashes, so it names all that it came from; a training that is resumed
from v goes on bit for bit, whatever happened. Ranks are in step: none begins step v + 1 before all have ended v, or
before v is sealed or cannot be for now (R2).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from gemini_hpc.client.seal_wait import SealGate
from gemini_hpc.client.step_guard import LEAVES_S
from gemini_hpc.core import parity, ranges
from gemini_hpc.core.ranges import list_gaps
from gemini_hpc.format import commit_record
from gemini_hpc.wire import local, version
from gemini_hpc.wire.control_page import ControlPage
from gemini_hpc.wire.grant_page import Grant, GrantWriter

from . import slot
from .kernel import Process
from .slot import LIVE_SIZE, SIZE, Content
from .system import Connection, Packets, World

SET = "default"
_SEAL_S, _HOLD_S, _WELL_S = 1.5, 15.0, 0.25  # as the checkpointer's


def advance(state: str, rank: int, version: int) -> str:
    """One step of one rank."""
    return hashlib.blake2b(f"{state} {rank} {version}".encode(), digest_size=8).hexdigest()


def state_of(rank: int, version: int) -> str:
    """What a training has after so many steps, however often it was resumed."""
    known = _known.setdefault(rank, [""])
    while len(known) <= version:
        known.append(advance(known[-1], rank, len(known)))
    return known[version]


_known: dict[int, list[str]] = {}


class Barrier:
    """The collectives of one launch."""

    def __init__(self, world: int) -> None:
        self.at = dict.fromkeys(range(world), 0)
        self.broken = False
        self.homes: dict[int, int] = {}  # by rank: the node rank that its agent has told it, -1: it has none
        self._waiting: list[Callable[[], None]] = []

    def join(self, world: World, rank: int, home: int) -> dict[int, int]:
        """What all ranks have said."""
        self.homes[rank] = home
        self._wake()
        while len(self.homes) < len(self.at) and not self.broken:
            if not world.loop.block(self._waiting.append, 200.0):
                break
        return self.homes

    def reach(self, rank: int, version: int) -> None:
        self.at[rank] = version
        self._wake()

    def fail(self) -> None:
        """A rank has gone: the others hear of it, or hang."""
        self.broken = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def wait(self, world: World, version: int, timeout_s: float) -> bool:
        deadline = world.loop.now + timeout_s
        while min(self.at.values()) < version and not self.broken:
            left = deadline - world.loop.now
            if left <= 0 or not world.loop.block(self._waiting.append, left):
                break
        return min(self.at.values()) >= version


class Failed(Exception):
    """This rank ends; one sentence."""


class Rank:
    """One process of one launch. last: the last step, which no rank has come near when it is changed; `watch` is told
    what it does: (what, rank, version)."""

    def __init__(
        self,
        world: World,
        process: Process,
        *,
        path: str,
        step: str,
        rank: int,
        size: int,
        barrier: Barrier,
        last: Callable[[], int],
        pause_s: float,
        watch: Callable[[str, Rank, int], object],
        live: bool = False,
        means: Callable[[int, int], int] = lambda rank, version: version,
    ) -> None:
        """live: what it has can be copied when holders have died, and it stays for that when others have gone; its
        copies go when it has come to the optimizer, or when they are wanted at once, or sometimes before. means: the
        iteration that a rank calls by a version's number."""
        self._means = means
        self.world, self.process, self.path, self.step = world, process, path, step
        self.rank, self.size, self.barrier, self.last, self.pause_s = rank, size, barrier, last, pause_s
        self.version = self.resumed_at = 0
        self.epoch = 0
        self.watch, self.live = watch, live
        self._bytes = LIVE_SIZE if live else SIZE
        self.reason = ""
        self.done = False
        self._agent: Connection | None = None
        self._page: ControlPage | None = None
        self._maps: dict[int, list[mmap.mmap]] = {}
        self._fds: dict[int, list[int]] = {}
        self._chosen = (0, 0)
        self._channels: dict[int, Packets] = {}
        self._grants: dict[int, GrantWriter] = {}  # of these
        self._m, self._node_rank, self._blocks = 0, 0, 0
        self.group: tuple[int, ...] = ()
        self._gate: SealGate | None = None
        self._still = False
        self._captured = 0  # the version that its tensors are, 0: they are being changed
        self._held_back = self._protecting = False  # its copies wait; they are on their way, or waited for
        self._landed = 0  # the version that was complete here last
        self._failure: Failed | None = None  # of the thread that saves
        self._lineage: tuple[tuple[int, int], ...] = ()
        process.on_kill.append(self._ended)

    # ---- life ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread."""
        try:
            self._train()
            self.done = True
        except Failed as error:
            self.reason = str(error)
            if self.live and self._captured:
                self.world.clock.sleep(_HOLD_S)
        self.watch("ended", self, self.version)
        self.process.kill()

    def _ended(self) -> None:
        self.barrier.fail()
        for fd in [fd for fds in self._fds.values() for fd in fds]:
            os.close(fd)

    def _train(self) -> None:
        welcome = self._join()
        homes = self.barrier.join(self.world, self.rank, -1 if welcome is None else self._node_rank)
        if len(homes) < self.size:
            raise Failed("another rank has gone before the first step")
        if -1 in homes.values() and self._agent is not None:
            self._agent.close()
            self._agent = None
            self.watch("unprotected", self, 0)
        state = self._resume(welcome) if welcome is not None and self._agent is not None else ""
        while self.version < self.last():
            version = self.version + 1
            self.world.clock.sleep(self.pause_s * self.world.rng.uniform(0.9, 1.1))
            self.barrier.reach(self.rank, version)
            if not self.barrier.wait(self.world, version, 60.0):
                raise Failed(f"step {version}: another rank has gone")
            self._saved()
            while self._still:  # its tensors are being copied
                self.world.clock.sleep(0.01)
            self._captured = 0
            state = advance(state, self.rank, version)
            self.version = self._captured = version
            self.watch("step", self, version)
            if self._agent is not None and self.live:
                self._held_back, self._protecting = self.world.rng.random() < 0.6, True
                self.world.loop.thread(self.process, self._protect_beside)
            elif self._agent is not None:
                self._protect(version, state)
        self._saved()
        if self._agent is not None:
            try:
                self._agent.ask(local.Finished(SET, self.rank))
            except (ConnectionError, TimeoutError):
                return

    # ---- with the agent --------------------------------------------------------------------------------

    def _hello(self, *, rejoin: bool) -> local.Hello:
        return local.Hello(
            version.OLDEST,
            version.CURRENT,
            SET,
            self.rank,
            self.size,
            0,
            self.step,
            1,
            rejoin,
            series="run",  # all launches of a job are of one step, which `gemini-hpc run` starts again
        )

    def _join(self) -> local.Welcome | None:
        deadline = self.world.loop.now + 120.0
        while True:
            try:
                agent = Connection(self.path)
                reply, fds = agent.ask(self._hello(rejoin=False))
                break
            except (ConnectionError, TimeoutError) as error:
                if self.world.loop.now > deadline:
                    self.reason = f"unprotected: {error}"
                    return None
                self.world.clock.sleep(0.1)
        if not isinstance(reply, local.Welcome):
            self.reason = f"unprotected: {reply.error if isinstance(reply, local.Error) else reply}"
            self.watch("unprotected", self, 0)
            return None
        self._agent, self._page = agent, ControlPage(fds[0], writable=False)
        os.close(fds[0])
        self.epoch, self._m, self._blocks = reply.epoch, reply.replicas, reply.parity
        self._node_rank, self.group = reply.node_rank, reply.group
        self._chosen = reply.chosen_epoch, reply.chosen_version
        self._gate = SealGate(
            lambda: self._page,
            lambda: self._agent is None or self._agent.over,
            self.epoch,
            _SEAL_S,
            lambda why: self.watch(f"degraded ({why})", self, self.version),
            lambda version: self.watch("restored", self, version),
        )
        return reply

    def _resume(self, welcome: local.Welcome) -> str:
        state, version = "", welcome.chosen_version
        lineages, moments = set(), set()
        for rank in range(welcome.chosen_world if version else 0):
            content = self._fetch(rank)
            lineages.add(content.lineage)
            self._lineage = content.lineage
            if len(lineages) > 1:
                self.watch("MIXED", self, version)
                raise Failed(f"version {version} is of several lineages: {sorted(lineages)}")
            moments.add(content.moment)
            if len(moments) > 1:
                self.watch("MIXED", self, version)
                raise Failed(f"version {version} is of several moments: {sorted(moments)}")
            if content.version != version or content.rank != rank or content.state != state_of(rank, version):
                self.watch("MIXED", self, version)
                raise Failed(f"version {version}: shard {rank} is {content}")
            if rank == self.rank:
                state = content.state
        self.version = self.resumed_at = version
        self._lineage = (*self._lineage, (self.epoch, version))
        self.watch("resumed", self, version)
        assert self._agent is not None
        kept = self.group[:1] if self._blocks else (self.group[0], *self.group[:0:-1])[: self._m]
        wanted = [rank for rank, home in sorted(self.barrier.homes.items()) if home in kept]
        for register in [*(partial(self._register, rank) for rank in wanted), self._register_parity]:
            if not register():
                self.watch("unprotected", self, version)  # as the checkpointer says it
                self._agent.close()
                self._agent = None
                break
        if self._agent is not None and self.live:
            self._live_on(self._agent)
        return state

    # ---- live replicas ---------------------------------------------------------------------------------

    def _live_on(self, agent: Connection) -> None:
        """Every rank has the state of all others, as replicas have."""
        nodes = tuple(sorted(set(self.barrier.homes.values()) - {self._node_rank}))
        try:
            agent.ask(local.LiveOn(SET, self.rank, nodes[: local.MAX_LIVE_NODES]))
            reply, fds = agent.ask(local.OpenRescue(SET, self.rank))
        except (ConnectionError, TimeoutError):
            return
        if isinstance(reply, local.Ok) and fds:
            channel = self.world.packets[fds[0]]
            self.world.loop.thread(self.process, lambda: self._rescue(channel))

    def _rescue(self, channel: Packets) -> None:
        """As the checkpointer's thread."""
        while True:
            try:
                data, fds = channel.recv_fds()
                message = local.rescue_decoder.decode(data) if data else None
                if message is None:
                    break
                if isinstance(message, local.Still):
                    self._still = bool(self._captured)
                    self._held_back = self._held_back and not self._still
                    channel.send(local.encode(local.Standing(self._captured)))
                elif isinstance(message, local.CopyLive):
                    whole = self._still and self._captured == message.version
                    if whole:
                        content = Content(message.rank, message.version, "", self._lineage, message.version)
                        content.state = state_of(message.rank, message.version)
                        payload = slot.pack(content, self.epoch, self.size)  # its end is that of the tensor
                        os.pwrite(fds[0], payload[slot.TENSOR_AT :], slot.TENSOR_AT)
                        self.watch("copied live", self, message.version)
                    channel.send(local.encode(local.Copied(whole)))
                elif isinstance(message, local.Complete):
                    until = self.world.loop.now + message.wait_s
                    while self._protecting and self._landed < self._captured and self.world.loop.now < until:
                        self.world.clock.sleep(0.01)
                    whole = self._landed >= self._captured > 0
                    at_work = self._protecting and not whole
                    channel.send(local.encode(local.Standing(self._captured) if at_work else local.Copied(whole)))
                else:
                    self._still = False
            except OSError:
                break
            finally:
                for fd in fds:
                    os.close(fd)
        self._still = False

    # ---- saving ----------------------------------------------------------------------------------------

    def _fetch(self, rank: int) -> Content:
        assert self._agent is not None
        try:
            reply, fds = self._agent.ask(local.Fetch(SET, rank))
        except (ConnectionError, TimeoutError) as error:
            raise Failed(f"shard {rank}: {error}") from None
        if not isinstance(reply, local.Copy):
            raise Failed(f"shard {rank}: {reply}")
        data = os.pread(fds[0], reply.used, 0)
        os.close(fds[0])
        try:
            return slot.unpack(data)
        except ValueError as error:
            raise Failed(f"shard {rank}: {error}") from None

    def _register(self, rank: int) -> bool:
        assert self._agent is not None
        ask = local.Register(SET, rank, self.size, self.barrier.homes[rank], self._bytes, rank != self.rank)
        try:
            reply, fds = self._agent.ask(ask)
        except (ConnectionError, TimeoutError):
            return False
        if isinstance(reply, local.Slots):
            self._fds[rank] = fds
            self._maps[rank] = [mmap.mmap(fd, reply.bytes) for fd in fds]
        return isinstance(reply, local.Slots)

    @property
    def _receivers(self) -> tuple[int, ...]:
        return self.group[1:] if self._blocks else self.group[1 : self._m]

    def _register_parity(self) -> bool:
        """True also where none is wanted."""
        if not self._blocks:
            return True
        assert self._agent is not None
        try:
            reply, _ = self._agent.ask(self._parity())
        except (ConnectionError, TimeoutError):
            return False
        return isinstance(reply, local.Slots)

    def _parity(self, passed: int = 0) -> local.Register:
        others = self._receivers
        of = tuple((rank, home) for rank, home in sorted(self.barrier.homes.items()) if home in others)
        size = self._blocks * parity.compute_block_bytes(self._bytes, len(of) + 1, self._blocks)
        return local.Register(SET, self.rank, self.size, self._node_rank, size, members=of, passed=passed)

    def _protect_beside(self) -> None:
        """In a thread of its own."""
        try:
            self._protect(self.version, state_of(self.rank, self.version))
        except Failed as error:
            self._failure = error
        finally:
            self._protecting = False

    def _saved(self) -> None:
        """The optimizer waits for what the last step has made."""
        self._held_back = False
        while self._protecting:
            self.world.clock.sleep(0.01)
        if self._failure is not None:
            raise self._failure

    def _protect(self, version: int, state: str) -> None:
        """As the checkpointer's `step()`, and what it waits for before the next optimizer step."""
        gate = self._gate
        assert gate is not None and self._agent is not None
        try:
            saved = self._save(version, state)
        except (ConnectionError, TimeoutError, OSError):
            self._rejoin()
            self._report_to_the_next(version)
            return
        if not saved:
            self.watch("skipped", self, version)
        sealed = gate.wait(version, lambda: not saved)
        if self._agent.over:
            self._rejoin()
        self.watch("sealed" if sealed else "late", self, version)
        self._stand_by()

    def _report_to_the_next(self, version: int) -> None:
        """As `client.agent_connection`: what a dead agent has not heard, the next one does."""
        while self._agent is not None:
            try:
                self._report_skipped(version)
                return
            except (ConnectionError, TimeoutError, OSError):
                self._rejoin()

    def _report_skipped(self, version: int) -> None:
        assert self._agent is not None
        self._agent.ask(local.Event("skipped", version, self.world.clock.time()))

    def _report_left_out(self, version: int) -> None:
        """As the replicator, once nothing is missing any more; the next step waits no longer than for a seal."""
        gate, loop = self._gate, self.world.loop
        assert gate is not None
        began = well_since = loop.now
        while (now := loop.now) - began < _SEAL_S:
            self.world.clock.sleep(0.02)
            well_since = now if gate.is_stuck() else well_since
            if now - well_since >= _WELL_S:
                self._report_skipped(version)
                return

    def _stand_by(self) -> None:
        """The job leaves a node: as `client.step_guard`."""
        until = self.world.loop.now + LEAVES_S
        while self._page is not None and self._page.held >= self.epoch and self.world.loop.now < until:
            self.world.clock.sleep(0.005)

    def _save(self, version: int, state: str) -> bool:
        agent = self._agent
        assert agent is not None
        reply, _ = agent.ask(local.BeginVersion(SET, self.rank, version))
        if not isinstance(reply, local.Begun):
            self.watch(f"refused ({reply})", self, version)
            self._report_skipped(version)
            return False
        content = Content(self.rank, version, state, self._lineage, self._means(self.rank, version))
        payload = slot.pack(content, self.epoch, self.size, live=self.live)
        self._maps[self.rank][reply.slot][: len(payload)] = payload
        if self.live:
            agent.ask(local.OutlineWritten(SET, self.rank, version, reply.slot, *slot.outline(payload)))
            self.watch("outlined", self, version)
        while self._held_back:
            self.world.clock.sleep(0.01)
        taken = [self._push(holder, version, payload) for holder in self._receivers]
        if not all(taken):  # were it complete here, nobody could ever abandon it
            agent.ask(local.Abort(SET, self.rank, version, reply.slot))
            self._report_left_out(version)
            return False
        landed, _ = agent.ask(local.Landed(SET, self.rank, version, reply.slot, len(payload)))
        if isinstance(landed, local.Ok):
            self._landed = version
        return isinstance(landed, local.Ok)

    def _push(self, holder: int, version: int, payload: bytes) -> bool:
        """As `train.transport.host` does; what fails costs this version."""
        agent, gate = self._agent, self._gate
        assert agent is not None and gate is not None
        channel = self._channels.get(holder)
        if channel is None or channel.ended:
            reply, fds = agent.ask(local.OpenPush(SET, self.rank, holder))
            if not isinstance(reply, local.Ok):
                return False
            channel = self._channels[holder] = self.world.packets[fds[0]]
            self._grants[holder] = GrantWriter(fds[1])
            os.close(fds[1])
        try:
            reply = self._said(channel, local.PushOffer(version, len(payload)))
            present = reply.present if isinstance(reply, local.PresentRanges) else ()
            taken = reply is not None
            if taken:
                self._grant(channel, self._grants[holder], ranges.count_bytes(list_gaps(present, len(payload))))
            taken = taken and self._said(channel, local.PushDone()) is not None
        except OSError:
            taken = False
        if not taken:
            self.watch(f"not taken by {holder}", self, version)
            gate.degrade(f"nothing can be sealed without node rank {holder}'s copies", gone=channel.ended)
        return taken

    def _grant(self, channel: Packets, page: GrantWriter, total: int) -> None:
        """Let a part of the version go in a window, and withdraw the rest; the window's end comes in its middle."""
        now = self.world.loop.now
        if page.write(Grant(total * 2 // 3, now + 0.004, 1e7)):
            channel.send(local.encode(local.PushGo()))
        self.world.clock.sleep(0.002)
        page.withdraw()

    @staticmethod
    def _said(channel: Packets, request: Any) -> local.Ok | local.PresentRanges | None:
        channel.send(local.encode(request))
        data = channel.recv(local.MAX_PACKET_BYTES)
        reply = local.reply_decoder.decode(data) if data else None
        return reply if isinstance(reply, (local.Ok, local.PresentRanges)) else None

    def _rejoin(self) -> None:
        """The agent has gone: its successor gets the memory back."""
        for _ in range(40):
            self.world.clock.sleep(0.2)
            try:
                agent = Connection(self.path)
                reply, fds = agent.ask(self._hello(rejoin=True), timeout_s=30.0)
                if isinstance(reply, local.Welcome):
                    if (reply.epoch, reply.chosen_epoch, reply.chosen_version) != (self.epoch, *self._chosen):
                        agent.close()
                        break
                    self._agent, self._page = agent, ControlPage(fds[0], writable=False)
                    os.close(fds[0])
                    self._channels.clear()
                    self._hand_back(agent)
                    self.watch("rejoined", self, self.version)
                    return
                agent.close()
            except (ConnectionError, TimeoutError):
                continue
        self._agent = None
        self.watch("unprotected", self, self.version)

    def _hand_back(self, agent: Connection) -> None:
        for rank, fds in self._fds.items():
            for index, fd in enumerate(fds):
                found = self._content(fd)
                home = self.barrier.homes[rank]
                agent.ask(
                    local.HandBack(SET, rank, self.size, home, self._bytes, index, *found, pushed=rank != self.rank),
                    [fd],
                )

        if self._blocks:
            agent.ask(self._parity(passed=self.version + 1))

    def _content(self, fd: int) -> tuple[int, int, int, str]:
        """(epoch, version, used, digest) of a slot: what the agent has committed."""
        found = commit_record.parse(os.pread(fd, commit_record.RECORD_BYTES, self._bytes))
        if found is None or (found.stamp.epoch != self.epoch and found.stamp != self._chosen):
            return 0, 0, 0, ""
        return *found.stamp, found.used_bytes, found.digest
