"""A job with a tier, by hand: what Slurm and srun would do with it, in the words of a scenario.

A scenario is a function of a `Job`, which it has launch, cut, kill and wait; all of it happens on the loop's time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable

from gemini_hpc.config import Settings
from gemini_hpc.core.slots import Stamp
from gemini_hpc.wire import local

from .kernel import Process
from .node import Node, SimAgent
from .rank import Barrier, Rank
from .system import World, install, story
from .tier import JOB, Tier

_LOOK_S = 0.02
_MOST_S = 3600.0


class Wrong(AssertionError):
    """What must not happen."""


class Job:
    """One job, whose nodes may be exchanged. watch: called in a rank's thread when it says what it does."""

    def __init__(
        self, seed: int, *, nodes: int = 3, replicas: int = 2, interval_s: int = 1, **settings: object
    ) -> None:
        self.world = World(seed)
        self.rng, self.loop = self.world.rng, self.world.loop
        install(self.world)
        self.place = tempfile.mkdtemp(prefix="gemini-sim-tier-")
        os.mkdir(f"{self.place}/tier")
        self.tier = Tier(self.world, f"{self.place}/tier")
        self.tier.install()
        given = {"cluster_name": "sim", "memory_floor_bytes": 0, "attach_timeout_s": 5.0, "agent_restarts": 1000}
        given |= {"failure_domains": "none"}
        self.settings = Settings(**{**given, **settings})  # type: ignore[arg-type]
        self.replicas, self.interval_s = replicas, interval_s
        self.nodes: dict[str, Node] = {}
        self.restart = -1
        self.launches = 0
        self.hosts: list[str] = []
        self.ranks: list[Rank] = []
        self.resumed: dict[int, int] = {}  # by rank, of the last launch
        self.sealed: Stamp = Stamp(0, 0)
        self.reached = self.last = 0
        self.stepped_at = 0.0
        self.unprotected: list[str] = []
        self.slowest_s = 0.0  # between two steps
        self.watch: Callable[[str, Rank, int], object] = lambda what, rank, version: None
        self.trouble: BaseException | None = None
        self.add(nodes)

    def add(self, count: int) -> list[str]:
        """Further nodes, all of them new."""
        names = [f"n{len(self.nodes) + at}" for at in range(1, count + 1)]
        for name in names:
            self.nodes[name] = Node(self.world, name, self.settings)
        return names

    # ---- a run -----------------------------------------------------------------------------------------

    def run(self, scenario: Callable[[Job], object]) -> None:
        """From the beginning to the end. Raises what the scenario raises, and `Wrong`."""
        director = Process(self.loop, "director", "n1")

        def play() -> None:
            try:
                scenario(self)
                self.tier.audit()
            except BaseException as error:
                self.trouble = error
            self.loop.stop()

        def look() -> None:
            if self.tier.wrong:
                self.trouble = self.trouble or Wrong(self.tier.wrong[0])
            if self.loop.now > 1000.0 + _MOST_S:
                self.trouble = self.trouble or Wrong("it does not come to an end")
            if self.trouble is not None:
                self.loop.stop()

        self.loop.after_turn = look
        self.loop.thread(director, lambda: _outside(play))
        self.loop.run_forever()
        if self.trouble is not None:
            raise self.trouble

    def clear(self) -> None:
        """Nothing stays on the machine."""
        for node in self.nodes.values():
            shutil.rmtree(node.root, ignore_errors=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.world.clock.sleep(seconds)

    def wait(self, what: Callable[[], object], within_s: float, text: str) -> None:
        """Until it is so. Raises `Wrong` where that takes longer."""
        deadline = self.loop.now + within_s
        while not what():
            if self.loop.now > deadline:
                raise Wrong(f"not within {within_s:g} s: {text}")
            self.sleep(_LOOK_S)

    def check(self, what: object, text: str) -> None:
        """Raises `Wrong` where it is not so."""
        if not what:
            raise Wrong(text)

    # ---- Slurm -----------------------------------------------------------------------------------------

    @property
    def up(self) -> list[str]:
        """The job's nodes that have power."""
        return [h for h in self.hosts if self.nodes[h].host.up]

    def allocate(self, hosts: Iterable[str], without: Collection[str] = ()) -> dict[str, str]:
        """A new incarnation, on these nodes: all prologs have run; what they said. without: nodes that have none."""
        self.restart += 1
        self.hosts = list(hosts)
        nodelist = ",".join(self.hosts)
        tier = (self.tier.root, self.interval_s)

        def prolog(name: str) -> str:
            attach = local.Attach(JOB, self.restart, nodelist, name, self.replicas, *tier)
            return self.nodes[name].prolog(attach)

        return self._everywhere("prolog", prolog, without)

    def end(self, exit_code: str, *, late: str = "", late_s: float = 0.0) -> dict[str, str]:
        """The epilogs of this incarnation; what they said. An agent that has not answered is ended by root, later.
        late: a node whose epilog's turn comes only so much later."""
        self.end_step()

        def epilog(name: str) -> str:
            if name == late:
                self.world.clock.sleep(late_s)
            return self.nodes[name].epilog(JOB, self.restart, exit_code)

        said = self._everywhere("epilog", epilog)
        for host, answer in said.items():
            if answer not in ("released", "detached", "hold"):
                self.world.network.at(self.loop.now + 1.0, self._reap, host, self.restart)
        return said

    def _reap(self, host: str, restart: int) -> None:
        seat = self.nodes[host].seats.get(JOB)
        if seat is not None and self.restart == restart:
            seat.ended = True
            if seat.process is not None:
                seat.process.kill()
            del self.nodes[host].seats[JOB]

    def _everywhere(self, name: str, what: Callable[[str], str], without: Collection[str] = ()) -> dict[str, str]:
        said: dict[str, str] = {}
        for host in [h for h in self.up if h not in without]:
            process = Process(self.loop, name, host)
            self.nodes[host].processes.append(process)

            def run(host: str = host) -> None:
                said[host] = what(host)
                self.world.tell(f"{host} {name}: {said[host]}")

            self.loop.thread(process, run, self.rng.uniform(0.0, 0.2))
        self.wait(lambda: said.keys() >= set(self.up) - set(without), 60.0, f"{name}s end")
        return said

    # ---- srun ------------------------------------------------------------------------------------------

    def launch(self, steps: int, *, pause_s: float = 0.1) -> None:
        """A step of this incarnation."""
        self.launches += 1
        self.last = steps
        self.ranks, self.resumed, self.unprotected = [], {}, []
        self.stepped_at, self.slowest_s = self.loop.now, 0.0
        barrier = Barrier(len(self.hosts))
        for name in self.hosts:
            directory = f"{self.nodes[name].root}/{JOB}"
            self.wait(lambda d=directory: os.path.exists(f"{d}/map"), 60.0, f"a map on {name}")  # type: ignore[misc]
            with open(f"{directory}/map", encoding="ascii") as file:
                number = int(file.read().split("noderank=")[1].split()[0])
            process = Process(self.loop, f"rank{number}", name)
            self.nodes[name].processes.append(process)
            rank = Rank(
                self.world,
                process,
                path=f"{directory}/agent.sock",
                step=f"{JOB}.{self.launches}",
                rank=number,
                size=len(self.hosts),
                barrier=barrier,
                last=lambda: self.last,
                pause_s=pause_s,
                watch=self._watch,
            )
            self.ranks.append(rank)
            self.loop.thread(process, rank.run, self.rng.uniform(0.0, 0.1))

    def end_step(self) -> None:
        """What still trains is killed."""
        for rank in self.ranks:
            rank.process.kill()

    def _watch(self, what: str, rank: Rank, number: int) -> None:
        self.world.tell(f"rank {rank.rank} {what} {number} {rank.reason}")
        if what == "MIXED":
            self.trouble = Wrong(f"rank {rank.rank}: version {number} is mixed")
        elif what == "resumed":
            self.resumed[rank.rank] = number
            self.reached, self.stepped_at = number, self.loop.now
        elif what == "step" and number > self.reached:
            self.slowest_s = max(self.slowest_s, self.loop.now - self.stepped_at)
            self.reached, self.stepped_at = number, self.loop.now
        elif what == "sealed":
            self.sealed = max(self.sealed, Stamp(rank.epoch, number))
        elif what == "unprotected":
            self.unprotected.append(f"rank {rank.rank}: {rank.reason}")
        self.watch(what, rank, number)

    @property
    def running(self) -> bool:
        """Whether a rank trains."""
        return any(rank.process.alive for rank in self.ranks)

    @property
    def whole(self) -> bool:
        """Whether all ranks do."""
        return all(rank.process.alive for rank in self.ranks)

    # ---- agents ----------------------------------------------------------------------------------------

    def agent(self, host: str) -> SimAgent | None:
        """That of the job on a node, as long as it lives."""
        seat = self.nodes[host].seats.get(JOB)
        return None if seat is None else seat.agent

    @property
    def agents(self) -> list[str]:
        """Nodes on which the job has an agent."""
        return [name for name, node in self.nodes.items() if JOB in node.seats]

    def power_off(self, hosts: Iterable[str]) -> None:
        """All of these at once."""
        for host in list(hosts):
            self.nodes[host].power_off()

    def told(self, event: str) -> list[str]:
        """Lines of the story in which an agent tells this."""
        return [text for _, text in self.world.story if f" {event} v" in text]

    def story(self) -> str:
        """All of it."""
        return story(self.world)


def _outside(play: Callable[[], None]) -> None:
    play()
