"""slurmd on one node, in memory: prologs, scripts, the end of jobs and their epilogs. Its port answers probes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .kernel import Process
from .node import Node
from .system import World

if TYPE_CHECKING:
    from .slurmctld import Slurmctld

EPILOG_S = (0.05,) * 19 + (8.0,)  # until an epilog's turn comes: a node may be busy, or its site's own epilog slow
FORGETS = 0.9  # how often a slurmd has forgotten a job that comes back, and runs its prolog


class Work(Protocol):
    """What a job does on nodes; all but `begin` and `kill` in threads."""

    def prolog(self, node: Node, raw_id: int, restart: int, nodes: tuple[str, ...]) -> None: ...

    def begin(self, raw_id: int, restart: int, nodes: tuple[str, ...], ended: Callable[[int], None]) -> None: ...

    def kill(self, node: Node, raw_id: int) -> None: ...

    def epilog(self, node: Node, raw_id: int, restart: int, code: str, nodes: tuple[str, ...]) -> None: ...


@dataclass
class Allocation:
    """What is known of one job. phase: prolog, ready, script, ending, over."""

    restart: int
    kind: str
    nodes: tuple[str, ...]
    phase: str


class Slurmd:
    """See the module. work: by kind of job."""

    ctld: Slurmctld

    def __init__(self, world: World, node: Node, port: int, work: dict[str, Work]) -> None:
        self.world, self.node, self.port, self.work = world, node, port, work
        self.known: dict[int, Allocation] = {}
        self.boot = world.clock.time() - 7200.0
        self._slow = random.Random(f"{world.seed} {node.name}")
        self.process: Process
        self._up()

    def _up(self) -> None:
        self.process = Process(self.world.loop, "slurmd", self.node.name)
        self.node.processes.append(self.process)
        self.process.context.run(self.world.network.listen, asyncio.Protocol, self.port)

    def restarted(self) -> None:
        """The daemon alone: what runs goes on."""
        self._up()

    def booted(self) -> None:
        """The node has power again: an empty slurmd."""
        self.known.clear()
        self.boot = self.world.clock.time()
        self._up()

    @property
    def answers(self) -> bool:
        """Whether it would answer a ping."""
        return self.process.alive and not self.process.stopped

    def jobs(self) -> list[tuple[int, int]]:
        """What it runs, or ends: (job, restart)."""
        return [(raw_id, a.restart) for raw_id, a in self.known.items() if a.phase != "over"]

    def deliver(self, call: Callable[..., None], *args: Any) -> None:
        """A message from slurmctld."""
        charge = self.ctld.charge
        if charge is not None:
            self.world.network.soon(charge, self.node.host, self.process.soon, call, *args)

    def tell(self, call: Callable[..., None], *args: Any) -> None:
        """To slurmctld, again and again until one hears."""
        process, network = self.process, self.world.network

        def send() -> None:
            if self.ctld.charge is not None and self.ctld.hears(self.node.name):
                call(*args)
            elif process.alive:
                network.at(self.world.loop.now + 1.0, send)

        network.at(self.world.loop.now + self.world.rng.uniform(0.0005, 0.02), send)

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        process = Process(self.world.loop, name, self.node.name)
        self.node.processes.append(process)
        self.world.loop.thread(process, work, self.world.rng.uniform(0.0, 0.2))

    # ---- messages --------------------------------------------------------------------------------------

    def prolog(self, raw_id: int, restart: int, nodes: tuple[str, ...], kind: str) -> None:
        """Run it, unless it has run; a slurmd that still remembers the job may leave it out."""
        known = self.known.get(raw_id)
        if known is not None and known.phase != "over":
            if known.restart == restart and known.phase in ("ready", "script"):
                self.tell(self.ctld.ready, self.node.name, raw_id, restart)
            return
        mine = self.known[raw_id] = Allocation(restart, kind, nodes, "prolog")
        if known is not None and self.world.rng.random() > FORGETS:
            self.world.tell(f"{self.node.name} skips the prolog of job {raw_id} restart {restart}")
            self._ready(raw_id, mine)
            return

        def run() -> None:
            self.work[kind].prolog(self.node, raw_id, restart, nodes)
            self._ready(raw_id, mine)

        self._thread(f"prolog-{raw_id}", run)

    def _ready(self, raw_id: int, mine: Allocation) -> None:
        if mine.phase == "prolog":
            mine.phase = "ready"
            self.tell(self.ctld.ready, self.node.name, raw_id, mine.restart)

    def batch(self, raw_id: int, restart: int, nodes: tuple[str, ...], kind: str, runs_s: float) -> None:
        """Begin the script, once."""
        known = self.known.get(raw_id)
        if known is None or known.restart != restart or known.phase not in ("ready", "script"):
            return
        if known.phase == "ready":
            known.phase = "script"

            def ended(code: int) -> None:
                if known.phase == "script":
                    self.tell(self.ctld.script_ended, raw_id, restart, code)

            self.work[kind].begin(raw_id, restart, nodes, ended)
            if runs_s < 86400.0:
                self.world.network.at(self.world.loop.now + runs_s, ended, 0)
        self.tell(self.ctld.begun, raw_id, restart)

    def terminate(self, raw_id: int, restart: int, code: str, orphaned: bool) -> None:
        """End what runs of the job here; then its epilog. orphaned: its batch host is dead, and steps try to reach
        their srun there for a while."""
        known = self.known.get(raw_id)
        if known is None or known.restart != restart or known.phase == "over":
            self.tell(self.ctld.node_ended, self.node.name, raw_id, restart)
            return
        if known.phase == "ending":
            return
        known.phase = "ending"
        self.work[known.kind].kill(self.node, raw_id)

        def run() -> None:
            self.world.clock.sleep(self.world.rng.uniform(4.0, 9.0) if orphaned else self._slow.choice(EPILOG_S))
            self.work[known.kind].epilog(self.node, raw_id, restart, code, known.nodes)
            known.phase = "over"
            self.tell(self.ctld.node_ended, self.node.name, raw_id, restart)

        self._thread(f"epilog-{raw_id}", run)
