"""A protected training as a job of the simulated Slurm: prologs, the batch script that launches ranks, epilogs."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from gemini_hpc.controller import epilog_fallback
from gemini_hpc.controller.reservation import HOLD_S
from gemini_hpc.core import hostlist
from gemini_hpc.slurm.errors import SlurmError
from gemini_hpc.wire import local

from .jobs import Job, Launch, Wrong
from .kernel import Process, current
from .node import Node
from .rank import Rank
from .slurm import SimSlurm
from .slurmctld import Slurmctld
from .system import OWNER, World

MAP_S = 5.0  # so long a step waits for a map that is said to come
HOLD_WAIT_S = 4.5


class Training(Job):
    """See the module; a `slurmd.Work`. on_wrong: hears what must not happen."""

    def __init__(
        self,
        world: World,
        number: int,
        nodes: dict[str, Node],
        size: int,
        *,
        replicas: int,
        pause_s: float,
        user_id: int = OWNER,
    ) -> None:
        super().__init__(world, number, list(nodes.values())[:size], [], replicas=replicas, pause_s=pause_s)
        self.all, self.state_save, self.user_id = nodes, "", user_id
        self.ctld: Slurmctld
        self.on_wrong: Callable[[Wrong], None]
        self.on_seen: Callable[[str, int], None] = lambda what, version: None
        self.lost_in: dict[str, int] = {}  # nodes that went, until a later launch has sealed: launches so far
        self.tier: tuple[str, int] = ("", 0)  # its directory, seconds between saves
        self.on_tier: Callable[[], int] = lambda: 0  # the newest version that is to be found there
        self._saved = 0  # the same, when this incarnation began
        self.unsealed = False  # some step went on without its seal
        self.repeated: list[int] = []
        # How long the script of a job that has lost a node goes on, if it ends by itself: before or after the agents
        # have noticed (a connection that is reset, or that nobody answers on).
        self.fails_after_s: tuple[float, float] | None = world.rng.choice((None, (0.0, 3.0), (4.0, 12.0)))
        self.ends_with = 1  # its exit code then
        self.cut_short = False  # it has ended so
        self.on_excuse: Callable[[], bool] = lambda: False  # whether copies may be out of reach of this incarnation
        self.on_failed: Callable[[int], None] = lambda restart: None
        self.script: Process | None = None
        self._ended: Callable[[int], None] = lambda code: None

    # ---- for slurmds -----------------------------------------------------------------------------------

    def prolog(self, node: Node, raw_id: int, restart: int, nodes: tuple[str, ...]) -> None:
        nodelist = hostlist.compress(sorted(nodes))
        attach = local.Attach(raw_id, restart, nodelist, node.name, self.replicas, *self.tier)
        self.world.tell(f"{node.name} prolog of restart {restart}: {node.prolog(attach)}")

    def begin(self, raw_id: int, restart: int, nodes: tuple[str, ...], ended: Callable[[int], None]) -> None:
        self.restart, self.nodes, self._ended = restart, [self.all[n] for n in sorted(nodes)], ended
        self.dead = {node.name for node in self.nodes if not node.host.up}
        self.state, self._saved, self.cut_short = "running", self.on_tier(), False
        script = self.script = Process(self.world.loop, f"batch-{raw_id}", self.nodes[0].name)
        self.nodes[0].processes.append(script)

        def run() -> None:
            deadline = self.world.loop.now + MAP_S
            while self.world.loop.now < deadline and any(
                os.path.exists(f"{node.root}/{raw_id}/waiting") for node in self.nodes
            ):
                self.world.clock.sleep(0.1)
            self.world.tell(f"job {raw_id} restart {restart}: the script runs on {','.join(self.names)}")
            if self.state == "running":
                self._launch()

        self.world.loop.thread(script, run, self.world.rng.uniform(0.0, 0.1))

    def kill(self, node: Node, raw_id: int) -> None:
        self.state = "completing"
        if self.script is not None and self.script.host == node.name:
            self.script.kill()
        for launch in self.launches[-1:]:
            launch.over = True
            for rank in launch.ranks.values():
                if rank.process.host == node.name:
                    rank.process.kill()

    def epilog(self, node: Node, raw_id: int, restart: int, code: str, nodes: tuple[str, ...]) -> None:
        said = node.epilog(raw_id, restart, code)
        self.world.tell(f"{node.name} epilog of restart {restart}: {said}")
        if said == "hold":
            self._hold(node, raw_id, restart, nodes)

    def _hold(self, node: Node, raw_id: int, restart: int, nodes: tuple[str, ...]) -> None:
        """As `agent.epilog` does: a process that outlives it, waited for until the job is pinned."""
        process = Process(self.world.loop, f"hold-{raw_id}", node.name)
        node.processes.append(process)
        loop, ends = self.world.loop, os.pipe()
        os.set_blocking(ends[0], False)
        args = argparse.Namespace(job=raw_id, restart=restart, node=node.name)
        there: Any = epilog_fallback
        there.Slurm = lambda timeout_s: SimSlurm(self.ctld, current(), self.state_save)

        async def work(steps: Coroutine[Any, Any, None]) -> None:
            try:
                async with asyncio.timeout(HOLD_S):
                    await steps
            except (epilog_fallback.NothingToHoldError, SlurmError, OSError, ValueError) as exc:
                self.world.tell(f"hold on {node.name} ends: {exc}")

        steps = epilog_fallback._hold_job(node.settings, args, sorted(nodes), ends[1])
        task = process.spawn(work(steps))
        deadline = loop.now + HOLD_WAIT_S
        while loop.now < deadline and not task.done():
            self.world.clock.sleep(0.05)
            try:
                if os.read(ends[0], 1):
                    break
            except BlockingIOError:
                continue

    # ---- srun ------------------------------------------------------------------------------------------

    @property
    def _runs(self) -> bool:
        return self.state == "running" and self.script is not None and self.script.alive

    def _launch(self) -> None:
        super()._launch()
        for rank in self.launches[-1].ranks.values():
            rank.process.user_id = self.user_id

    def _end(self, how: str, exit_code: str) -> None:
        if self._runs:
            self.state = "completing"
            self._ended(0 if how == "completed" else self.ends_with)

    def _clear(self, launch: Launch) -> None:
        if self._runs:  # who has no srun any more hears of nothing
            super()._clear(launch)

    def _again(self, launch: Launch) -> None:
        if not self._runs or launch is not self.launches[-1]:
            return
        if not self.dead:
            self._launch()
        elif self.fails_after_s is not None:  # else it waits, as `gemini-hpc run` does
            after_s = self.world.rng.uniform(*self.fails_after_s)
            self.world.network.at(self.world.loop.now + after_s, self._fails, self.restart)

    def _fails(self, restart: int) -> None:
        if restart == self.restart:
            self.cut_short = self._runs
            self.on_failed(restart)
            self._end("failed", str(self.ends_with))

    def lost(self, node: Node) -> None:
        """A node has lost power, and all that it had in memory."""
        self.gone(node.name)
        if node in self.nodes:
            self.dead.add(node.name)

    def gone(self, name: str) -> None:
        """What this node has in memory may be lost."""
        self.lost_in[name] = len(self.launches)

    # ---- what must hold --------------------------------------------------------------------------------

    def _saw(self, launch: Launch, what: str, rank: Rank, version: int) -> None:
        try:
            super()._saw(launch, what, rank, version)
        except Wrong as exc:
            self.on_wrong(exc)
        if what == "sealed":
            at = self.launches.index(launch)
            self.lost_in = {name: count for name, count in self.lost_in.items() if count > at}
        elif what in ("late", "skipped"):
            self.unsealed = True
        self.on_seen(what, version)

    def _nothing_lost(self, launch: Launch, version: int) -> None:
        if len(launch.resumed) > 1:
            return
        self.repeated.append(self.trained - version)
        if len(self.lost_in) < self.replicas and not self.on_excuse():
            if version < self.sealed:
                raise Wrong(f"lost: {self.sealed} was sealed, {launch.step} resumes from {version}")
            if not self.unsealed and self.trained - version > 1:
                raise Wrong(f"R2: {self.trained} steps were trained, {launch.step} resumes from {version}")
        elif version < self._saved:
            raise Wrong(f"tier: {self._saved} was saved there, {launch.step} resumes from {version}")
        self.trained, self.sealed, self.unsealed = version, version, False
