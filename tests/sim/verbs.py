"""Devices for RDMA on the hosts of a simulation (`fake_verbs`): packets take any time, and come in any order.

What has left a sender arrives although the sender has died, or the links between the hosts are cut: the worst that a
fabric can do. Whatever lands where it may not is told.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.agent.replicas.store import Shard
from gemini_hpc.agent.transfer import rdma
from gemini_hpc.core.slots import Slot, Stamp

from . import fake_verbs
from .kernel import current
from .system import World

_TRIAL_BYTES, _WRITE_BYTES = 3000, 4096
_FAILS = 0.03  # share of the calls of a device that fail, while faults last


class SimWire(fake_verbs.Wire):
    """Between the hosts. Each packet goes on when its time has come."""

    def __init__(self, world: World) -> None:
        super().__init__(random.Random(world.seed ^ 0x1B))
        self._world = world

    def carry(self, packet: fake_verbs.Packet | fake_verbs.Flush) -> None:
        super().carry(packet)
        self._later(packet)

    def _later(self, packet: fake_verbs.Packet | fake_verbs.Flush) -> None:
        drawn = self.rng.random()
        most_s = 0.001 if drawn < 0.8 else 0.05 if drawn < 0.98 else 1.0
        loop = self._world.loop
        self._world.network.at(loop.now + self.rng.uniform(0.0, most_s), self._go_on, packet)

    def _go_on(self, packet: fake_verbs.Packet | fake_verbs.Flush) -> None:
        if self.go_on(packet):
            self._later(packet)


class SimVerbs(fake_verbs.FakeVerbs):
    """The module in one process, for as long as that lives."""

    def __init__(self, wire: SimWire, world: World) -> None:
        super().__init__(wire, f"{current().host}/{len(world.loop.graves)}")
        self._fails = random.Random(world.seed ^ 0xFA)
        self._world = world
        current().on_kill.append(self.end)

    def check(self, call: str) -> None:
        if call != "dereg_mr" and self._world.damaged and self._fails.random() < _FAILS:
            raise fake_verbs.VerbsError(f"ibv_{call}", 5)


class Devices:
    """All of them."""

    def __init__(self, world: World, agents: Callable[[], Iterator[Agent]], wrong: Callable[[str], None]) -> None:
        self._agents, self._wrong, self._world = agents, wrong, world
        self._wire = SimWire(world)
        self._wire.landing = self._landing
        self._granted: dict[fake_verbs.QP, Stamp | None] = {}
        self._told: set[fake_verbs.QP] = set()
        self._waiting: dict[int, Callable[[], None]] = {}  # by completion channel
        self._install()

    def _install(self) -> None:
        """Install the devices for the rest of this process."""
        module: Any = SimpleNamespace(import_module=lambda name: self._module())
        rdma.importlib = module
        rdma._wait_readable = self._readable  # type: ignore[assignment]
        rdma.TRIAL_BYTES, rdma._WRITE_BYTES, rdma._DEPTH = _TRIAL_BYTES, _WRITE_BYTES, 2
        rdma.REST_S = 3.0
        rdma._end_process = lambda: current().kill()
        ring = fake_verbs.CompChannel.ring

        def rung(channel: fake_verbs.CompChannel, queue: fake_verbs.CQ) -> None:
            ring(channel, queue)
            if (go_on := self._waiting.pop(channel.fd, None)) is not None:
                go_on()

        fake_verbs.CompChannel.ring = rung  # type: ignore[method-assign]

    def _module(self) -> SimVerbs:
        made = SimVerbs(self._wire, self._world)
        made.made = self._made
        return made

    def _readable(self, fd: int, timeout_s: float) -> bool:
        return self._world.loop.block(lambda go_on: self._waiting.__setitem__(fd, go_on), timeout_s)

    def _found(self, region: fake_verbs.MR | fake_verbs.PD) -> tuple[Shard, int, Slot] | None:
        """The slot of a region or of its protection domain; None: memory of a trial, or of an agent that has died."""
        for agent in self._agents():
            for shard in agent.store.list_all():
                for index, memory in enumerate(shard.memory):
                    made = agent.rdma._slots.get(memory)
                    if made is not None and region in (made.region, made.domain):
                        return shard, index, shard.pair.slots[index]
        return None

    def _made(self, pair: fake_verbs.QP) -> None:
        found = self._found(pair.pd)
        self._granted[pair] = found[2].stamp if found is not None else None

    def _landing(self, pair: fake_verbs.QP, region: fake_verbs.MR) -> None:
        found = self._found(region)
        if found is None:
            return
        shard, index, slot = found
        if slot.state != "filling" or slot.stamp != self._granted[pair]:
            late = f"bytes of {self._granted[pair]} land in slot {index} of shard {shard.rank}"
            self._wrong(f"R1: {late}, which is {slot.state} {slot.stamp or ''}")
        elif pair not in self._told:
            self._told.add(pair)
            self._world.tell(f"RDMA: bytes of shard {shard.rank} v{slot.stamp.version} land")
