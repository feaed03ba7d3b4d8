"""The persistent tier: production workers on a file system of the simulation (`files`), a process for each order.

`install` puts it where agents would have their supervisor fork a worker. An agent's death ends its workers a moment
later, a cancelled order at once; what they have left there is what a crash leaves.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import io
import os
import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import h5py
import msgspec

from gemini_hpc.agent.tier import node_writer, worker_process
from gemini_hpc.agent.tier.workers import NoWorker
from gemini_hpc.core.slots import Stamp
from gemini_hpc.tier import (
    hdf5,
    job_directory,
    lustre,
    names,
    nodefile,
    orders,
    owned,
    publish,
    retention,
    scratch,
    version,
    worker,
)

from . import slot
from .files import READ, Files, FileSystem, NothingAhead, Straight, copy_of
from .kernel import Process, current
from .rank import state_of
from .system import World

JOB, KEEP_LAST = 7, 2


class Worker(Process):
    """One order's."""

    def __init__(self, tier: Tier, agent: Process, order: bytes, fds: list[int]) -> None:
        super().__init__(tier.world.loop, f"worker-{agent.name}", agent.host)
        tier.workers.append(self)  # one that is collected runs its `finally` blocks
        self.tier, self.agent, self.pid, self.fds = tier, agent, len(tier.workers), fds
        self.stdin = io.BytesIO(order)
        self.answers = asyncio.StreamReader(limit=64 << 20, loop=tier.world.loop)
        self.hung = False
        agent.on_kill.append(self._orphaned)

    def run(self) -> None:
        """The process."""
        worker.main()
        self.kill()

    def say(self, answer: orders.Answer) -> None:
        """A line to the agent."""
        self.agent.soon(self.answers.feed_data, orders.encode(answer) + b"\n")
        if not isinstance(answer, orders.Progress):
            self.tier.tell(self, type(answer).__name__.lower(), getattr(answer, "reason", ""))

    def _orphaned(self) -> None:
        world = self.tier.world
        if world.network.hosts[self.host].up:
            world.network.at(world.loop.now + world.rng.uniform(0.0, 0.04), self.kill)
        else:
            self.kill()

    def kill(self) -> None:
        if self.alive:
            super().kill()
            self.hung = self.tier.system.killed(self)
            for fd in self.fds:
                os.close(fd)
            self.agent.soon(self.answers.feed_eof)
            if self.agent.alive:
                self.agent.on_kill.remove(self._orphaned)


class Handle:
    """In place of `worker_process._Process`."""

    def __init__(self, made: Worker) -> None:
        self._worker, self.answers = made, made.answers

    @classmethod
    async def start(cls, channel: Any, order: bytes, fds: Sequence[int]) -> Handle:
        tier: Tier = channel
        rng, agent = tier.world.rng, current()
        if rng.random() < tier.refuses:
            raise NoWorker("could not start a tier process: Resource temporarily unavailable")
        copies = {fd: os.dup(fd) for fd in fds}
        made = Worker(tier, agent, _renumbered(order, copies), list(copies.values()))
        if rng.random() < tier.deaths:
            made.dies_in = rng.randrange(60)
        asked = orders.order_decoder.decode(order)
        shown = ":".join(map(str, getattr(asked, "stamp", ()) or ()))
        tier.tell(made, f"is to {type(asked).__name__.lower()}", shown)
        tier.world.loop.thread(made, made.run, rng.uniform(0.01, 0.1))
        await asyncio.sleep(rng.uniform(0.001, 0.01))
        return cls(made)

    async def end(self) -> None:
        self._worker.kill()
        if self._worker.hung:
            await asyncio.sleep(1.0)


def _renumbered(order: bytes, copies: dict[int, int]) -> bytes:
    """With the worker's own descriptors."""
    asked = orders.order_decoder.decode(order)
    if isinstance(asked, orders.Write):
        mine = tuple(msgspec.structs.replace(s, fd=copies[s.fd]) for s in asked.shards)
        asked = msgspec.structs.replace(asked, shards=mine)
    elif isinstance(asked, orders.Read):
        asked = msgspec.structs.replace(asked, fd=copies[asked.fd])
    return orders.encode(asked) + b"\n"


class _System:
    """In place of `sys`, for the worker at work."""

    argv = ("", "1")
    executable, maxsize = "python3", sys.maxsize

    @property
    def stdin(self) -> Any:
        return SimpleNamespace(buffer=_at_work().stdin)


def _at_work() -> Worker:
    found = current()
    assert isinstance(found, Worker)
    return found


class _Memory:
    """In place of `os`, where an agent copies a slot: now and then that takes a while, and others write there."""

    def __init__(self, world: World) -> None:
        self._loop, self._rng = world.loop, random.Random(world.rng.random())

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, fd: int, views: Sequence[memoryview], at: int) -> int:
        (view,) = views
        if current().name.startswith("agent") and self._rng.random() < 0.1:
            half = len(view) // 2
            os.preadv(fd, [view[:half]], at)
            self._loop.block(lambda _: None, self._rng.uniform(0.0, 1.0))
            return half + os.preadv(fd, [view[half:]], at + half)
        return os.preadv(fd, [view], at)


