"""A job as Slurm runs it, without a Slurm: prologs, launches of ranks, epilogs, requeues on other nodes.

What Slurm decides is drawn within the bounds of what was seen of it: when it notices a dead node, how far apart the
prologs are, how long a job completes. A launch that fails on nodes that all live is started again in the same
allocation, as `gemini-hpc run` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemini_hpc.core import hostlist, placement
from gemini_hpc.wire import local

from .kernel import Process
from .node import Node
from .rank import SET, Barrier, Rank
from .system import World

MOST_LAUNCHES = 25
GOES_ON_S = 20.0  # so long the controller waits for the agents to go on with spares


class Wrong(AssertionError):
    """What must not happen."""


@dataclass
class Launch:
    """One srun."""

    step: str
    restart: int
    places: dict[str, int] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    ranks: dict[int, Rank] = field(default_factory=dict)
    resumed: dict[int, int] = field(default_factory=dict)
    sealed: dict[int, int] = field(default_factory=dict)  # by rank: what it has been told last
    outlined: dict[int, int] = field(default_factory=dict)  # by rank: of which it has told all but the tensors
    trained: int = 0  # the newest step that a rank has ended
    stepped_at: dict[int, float] = field(default_factory=dict)  # by version: when a rank had it first
    unsure: bool = False  # a rank went on without the seal of a version, and said so
    over: bool = False


class Job:
    """One job. spares: nodes that a requeue may use; none left: it waits until one of its own has booted. within: how
    many of its nodes are spares of its own (`--gemini-spares`); live: its ranks are replicas of each other;
    parity: blocks of it that its nodes keep for each row of a group of `replicas` (`core.parity`)."""

    def __init__(
        self,
        world: World,
        number: int,
        nodes: list[Node],
        spares: list[Node],
        *,
        replicas: int,
        pause_s: float,
        within: int = 0,
        live: bool = False,
        parity: int = 0,
    ) -> None:
        self.within, self.live, self.parity = within, live, parity
        self.world, self.number, self.nodes, self.spares = world, number, nodes, spares
        self.replicas, self.steps, self.pause_s = replicas, 1 << 30, pause_s
        self.size = len(nodes) - within  # nodes that train
        self.allocated = len(nodes)
        self.restart, self.launches = 0, list[Launch]()
        self.state = "pending"
        self.dead: set[str] = set()  # nodes of this allocation that have lost power
        self.sealed = 0  # the newest version that a rank was told is sealed
        self.sealed_at = 0.0
        self.saved_from = 0.0  # when a rank had that: whoever is lost after it may have voted
        self.holders: dict[int, tuple[Node, ...]] = {}  # by node rank, when that was sealed
        self.trained = 0  # the newest step that a rank has ended
        self.on_over: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self.means: Callable[[int, int], int] = lambda rank, version: version  # the iteration that a rank calls so
        self.on_all_sealed: Callable[[], None] = lambda: (
            None
        )  # every rank stands at a version that it knows is sealed
        self.on_all_outlined: Callable[[int], None] = lambda version: None  # and every home knows all but its tensors
        self.stood_at = 0  # with which ranks stood when all holders of a shard were lost at once
        self.leaves = False  # nodes of its own will, with what they hold
        self.moves = False  # nothing happens, but that it leaves a node on purpose
        self.unprotected: set[str] = set()  # steps in which a rank trained without protection
        self._said: dict[str, str] = {}

    # ---- starting --------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Nodes of the allocation."""
        return sorted(node.name for node in self.nodes)

    def start(self) -> None:
        """An incarnation begins: prologs, then a launch."""
        self.state, self._said, restart = "configuring", {}, self.restart
        self.dead = {node.name for node in self.nodes if not node.host.up}
        self.world.tell(f"job {self.number} restart {restart} begins on {','.join(self.names)}")
        nodelist = hostlist.compress(self.names)
        for node in self.nodes:
            attach = local.Attach(
                self.number, restart, nodelist, node.name, self.replicas, spares=self.within, parity=self.parity
            )
            process = Process(self.world.loop, f"prolog-{self.number}", node.name)
            node.processes.append(process)
            self.world.loop.thread(
                process,
                lambda node=node, attach=attach: self._prolog(node, attach, restart),
                self.world.rng.uniform(0, 0.3),
            )

    def _prolog(self, node: Node, attach: local.Attach, restart: int) -> None:
        said = node.prolog(attach)
        self.world.tell(f"{node.name} prolog of restart {restart}: {said}")
        if restart == self.restart and self.state == "configuring":
            self._said[node.name] = said
            if len(self._said) == len(self.nodes):
                self.state = "running"
                self._launch()
                if self.within:
                    self._watch(restart)

    def _launch(self) -> None:
        if len(self.launches) >= MOST_LAUNCHES:
            raise Wrong(f"job {self.number} was launched {MOST_LAUNCHES} times and has not come to its end")
        launch = Launch(f"{self.number}.{len(self.launches)}", self.restart)
        self.launches.append(launch)
        barrier = Barrier(self.size)
        ranks = launch.places = self._node_ranks()
        launch.lost = self._lost(ranks)
        self.world.tell(f"job {self.number} launches {launch.step} {ranks}")
        for node in self.nodes:
            if node.name not in ranks:
                continue
            process = Process(self.world.loop, f"rank-{ranks[node.name]}", node.name)
            node.processes.append(process)
            rank = Rank(
                self.world,
                process,
                path=f"{node.root}/{self.number}/agent.sock",
                step=launch.step,
                rank=ranks[node.name],
                size=self.size,
                barrier=barrier,
                last=lambda: self.steps,
                pause_s=self.pause_s,
                watch=lambda what, rank, version: self._saw(launch, what, rank, version),
                live=self.live,
                means=self.means,
            )
            launch.ranks[rank.rank] = rank
            self.world.loop.thread(process, rank.run, self.world.rng.uniform(0, 0.2))

    def _node_ranks(self) -> dict[str, int]:
        """From the map files, all of one kind, or none: then by position."""
        if self.within:
            return self._agreed() or {name: i for i, name in enumerate(self.names[: self.size])}
        found: dict[str, int] = {}
        for node in self.nodes:
            try:
                with open(f"{node.root}/{self.number}/map", encoding="ascii") as f:
                    found[node.name] = int(f.read().split("noderank=")[1].split()[0])
            except OSError:
                return {name: i for i, name in enumerate(self.names)}
        if sorted(found.values()) != list(range(self.size)):
            raise Wrong(f"the maps of job {self.number} give node ranks {found}")
        return found

    # ---- spares of its own -----------------------------------------------------------------------------

    def _agreed(self) -> dict[str, int]:
        """Node ranks by the maps of all that train by one and the same of them; {} without such a map. An agent that
        is not there leaves an old one behind."""
        maps: dict[str, dict[str, int]] = {}
        for node in self.nodes:
            try:
                with open(f"{node.root}/{self.number}/map", encoding="ascii") as f:
                    lines = dict(line.split("=", 1) for line in f.read().splitlines() if "=" in line)
            except OSError:
                continue
            if lines["noderank"].isdigit():
                maps.setdefault(lines["hash"], {})[node.name] = int(lines["noderank"])
        whole = [found for found in maps.values() if len(found) == self.size]
        if any(sorted(found.values()) != list(range(self.size)) for found in whole) or len(whole) > 1:
            raise Wrong(f"the maps of job {self.number} give node ranks {maps}")
        return whole[0] if whole else {}

    def _lost(self, agreed: dict[str, int]) -> frozenset[str]:
        """Nodes without which the agents of these go on."""
        seats = [node.seats.get(self.number) for node in self.nodes if node.name in agreed]
        return frozenset(h for seat in seats if seat and seat.agent for h in seat.agent.membership.lost)

    def _watch(self, restart: int) -> None:
        """What launchers hear from their agents: the job goes on with other nodes."""
        if self.state != "running" or restart != self.restart:
            return
        launch, agreed = self.launches[-1], self._agreed()
        if agreed and self._lost(agreed) != launch.lost and not self.dead & agreed.keys():
            self.world.tell(f"job {self.number} goes on with {agreed}")
            launch.over = True
            for rank in launch.ranks.values():
                rank.process.kill()
            self._launch()
        self.world.network.at(self.world.loop.now + self.world.rng.uniform(0.02, 0.2), self._watch, restart)

    def _spared(self) -> bool:
        """Whether its spares make up for the nodes that it has lost."""
        left = self.allocated - len(self.dead)
        return self.within > 0 and left >= self.size and 2 * left > self.allocated and self.names[0] not in self.dead

    # ---- what ranks do ---------------------------------------------------------------------------------

    def _saw(self, launch: Launch, what: str, rank: Rank, version: int) -> None:
        self.world.tell(f"rank {rank.rank} of {launch.step} {what} {version} {rank.reason}")
        if what == "MIXED":
            raise Wrong(f"rank {rank.rank} of {launch.step} has loaded what is not version {version}")
        if what == "resumed":
            launch.resumed[rank.rank] = version
            launch.stepped_at.setdefault(version, self.world.loop.now)
            if len(set(launch.resumed.values())) > 1:
                raise Wrong(f"R4: ranks of {launch.step} resume from {launch.resumed}")
            if len(launch.resumed) == 1:
                self._nothing_lost(launch, version)
        elif what == "unprotected":
            self.unprotected.add(launch.step)
        elif what == "sealed":
            if version > self.sealed:
                self.sealed, self.sealed_at = version, self.world.loop.now
                self.saved_from = launch.stepped_at.get(version, 0.0)
                self.holders = self._holders(launch)
            launch.sealed[rank.rank] = version
            if len(launch.sealed) == self.size and set(launch.sealed.values()) == {version}:
                self.on_all_sealed()
        elif what == "outlined":
            launch.outlined[rank.rank] = version
            if len(launch.outlined) == self.size and set(launch.outlined.values()) == {version}:
                self.on_all_outlined(version)
        elif what in ("late", "skipped", "rejoined"):
            launch.unsure = True
        elif what == "step":
            if launch is not self.launches[-1]:
                raise Wrong(f"rank {rank.rank} of {launch.step} trains, and {self.launches[-1].step} has begun")
            self.trained, launch.trained = max(self.trained, version), max(launch.trained, version)
            launch.stepped_at.setdefault(version, self.world.loop.now)
            self.on_step()
        elif what == "ended":
            self.world.network.at(self.world.loop.now, self._settle, launch)

    def _holders(self, launch: Launch) -> dict[int, tuple[Node, ...]]:
        """By node rank, the nodes that hold its shard."""
        homes = next(iter(launch.ranks.values())).barrier.homes
        nodes = {node.name: node for node in self.nodes}
        names = {homes[r.rank]: nodes[r.process.host] for r in launch.ranks.values() if r.rank in homes}
        count = self.size if self.parity else min(self.replicas, self.size)
        groups = {homes[r.rank]: r.group for r in launch.ranks.values() if r.rank in homes}
        return {
            home: tuple(
                names[h] for h in groups[home][:count] or placement.list_holders(home, self.size, count) if h in names
            )
            for home in names
        }

    def _nothing_lost(self, launch: Launch, version: int) -> None:
        """No sealed version is lost while a holder of each shard lives, and the job goes on with it; then at most one
        step is repeated."""
        if version < self.stood_at:
            raise Wrong(f"lost: {launch.step} resumes from {version}, though {self.stood_at} lived in its ranks")
        self.stood_at = 0
        if self.sealed and version < self.sealed:
            late, left = self.saved_from, launch.lost
            if not any(self._gone(holders, late, left) for holders in self.holders.values()):
                raise Wrong(f"lost: {launch.step} resumes from {version}, though {self.sealed} was sealed")
            self.sealed = version
        elif self.moves and len(self.launches) > 1 and version < self.launches[-2].trained:
            raise Wrong(f"{launch.step} repeats a step, and no node has failed: a planned move")
        elif len(self.launches) < 2 or (before := self.launches[-2]).unsure or before.step in self.unprotected:
            return  # nothing was promised of what that launch has trained
        elif before.trained > version + 1:
            raise Wrong(f"repeated: {launch.step} resumes from {version}, {before.step} had come to {before.trained}")

    def _gone(self, holders: tuple[Node, ...], late: float, left: frozenset[str]) -> bool:
        """Whether a shard cannot come back. What a node has that is only silent is lost with it where another holder
        has lost its own copy, as where the job leaves it on purpose; else the job has to wait for it."""
        lost = [node.lost_at > late for node in holders]
        if any(lost) or self.leaves:
            lost = [was or node.name in left for was, node in zip(lost, holders, strict=True)]
        return self._too_many(lost)

    def _too_many(self, lost: list[bool]) -> bool:
        """Whether so much of a shard's home, and of the others in its group, has gone that it cannot come back."""
        if not self.parity or len(lost) < 2:
            return all(lost)
        return lost[0] and sum(lost) > min(self.parity, len(lost) - 1)

    def rank_died(self, launch: Launch) -> None:
        """A rank was killed."""
        self._settle(launch)

    def _settle(self, launch: Launch) -> None:
        if launch.over or launch is not self.launches[-1]:
            return
        gone = [r for r in launch.ranks.values() if not r.process.alive]
        if len(gone) == self.size and all(r.done for r in gone):
            launch.over = True
            self._end("completed", "0")
        elif gone and not all(r.done for r in gone):
            launch.over = True
            self.world.network.at(self.world.loop.now + self.world.rng.uniform(0.05, 1.0), self._clear, launch)

    def _clear(self, launch: Launch) -> None:
        """srun ends what is left of a launch."""
        for rank in launch.ranks.values():
            rank.process.kill()
        if launch is self.launches[-1] and self.state == "running":
            self.world.network.at(self.world.loop.now + self.world.rng.uniform(0.1, 1.0), self._again, launch)

    def _again(self, launch: Launch) -> None:
        dead = self.dead & launch.places.keys() if self.within else self.dead
        if self.state == "running" and launch is self.launches[-1] and not dead:
            self._launch()

    # ---- nodes that die --------------------------------------------------------------------------------

    def lost(self, node: Node) -> None:
        """A node of the allocation has lost power; somebody notices, after a while."""
        if node in self.nodes and self.state in ("configuring", "running", "completing"):
            first = not self.dead
            self.dead.add(node.name)
            if first or self.within:
                soon = self.world.rng.uniform(0.5, 6.0) + 2.5 * self.live
                self.world.network.at(
                    self.world.loop.now + soon + GOES_ON_S * self._spared(), self._requeue, self.restart
                )

    def _requeue(self, restart: int) -> None:
        if restart != self.restart or self.state in ("completed", "completing"):
            return
        if self._rescuing():
            self.world.network.at(self.world.loop.now + 0.2, self._requeue, restart)
            return
        on = self._spared() and self.state == "running" and not self.launches[-1].over
        if on and not self.dead & self.launches[-1].places.keys():
            self.world.tell(f"job {self.number} has gone on without {','.join(sorted(self.dead))}")
            return
        self._end("requeued", "")

    def _rescuing(self) -> bool:
        """Whether an agent says that it copies live state, as the controller hears."""
        seats = [node.seats.get(self.number) for node in self.nodes if node.host.up]
        return any(seat.agent.rescue.busy for seat in seats if seat is not None and seat.agent is not None)

    def _end(self, how: str, exit_code: str) -> None:
        """The script is over: ranks end, epilogs run; a requeued job begins again."""
        self.state = "completing"
        self.world.tell(f"job {self.number} restart {self.restart} is {how}")
        for launch in self.launches:
            launch.over = True
            for rank in launch.ranks.values():
                rank.process.kill()
        for node in self.nodes:
            if node.host.up:
                process = Process(self.world.loop, f"epilog-{self.number}", node.name)
                node.processes.append(process)
                self.world.loop.thread(
                    process,
                    lambda node=node, restart=self.restart: node.epilog(self.number, restart, exit_code),
                    self.world.rng.uniform(0, 0.3),
                )
        if how == "completed":
            self.state = "completed"
            self.on_over()
        else:
            self.world.network.at(self.world.loop.now + self.world.rng.uniform(0.4, 3.0), self._reallocate)

    def _reallocate(self) -> None:
        up = [node for node in self.nodes if node.host.up]
        more = [node for node in self.spares if node.host.up][: self.allocated - len(up)]
        down = [node for node in self.nodes if not node.host.up]
        if len(up) + len(more) < self.allocated:
            self.world.network.at(self.world.loop.now + 1.0, self._reallocate)
            return
        self.spares = [node for node in self.spares if node not in more] + down
        self.nodes = [*up, *more]
        self.restart += 1
        self.dead = set()
        self.start()


def of_training() -> str:
    """The name of the training set of these jobs."""
    return SET
