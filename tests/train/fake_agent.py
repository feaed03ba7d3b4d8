"""Agents of a whole job in one process: real sockets, real memfds, the real slot rules; no network, no Slurm.

Tests start training processes against it, break things, and look at what the agents saw.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gemini_hpc.core import placement
from gemini_hpc.core.digest import Digest
from gemini_hpc.core.slots import Refused, SlotPair, Stamp
from gemini_hpc.format import commit_record
from gemini_hpc.format.commit_record import Committed
from gemini_hpc.format.slot_header import HEADER_BYTES, parse_header
from gemini_hpc.wire import control_page, local, version

from .fake_push import Push


@dataclass
class Held:
    """Both slots of a shard on one node."""

    rank: int
    world: int
    home: int
    bytes: int
    fds: list[int]
    pair: SlotPair = field(default_factory=SlotPair)

    def digest(self, index: int, used: int) -> str:
        stream, at = Digest(), 0
        while at < used:
            part = os.pread(self.fds[index], min(used - at, 1 << 22), at)
            stream.update(part)
            at += len(part)
        return stream.to_hex()

    def commit(self, index: int, committed: Committed | None) -> None:
        """Write the commit record, as the agent's memory does."""
        record = commit_record.BLANK if committed is None else commit_record.pack(committed)
        os.pwrite(self.fds[index], record, self.bytes)

    def small_bytes(self) -> int:
        """Of the larger of its complete versions' small states."""
        fds = [fd for fd, slot in zip(self.fds, self.pair.slots, strict=True) if slot.stamp]
        return max((parse_header(os.pread(fd, HEADER_BYTES, 0), self.bytes).small_bytes for fd in fds), default=0)


PROTECTED = ("protected", "degraded")  # states of a training from which versions are taken, if agents take them