class Tier:
    """The shared directory of all nodes, and what is to be found there. refuses, deaths: the share of workers that
    are not started, or are killed by themselves."""

    def __init__(self, world: World, root: str) -> None:
        self.world, self.root = world, root
        self.system = FileSystem(world.loop, root)
        self.system.named, self.system.removed, self.system.renamed = self._named, self._removed, self._renamed
        self.refuses = self.deaths = 0.0
        self.workers: list[Worker] = []
        self.published: list[Stamp] = []
        self.wrong: list[str] = []
        self._power_off = world.network.power_off
        world.network.power_off = self._lost_power  # type: ignore[method-assign]

    def tell(self, made: Worker, what: str, detail: str) -> None:
        """A line of the story."""
        self.world.tell(f"{made.host} worker {made.pid} {what} {detail}")

    def _lost_power(self, host: Any) -> None:
        self._power_off(host)
        self.system.lost_power(host.name)

    # ---- what is there ---------------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        """Of the job's only set."""
        return f"{self.root}/gemini-{JOB}/default"

    def stamps(self, *, whole: bool = True) -> list[Stamp]:
        """Versions that are whole, or are not; newest first."""
        return self._stamps(self.directory, whole=whole)

    def offered(self) -> list[Stamp]:
        """Whole ones that nobody has rejected, as they would be found."""
        return self._offered(self.directory)

    @staticmethod
    def _stamps(directory: str, *, whole: bool = True) -> list[Stamp]:
        there = version.list_stamps(directory)
        return [s for s in there if os.path.lexists(f"{directory}/{version.format_name(s)}/manifest.json") == whole]

    def _offered(self, directory: str) -> list[Stamp]:
        return [
            s
            for s in self._stamps(directory)
            if not os.path.lexists(f"{directory}/{version.format_name(s)}/rejected")
        ]

    def names(self) -> dict[str, tuple[int, Stamp]]:
        """The names that versions have."""
        return names.find_training_names(self.directory)

    def audit(self) -> None:
        """Each whole version has each rank's state, and that is the one which the training had."""
        for stamp in self.stamps():
            self._audit(stamp)

    def _named(self, through: str) -> None:
        path = owned.as_users_know(through)
        if path.endswith(f"/{version.MANIFEST}"):
            stamp = version.parse_name(path.split("/")[-2])
            assert stamp is not None
            self.published.append(stamp)
            self.world.tell(f"TIER {stamp.epoch}:{stamp.version} is whole")
            contextvars.Context().run(self._audit, stamp)

    def _removed(self, through: str) -> None:
        path = owned.as_users_know(through)
        if path.endswith(f"/{version.MANIFEST}"):
            self._no_more(os.path.dirname(path), kept=os.path.lexists(f"{os.path.dirname(path)}/{version.KEPT}"))

    def _renamed(self, path: str, rename: Callable[[], None]) -> None:
        is_version = version.parse_name(os.path.basename(path)) is not None
        whole, kept = (os.path.lexists(f"{path}/{name}") for name in (version.MANIFEST, version.KEPT))
        rename()
        if is_version and whole:
            self._no_more(path, kept=kept)

    def _no_more(self, where: str, *, kept: bool) -> None:
        """A version that was whole has been removed."""
        self.world.tell(f"TIER {os.path.basename(where)} is no more")
        left = self._offered(os.path.dirname(where))  # which is another place where the file system has just gone
        if len(left) < KEEP_LAST:
            self.wrong.append(f"{os.path.basename(where)} was whole, and removed: {left} are left")
        if kept:
            self.wrong.append(f"{os.path.basename(where)} was to be kept, and removed")

    def _audit(self, stamp: Stamp) -> None:
        where = f"{self.directory}/{version.format_name(stamp)}"
        try:
            found = version.read(self.directory, stamp)
            assert found is not None
            for rank, (name, stored) in sorted(found.map_shards().items()):
                view = bytearray(stored.bytes)
                with nodefile.NodeFileReader(f"{where}/{name}") as reader:
                    reader.read(stored, memoryview(view)[: stored.used])
                content = slot.unpack(bytes(view))
                if (content.rank, content.version, content.state) != (
                    rank,
                    stamp.version,
                    state_of(rank, stamp.version),
                ):
                    raise ValueError(f"rank {rank}: {content}")
            with h5py.File(f"{where}/{version.INDEX}", "r") as file:
                states = bytes(file["tensors/state"][()])
            for rank in range(found.world):
                if state_of(rank, stamp.version).encode() not in states:
                    raise ValueError(f"{version.INDEX}: has not the state of rank {rank}")
        except (OSError, ValueError, KeyError) as error:
            self.wrong.append(f"version {stamp.epoch}:{stamp.version} is called whole: {error}")

    # ---- where production code finds it ----------------------------------------------------------------

    def install(self) -> None:
        """For the rest of this process."""
        files, system, create = Files(self.system), self.system, hdf5.create
        for module in (owned, job_directory, publish, version, retention, names, nodefile, worker):
            _put(module, os=files)
        shutil = copy_of("shutil", files)

        def make(above: str, name: str) -> str:
            return files.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=above)

        _put(scratch, make=make, remove=shutil.rmtree)
        _put(names, open=files.open_file)
        _put(worker, open=files.open_file, sys=_System(), Ahead=NothingAhead)
        _put(worker, _end_with=lambda parent: None, _lower_priority=lambda: None)
        _put(worker, _say=lambda answer: _at_work().say(answer))
        _put(node_writer, os=_Memory(self.world))
        _put(lustre, is_lustre=lambda path: False)
        _put(hdf5, create=lambda path: files.create(str(path), lambda: create(path)))
        opened = {"File": lambda path, mode: system.operate(READ, lambda: h5py.File(path, mode))}
        _put(nodefile, h5py=SimpleNamespace(**{**vars(h5py), **opened}))
        _put(nodefile, Behind=lambda path, *, direct: Straight(files, path))
        _put(worker_process, _Process=Handle, _supervisor=[self])


def _put(module: ModuleType, **values: Any) -> None:
    """In place of what is there."""
    for name, value in values.items():
        assert hasattr(module, name) or hasattr(builtins, name), f"{module.__name__} has no {name}"
        setattr(module, name, value)