class Node:
    """One node's agent."""

    def __init__(self, job: FakeJob, rank: int, path: str) -> None:
        self.job, self.rank, self.path = job, rank, path
        self.held: dict[int, Held] = {}
        self.outgrown: list[Held] = []
        self.page_fd = -1
        self.page: control_page.ControlPage | None = None
        self.connections: list[socket.socket] = []
        self.server: socket.socket | None = None
        self.handed_back: list[local.HandBack] = []
        self.hellos: list[local.Hello] = []
        self.asked: list[type[local.Request]] = []  # also what is still to be answered
        self.kept: dict[tuple[str, int], local.CacheBytes] = {}
        self.start()

    def start(self) -> None:
        self.page_fd = os.memfd_create("gemini:page")
        self.job.leaked.append(self.page_fd)
        os.ftruncate(self.page_fd, control_page.PAGE_BYTES)
        self.page = control_page.ControlPage(self.page_fd, writable=True)
        if os.path.exists(self.path):
            os.unlink(self.path)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.bind(self.path)
        self.server.listen(32)
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def die(self) -> None:
        """As SIGKILL does to an agent: connections end, all it knew is forgotten (trainers keep the memory)."""
        with self.job.lock:
            if self.server is not None:
                self.server.shutdown(socket.SHUT_RDWR)
                self.server.close()
                os.unlink(self.path)
                self.server = None
            for sock in self.connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.connections.clear()
            self.forget()

    def cut(self) -> None:
        """Connections end; the agent lives and keeps everything."""
        with self.job.lock:
            for sock in self.connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.connections.clear()
            for held in self.held.values():
                held.pair.empty_filling()

    def forget(self) -> None:
        for held in self.held.values():
            for fd in held.fds:
                if fd >= 0:  # else not handed back yet
                    os.close(fd)
        self.held.clear()
        self.outgrown.clear()
        self.kept.clear()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            self.connections.append(sock)
            threading.Thread(target=self._serve, args=(sock, server), daemon=True).start()

    def _serve(self, sock: socket.socket, server: socket.socket) -> None:
        fds: list[int] = []
        owed = False  # a copy's verification
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(sock, local.MAX_PACKET_BYTES, 4)
                if not data:
                    return
                request = local.request_decoder.decode(data)
                self.asked.append(type(request))
                if isinstance(request, local.Event) and request.version in self.job.hangs_up:
                    self.job.hangs_up.remove(request.version)
                    return
                delay = self.job.delay.get(type(request).__name__, 0.0)
                if delay:
                    time.sleep(delay)
                with self.job.lock:
                    if self.server is not server:  # it died over it
                        return
                    reply, out = self._answer(request, fds)
                    owed = isinstance(request, local.Landed)
                    self.job.unverified += owed
                    for fd in fds:  # nobody took it
                        os.close(fd)
                    fds = []
                packet = local.encode(reply)
                if out:
                    socket.send_fds(sock, [packet], out)
                    if isinstance(request, local.OpenPush):
                        for fd in out:
                            os.close(fd)
                else:
                    sock.sendall(packet)
                if isinstance(request, local.Landed):
                    with self.job.lock:
                        self.verify(request)
                        self.job.unverified -= 1
                        owed = False
        except OSError:
            pass
        finally:
            with self.job.lock:
                self.job.unverified -= owed
            for fd in fds:
                os.close(fd)
            sock.close()

    def _answer(self, m: local.Message, fds: list[int]) -> tuple[local.Message, list[int]]:
        """Takes out of `fds` what it keeps."""
        job = self.job
        if isinstance(m, local.Hello):
            self.hellos.append(m)
            if not version.find_common(m.least, m.most) & self.job.speaks:
                return local.Error(f"the training process speaks {version.describe_mismatch(m.least, m.most)}"), []
            if len(self.hellos) <= job.not_yet:
                return local.Error("the tier cannot be seen", later=True), []
            chosen = job.chosen or Stamp(0, 0)
            return local.Welcome(
                job=1,
                restart=job.restart,
                epoch=job.epoch,
                node_rank=self.rank,
                nodes=len(job.nodes),
                replicas=job.m,
                chosen_epoch=chosen.epoch,
                chosen_version=chosen.version,
                chosen_world=job.chosen_world,
                lost=job.lost,
                reached=job.reached,
                group=placement.list_ring(self.rank, len(job.nodes), job.m, job.order)
                if job.m <= len(job.nodes)
                else (),
            ), [self.page_fd]
        if isinstance(m, local.Register):
            if job.refuse_register and self.rank in (job.refuse_register_on or (self.rank,)):
                return local.Error(job.refuse_register), []
            held = self.held.get(m.rank)
            size_bytes = m.bytes or (held.bytes if held is not None else 0)
            if held is None or held.bytes != size_bytes or held.world != m.world:
                held = self.make(m.training, m.rank, m.world, m.home, size_bytes)
            held.home = m.home
            return local.Slots(held.bytes), held.fds
        if isinstance(m, local.OpenPush):
            push = Push(self, job.nodes[m.holder], m)
            return local.Ok(), [push.theirs.detach(), push.page_fd]
        if isinstance(m, local.BeginVersion):
            reason = job.refuse_begin(self.rank, m) if job.refuse_begin else ""
            if reason:
                return local.Refused(reason), []
            held = self.held.get(m.rank)
            if held is None:
                return local.Refused("not registered"), []
            voted = held.pair.list_complete_stamps()
            try:
                index = held.pair.begin_version(Stamp(job.epoch, m.version), job.sealed, job.abandoned(), voted=voted)
                held.commit(index, None)
                return local.Begun(index), []
            except Refused as refused:
                return local.Refused(refused.reason), []
        if isinstance(m, local.Abort):
            held = self.held.get(m.rank)
            if held is not None and held.pair.slots[m.slot].stamp == Stamp(job.epoch, m.version):
                held.pair.empty_slot(m.slot)
            return local.Ok(), []
        if isinstance(m, local.Fetch):
            for node in job.nodes:
                held = node.held.get(m.rank)
                index = held.pair.find_slot(job.chosen) if held is not None and job.chosen else None
                if held is not None and index is not None:
                    slot = held.pair.slots[index]
                    fd = os.open(f"/proc/self/fd/{held.fds[index]}", os.O_RDONLY)
                    job.leaked.append(fd)
                    assert slot.stamp and slot.digest
                    return local.Copy(
                        slot.stamp.epoch, slot.stamp.version, held.bytes, slot.bytes_used, slot.digest
                    ), [fd]
            return local.Error(f"nobody holds shard {m.rank}"), []
        if isinstance(m, local.Event):
            job.events.append((self.rank, m))
            return local.Ok(), []
        if isinstance(m, local.Traffic | local.Timeline | local.CacheBytes | local.FetchCached):
            return self._told(m), []
        if isinstance(m, local.Finished):
            job.finished.add(m.rank)
            return local.Ok(), []
        if isinstance(m, local.VerdictRequest):
            return job.verdict, []
        if isinstance(m, local.HandBack):
            self.handed_back.append(m)
            if m.rank in self.held and self.held[m.rank].fds[m.slot] >= 0:
                return local.Error(f"slot {m.slot} of rank {m.rank} is not wanted back"), []
            held = self.held.setdefault(m.rank, Held(m.rank, m.world, m.home, m.bytes, [-1, -1]))
            held.fds[m.slot] = fds.pop(0)
            if m.digest and held.digest(m.slot, m.used) == m.digest:
                stamp = Stamp(m.epoch, m.version)
                held.pair.slots[m.slot].state = "complete"
                held.pair.slots[m.slot].stamp = stamp
                held.pair.slots[m.slot].digest = m.digest
                held.pair.slots[m.slot].bytes_used = m.used
                held.pair.high = max(held.pair.high or stamp, stamp)
                if all(fd >= 0 for h in job.pairs() for fd in h.fds):
                    job.reseal()  # as the agents' votes do: a version may have become complete by this
            return local.Ok(), []
        if isinstance(m, local.Landed):
            held = self.held.get(m.rank)
            if held is None or held.pair.slots[m.slot].stamp != Stamp(job.epoch, m.version):
                return local.Error("that slot is not being filled with this version"), []
            return local.Ok(), []
        return local.Error(f"cannot decode the message: {m}"), []

    def make(self, name: str, rank: int, world: int, home: int, size_bytes: int) -> Held:
        """Both slots of a shard, in place of those that there are."""
        made = []
        for index in range(2):
            fd = os.memfd_create(f"gemini:{name}:{rank}:{index}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size_bytes + commit_record.ROOM_BYTES)
            made.append(fd)
        if (held := self.held.get(rank)) is not None:
            self.job.ancestors.append(held)
            self.outgrown.append(held)
        self.held[rank] = Held(rank, world, home, size_bytes, made)
        return self.held[rank]

    def _told(self, m: local.Traffic | local.Timeline | local.CacheBytes | local.FetchCached) -> local.Message:
        if not self.job.listens:
            return local.Error(f"cannot decode the message: Invalid value '{type(m).__name__}' - at `$.op`")
        if isinstance(m, local.FetchCached):
            kept = self.kept.get((m.training, m.rank))
            return local.CachedBytes(kept.data if kept is not None and kept.key == m.key else None)
        if isinstance(m, local.CacheBytes):
            self.kept[m.training, m.rank] = m
        self.job.told.append(m)
        return local.Ok()

    def verify(self, m: local.Landed) -> bool:
        """Return whether this node has the copy now."""
        held = self.held.get(m.rank)
        if held is None:
            return False
        found = held.digest(m.slot, m.used)
        if found != (m.digest or (found if held.home == self.rank else "")):
            self.job.corrupt.append(m)
            held.pair.empty_slot(m.slot)
            return False
        header = parse_header(os.pread(held.fds[m.slot], HEADER_BYTES, 0), held.bytes)
        assert (header.rank, header.stamp, header.used_bytes) == (m.rank, Stamp(self.job.epoch, m.version), m.used)
        try:
            held.pair.complete_slot(m.slot, Stamp(self.job.epoch, m.version), found, m.used)
        except ValueError:
            return False
        held.commit(m.slot, Committed(Stamp(self.job.epoch, m.version), m.used, found))
        self.job.landed.append((self.rank, m.rank, m.version))
        self.job.reseal()
        return True


class FakeJob:
    """All nodes of one job, and what its agents know together. `m` replicas."""

    def __init__(self, directory: Path, nodes: int, m: int) -> None:
        self.lock = threading.RLock()
        self.m, self.epoch, self.restart = m, 1, 0
        self.order = placement.AS_RANKED
        self.chosen: Stamp | None = None
        self.chosen_world = 0
        self.sealed: Stamp | None = None
        self.seals: list[Stamp] = []
        self.lost: tuple[str, ...] = ()
        self.reached = 0  # newest step of the launch before; 0: unknown
        self.events: list[tuple[int, local.Event]] = []
        self.told: list[local.Traffic | local.Timeline | local.CacheBytes] = []
        self.listens = True  # False: agents of a version that knows nothing of `told`
        self.landed: list[tuple[int, int, int]] = []
        self.unverified = 0  # copies that were said to be there, and are looked at now
        self.corrupt: list[local.Landed] = []
        self.finished: set[int] = set()
        self.leaked: list[int] = []
        self.rate = 0.0  # bytes a second of each push; 0: as fast as it goes
        self.ancestors: list[Held] = []
        self.refuse_begin: Callable[[int, local.BeginVersion], str] | None = None
        self.refuse_register = ""
        self.refuse_register_on: tuple[int, ...] = ()  # node ranks; none means all
        self.not_yet = 0  # greetings that are answered so: later
        self.speaks = ~0  # mask of the protocol versions that these agents take
        self.verdict = local.Verdict(alive=("a", "b"))
        self.delay: dict[str, float] = {}
        self.hangs_up: list[int] = []  # versions: at an event of each the connection ends, once for an entry
        self.seal_until = 1 << 30
        self.nodes = [Node(self, rank, str(directory / f"agent{rank}.sock")) for rank in range(nodes)]

    def pairs(self) -> list[Held]:
        return [held for node in self.nodes for held in node.held.values()]

    def abandoned(self) -> frozenset[Stamp]:
        pairs = self.pairs()
        seen = {stamp for held in pairs for stamp in held.pair.list_complete_stamps()}
        return frozenset(
            s
            for s in seen
            if any(h.pair.find_slot(s) is None and h.pair.high is not None and h.pair.high > s for h in pairs)
        )

    def reseal(self) -> None:
        pairs = self.pairs()
        if not pairs or len(pairs) != pairs[0].world * self.m:
            return
        for held in pairs:
            wanted = placement.list_holders(held.home, len(self.nodes), self.m, self.order)
            assert all(held.rank in self.nodes[h].held for h in wanted), "a shard is not where placement wants it"
        common = frozenset.intersection(*(held.pair.list_complete_stamps() for held in pairs))
        common = frozenset(s for s in common if s.version <= self.seal_until)
        if common and (self.sealed is None or max(common) > self.sealed):
            self.sealed = max(common)
            self.seals.append(self.sealed)
            for node in self.nodes:
                if node.page is not None:
                    node.page.set_sealed(*self.sealed)
                    node.page.set_state(control_page.STATE_PROTECTED)

    def stop_after(self, version: int) -> None:
        """No version above this one will be taken any more: what a crash just after its seal leaves. A training
        that goes on is degraded after a while."""
        self.seal_until = version
        self.refuse_begin = lambda node, m: "the test stops here" if m.version > version else ""

    def requeue(self, lost: tuple[int, ...] = ()) -> Stamp | None:
        """A new incarnation: the nodes of `lost` come back empty; the newest version that is complete is chosen."""
        with self.lock:
            world = max((held.world for held in self.pairs()), default=0)
            for rank in lost:
                self.nodes[rank].forget()
            candidates = []
            for node in self.nodes:  # what was sealed last may be in smaller slots
                for older in node.outgrown:
                    if not node.held[older.rank].pair.list_complete_stamps() and older.pair.list_complete_stamps():
                        self.ancestors.remove(older)
                        self.ancestors.append(node.held[older.rank])
                        node.held[older.rank] = older
                node.outgrown.clear()
            for rank in range(world):
                have = [node.held[rank].pair.list_complete_stamps() for node in self.nodes if rank in node.held]
                candidates.append(frozenset().union(*have))
            common = frozenset.intersection(*candidates) if candidates else frozenset()
            self.chosen = max(common) if common else None
            self.chosen_world = world if self.chosen else 0
            for held in self.pairs():
                held.pair.empty_except(self.chosen)
            self.epoch += 1
            self.restart += 1
            self.sealed = self.chosen
            self.refuse_begin, self.seal_until = None, 1 << 30
            self.finished.clear()
            self.events.clear()
            for node in self.nodes:
                assert node.page is not None
                node.page.set_sealed(*(self.chosen or (0, 0)))
            return self.chosen

    def saw(self, name: str) -> list[local.Event]:
        return [event for _, event in self.events if event.name == name]

    def close(self) -> None:
        for node in self.nodes:
            if node.server is not None:
                node.die()
            node.page = None
        for fd in [*self.leaked, *(fd for held in self.ancestors for fd in held.fds)]:
            os.close(fd)
