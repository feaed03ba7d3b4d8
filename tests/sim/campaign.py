"""One seed: a job, faults, and what must hold whatever happens.

Faults end after a while; then the job has to come to its end, and everything it held is to be free.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial

from gemini_hpc.agent.daemon import Agent
from gemini_hpc.config import Settings
from gemini_hpc.core import placement

from . import invariants
from .jobs import Job, Wrong
from .kernel import Killed, Stuck
from .node import Node
from .system import World, install, story
from .verbs import Devices

JOB = 7
FAULTS_S = 12.0
SETTLE_S, MORE_STEPS, UNSEALED = 5.0, 30, 4
AFTER_STEP_S = 0.06  # in which a version is on its way
_TOLD_S = 0.035  # what homes tell has come by then, and no rank has gone on
LIVELY_S = 240.0
QUIET_S = 30.0
_DAMAGED = 0.005  # of the chunks that are pushed


class Campaign:
    """One run."""

    def __init__(
        self,
        seed: int,
        *,
        spared: bool = False,
        live: bool = False,
        xor: bool = False,
        miscounts: bool = False,
        rdma: bool = False,
    ) -> None:
        """spared: the job has spares of its own; live: its ranks are replicas of each other, and whole groups die;
        xor: its nodes keep parity; miscounts: now and then a rank means another iteration by a version; rdma: agents
        have devices for RDMA."""
        self.seed = seed
        self.world = World(seed)
        install(self.world)
        self.world.damaged = _DAMAGED
        rng = self.rng = random.Random(seed ^ 0x5EED)
        size, spares = (rng.randint(3, 6), 4) if live else (rng.randint(2, 5), rng.randint(0, 2))
        settings = self.settings = Settings(
            cluster_name="sim",
            memory_floor_bytes=0,
            attach_timeout_s=5.0,
            retention_s=120.0,
            failure_domains="/domains" if seed % 2 else "none",
            rdma="auto" if rdma else "off",
        )
        nodes = [Node(self.world, f"n{i}", settings) for i in range(1, size + spares + 1)]
        self.nodes = {node.name: node for node in nodes}
        racks = random.Random(seed ^ 0xD0)
        self.world.domains = {f"n{i}": f"rack{racks.randrange(3)}" for i in range(1, 16)}
        replicas = min(size, rng.choice((2, 3, 3, 4) if xor else (1, 2, 2, 2, 3)))
        replicas = max(2, replicas) if rdma else replicas
        parity = (2 if seed % 2 and replicas > 2 else 1) if xor else 0
        within = rng.randint(1, 2) if spared else 0
        nodes += [Node(self.world, f"n{len(nodes) + i}", settings) for i in range(1, within + 1)]
        self.nodes = {node.name: node for node in nodes}
        self.job = Job(
            self.world,
            JOB,
            nodes[: size + within],
            nodes[size + within :],
            replicas=replicas,
            pause_s=max(0.2 if live else 0.0, rng.choice((0.05, 0.2, 0.3))),  # see _TOLD_S
            within=within,
            live=live,
            parity=parity,
        )
        self._live = live
        if miscounts:
            self.job.means = self._means
        self.job.on_over = self._over
        self.job.on_step = self._stepped
        self._due: list[Callable[[], None]] = []  # faults that wait for a version to be on its way
        self.problem: BaseException | None = None
        self.finished_at = 0.0
        self.faults: list[tuple[float, str]] = []
        self.losses = 0
        self._armed: dict[str, list[Callable[[Node], None]]] = {}  # by marked point: faults that wait for it
        self.truth = invariants.Truth(self._agents, lambda text: self._fail(Wrong(text)), self._at_point)
        invariants.install(self.truth)
        self.devices = Devices(self.world, self._agents, lambda text: self._fail(Wrong(text))) if rdma else None
        for node in nodes:
            node.on_death = self.truth.died

    def _agents(self) -> Iterator[Agent]:
        for node in self.nodes.values():
            seat = node.seats.get(JOB)
            if seat is not None and seat.agent is not None:
                yield seat.agent

    # ---- running ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises what went wrong."""
        loop = self.world.loop
        loop.after_turn = self._look
        self.job.start()
        self._draw_faults()
        try:
            loop.run_forever()
        except Stuck:
            raise Wrong("nothing happens any more") from None
        if self.problem is not None:
            raise self.problem

    def _means(self, rank: int, version: int) -> int:
        """Put one rank an iteration ahead of the others for some versions, until faults end."""
        drawn = random.Random(self.seed * 1000 + version // 6)
        odd, first, last = drawn.randrange(self.job.size), drawn.randint(0, 5), drawn.randint(0, 5)
        return version + (rank == odd and first <= version % 6 <= last and not self._calm)

    def _quiet(self) -> None:
        """Faults are over, and their effects have had time to show: some steps more, which have to be protected."""
        self._calm, self.world.damaged = True, 0.0
        self.job.steps = self.job.trained + MORE_STEPS
        self._tell(f"none any more; the last step is {self.job.steps}")
        self._at(LIVELY_S, self._late)

    def _late(self) -> None:
        if self.job.state != "completed":
            self._fail(Wrong(f"liveness: {LIVELY_S:g} s after the last fault the job is {self.job.state}"))

    def _over(self) -> None:
        self.finished_at = self.world.loop.now
        last = self.job.launches[-1]
        if last.step not in self.job.unprotected and self.job.sealed < self.job.steps - UNSEALED:
            self._fail(Wrong(f"protection: sealed {self.job.sealed} of {self.job.steps}, though the faults are over"))
        # a rank that had given its protection up does not tell of its success: then the memory is kept for a while
        told = last.step not in self.job.unprotected
        self._at(QUIET_S + (0.0 if told else self.settings.retention_s), self._all_free)

    def _all_free(self) -> None:
        held = [
            f"{node.name}: {seat.agent}" for node in self.nodes.values() for seat in node.seats.values() if seat.agent
        ]
        if held and not self._cut_off():
            self._fail(Wrong(f"held after the job's success: {held}"))
        self.world.loop.stop()

    def _cut_off(self) -> bool:
        return False

    def _fail(self, problem: BaseException) -> None:
        self.problem = self.problem or problem
        self.world.loop.stop()

    def _look(self) -> None:
        """After every turn."""
        for _, text in self.world.story[self._seen :]:
            if "FAILED" in text or " error v" in text:
                self._fail(Wrong(f"production code failed: {text}"))
        self._seen = len(self.world.story)

    _calm = False
    _seen = 0
    _last = 0.0

    # ---- faults ----------------------------------------------------------------------------------------

    def _draw_faults(self) -> None:
        kinds: list[Callable[[], None]] = [
            self._kill_agent,
            self._kill_agent,
            self._cut,
            self._cut_one_way,
            self._slow,
            self._power,
            self._pause,
            self._pause_rank,
            self._kill_rank,
            self._no_munge,
            self._disk_full,
            self._damage,
            self._cut_and_fail,
            self._cut_and_fail,
            self._damage_and_fail,
            self._fail_and_lose,
            self._fail_and_lose,
            self._root_dies_alone,
            self._root_forgets,
            *[self._arm] * 6,
        ]
        self._alone = self._live and self.rng.random() < 0.5  # nothing else happens
        moves = random.Random(self.seed ^ 0x306E)
        if self.job.within and self.seed % 4 == 1:
            self._at(moves.uniform(1.0, FAULTS_S), lambda: self._split(moves))
        if self.job.within and not self._live and self.seed % 4 == 3:
            self.job.leaves = True
            self._alone = self.job.moves = moves.random() < 0.7
            self.job.pause_s = min(self.job.pause_s, 0.05) if self._alone else self.job.pause_s
            at = moves.uniform(0.5, FAULTS_S)
            self._at(at, lambda: self._move(moves))
        if self._live:
            self._at(self.rng.uniform(1.0, 4.0), self._arm_group)
        if self._alone:
            self._last = self.world.loop.now + FAULTS_S
            self._at(FAULTS_S, self._wait)
            return
        mine = self.rng.sample(kinds, self.rng.randint(1, len(kinds)))
        for _ in range(self.rng.randint(0, 10)):
            fault = self.rng.choice(mine)
            while_saving = self.rng.random() < 0.6
            self._at(
                self.rng.uniform(0.0, FAULTS_S), (lambda f=fault: self._due.append(f)) if while_saving else fault
            )
        self._last = self.world.loop.now + FAULTS_S
        self._at(FAULTS_S, self._wait)

    def _wait(self) -> None:
        self._due.clear()
        self._armed.clear()
        self._at(self._last - self.world.loop.now + SETTLE_S, self._quiet)

    def _stepped(self) -> None:
        for fault in self._due:
            self._at(self.rng.uniform(0.0, AFTER_STEP_S), fault)
        self._due.clear()

    def _at(self, after_s: float, what: Callable[[], None]) -> None:
        self.world.network.at(self.world.loop.now + after_s, what)

    def _some(self) -> Node:
        return self.rng.choice(self.job.nodes)

    def _tell(self, text: str) -> None:
        self.world.tell(f"FAULT {text}")

    def _kill_agent(self) -> None:
        node, within = self._some(), self.rng.choice((0, 1, 3, 10, 30, 100, 300))
        self._tell(f"agent on {node.name} dies within {within} turns")
        node.kill_agent(JOB, within)

    def _ends(self, after_s: float, what: Callable[[], None]) -> None:
        self._last = max(self._last, self.world.loop.now + after_s)
        self._at(after_s, what)

    def _cut(self) -> None:
        a, b = self.rng.sample([node.name for node in self.nodes.values()], 2)
        lasts = self.rng.choice((0.2, 1.0, 3.0, 8.0))
        self._tell(f"link {a} {b} is cut for {lasts} s")
        self.world.network.cut(a, b)
        self._ends(lasts, lambda: self._heal(a, b))

    def _cut_one_way(self) -> None:
        a, b = self.rng.sample([node.name for node in self.nodes.values()], 2)
        lasts = self.rng.choice((0.2, 1.0, 3.0, 8.0))
        self._tell(f"link {a} to {b} is cut for {lasts} s")
        self.world.network.cut(a, b, both=False)
        self._ends(lasts, lambda: self._heal(a, b))

    def _split(self, rng: random.Random) -> None:
        """The nodes are two networks for a while."""
        names = [node.name for node in self.job.nodes]
        rng.shuffle(names)
        at, lasts = rng.randrange(1, len(names)), rng.choice((1.0, 4.0, 8.0))
        self._tell(f"{', '.join(names[:at])} and the others do not reach each other for {lasts} s")
        pairs = [(a, b) for a in names[:at] for b in names[at:]]
        for a, b in pairs:
            self.world.network.cut(a, b)
        for a, b in pairs:
            self._ends(lasts, partial(self.world.network.mend, a, b))

    def _heal(self, a: str, b: str) -> None:
        self._tell(f"link {a} {b} is back")
        self.world.network.mend(a, b)

    def _slow(self) -> None:
        node, lasts, much = self._some(), self.rng.choice((1.0, 4.0)), self.rng.choice((0.02, 0.2, 0.8))
        self._tell(f"{node.name} is slow by {much} s for {lasts} s")
        self.world.network.slow_s[node.name] = much
        self._ends(lasts, lambda: self.world.network.slow_s.pop(node.name, None))

    def _power(self, node: Node | None = None) -> None:
        node = node or self._some()
        if not node.host.up:
            return
        self._tell(f"power cut of {node.name}")
        self.losses += 1
        node.power_off()
        self.job.lost(node)
        self._ends(self.rng.uniform(1.0, 15.0), node.power_on)

    def _arm_group(self) -> None:
        """All holders of a shard lose power, at the next moment at which every rank stands at a sealed version; or at
        one of which those who have its tensors know all the rest, which must be enough."""
        if self._alone:
            self.job.on_all_outlined = self._lose_group
        else:
            self.job.on_all_sealed = lambda: self._lose_group(0)

    def _lose_group(self, version: int) -> None:
        self.job.on_all_sealed, self.job.on_all_outlined = lambda: None, lambda version: None
        if not self.job.holders:
            self._arm_group()  # nothing was sealed yet
            return
        lost = {node.name: node for node in self.rng.choice(sorted(self.job.holders.items()))[1]}
        for node in self.job.nodes[1:]:  # and some more
            if self.rng.random() < 0.2:
                lost[node.name] = node
        if self._lives(set(lost)) and self._alone:
            self.job.stood_at = version
        self._at(_TOLD_S if version else 0.0, lambda: [self._power(node) for node in lost.values()])

    def _lives(self, lost: set[str]) -> bool:
        """Whether of each shard a holder is left, or a node that knows all of it but the tensors."""
        n, m, nodes = self.job.size, min(self.job.replicas, self.job.size), self.job.launches[-1].places
        gone = {nodes[name] for name in lost if name in nodes}
        order = next((a.membership.order for a in self._agents() if a.membership.nodes == n), placement.AS_RANKED)
        knowing = (
            {*placement.list_holders(h, n, m, order), *placement.choose_others(h, n, m, range(n), order=order)}
            for h in range(n)
        )
        return all(known - gone for known in knowing)

    def _move(self, rng: random.Random) -> None:
        """The job is to leave a node; any other agent may be told of it."""
        node = rng.choice(self.job.nodes)
        seats = [other.seats.get(JOB) for other in self.job.nodes if other is not node]
        told = [seat for seat in seats if seat is not None and seat.process is not None and seat.agent is not None]
        if told:
            seat = rng.choice(told)
            why_not = seat.process.context.copy().run(seat.agent.move_off, [node.name])
            self._tell(f"the job is to leave {node.name}: {why_not or seat.agent.identity.node}")

    def _pause(self) -> None:
        node, lasts = self._some(), self.rng.choice((0.1, 0.7, 2.0, 5.0))
        seat = node.seats.get(JOB)
        if seat is None or seat.process is None or not seat.process.alive:
            return
        process = seat.process
        self._tell(f"agent on {node.name} is stopped for {lasts} s")
        process.stop()
        self._ends(lasts, process.resume)

    def _pause_rank(self) -> None:
        """All others wait for it, in a step or for its vote; nobody is called dead for that."""
        launch = self.job.launches[-1] if self.job.launches else None
        if launch is None or launch.over:
            return
        rank, lasts = self.rng.choice(sorted(launch.ranks)), self.rng.choice((0.1, 0.7, 2.0, 5.0))
        self._tell(f"rank {rank} is stopped for {lasts} s")
        process = launch.ranks[rank].process
        process.stop()
        self._ends(lasts, process.resume)

    def _kill_rank(self) -> None:
        launch = self.job.launches[-1] if self.job.launches else None
        if launch is None or launch.over:
            return
        rank = self.rng.choice(sorted(launch.ranks))
        self._tell(f"rank {rank} is killed")
        launch.ranks[rank].process.kill()
        self.job.rank_died(launch)

    def _damage(self, node: Node | None = None) -> None:
        """A bit flips in a copy that is complete."""
        node = node or self._some()
        seat = node.seats.get(JOB)
        shards = seat.agent.store.list_all() if seat is not None and seat.agent is not None else []
        found = [(shard, i) for shard in shards for i in (0, 1) if shard.pair.slots[i].state == "complete"]
        if not found:
            return
        shard, index = self.rng.choice(found)
        self._tell(f"a bit flips on {node.name} in {shard.pair.slots[index].stamp} of shard {shard.rank}")
        at = self.rng.randrange(shard.pair.slots[index].bytes_used)
        byte = os.pread(shard.memory[index].fd, 1, at)
        os.pwrite(shard.memory[index].fd, bytes([byte[0] ^ 1]), at)
        node.lost_at = self.world.loop.now

    def _cut_and_fail(self) -> None:
        """Nothing can be sealed for a while, and then the launch fails: what was sealed before has to be there."""
        if len(self.job.nodes) > 1:
            a, b = self.rng.sample([node.name for node in self.job.nodes], 2)
            lasts = self.rng.uniform(2.5, 6.0)
            self._tell(f"link {a} {b} is cut for {lasts:.1f} s, in which a rank will fail")
            self.world.network.cut(a, b)
            self._at(self.rng.uniform(1.0, lasts), self._kill_rank)
            self._ends(lasts, lambda: self._heal(a, b))

    def _fail_and_lose(self) -> None:
        """A version that not all holders have is chosen, and one that has it loses power before it is sealed."""
        if len(self.job.nodes) > 1:
            a, b = self.rng.sample([node.name for node in self.job.nodes], 2)
            self._tell(f"link {a} {b} is cut for a moment, in which a rank will fail, and then a node")
            self.world.network.cut(a, b)
            self._ends(0.6, lambda: self._heal(a, b))
            self._at(self.rng.uniform(0.2, 0.6), self._kill_rank)
            point = self.rng.choice(("planned", "acknowledged", "go", "live", "begun"))
            self._at(0.61, lambda: self._armed.setdefault(point, []).insert(0, self._power_here))

    def _damage_and_fail(self) -> None:
        """A bit flips after a copy is complete, and before the next recovery."""
        self._damage()
        self._at(self.rng.uniform(0.0, 0.1), self._kill_rank)

    def _root_forgets(self) -> None:
        """A copy is damaged on the root's node, whose agent dies then: its successor has one version less."""
        root = self.nodes[self.job.names[0]]
        self._damage(root)
        self._at(self.rng.choice((0.0, 0.02, 0.1)), lambda: self._dies_here(root))

    def _root_dies_alone(self) -> None:
        """The root's agent dies while a version is on its way that others will not have: its successor is told of it
        by its own ranks first."""
        root, *others = self.job.names
        if len(others) > 1:
            a, b = self.rng.sample(others, 2)
            self._tell(f"link {a} {b} is cut for 4 s, and the agent on {root} will die")
            self.world.network.cut(a, b)
            self._ends(4.0, lambda: self._heal(a, b))
            self._at(self.rng.uniform(0.0, 0.5), lambda: self._dies_here(self.nodes[root]))

    def _arm(self) -> None:
        """A fault at the next time that somebody comes to a marked point, and sometimes one more soon after it."""
        point = self.rng.choice(invariants.POINTS)
        faults = self.rng.choices(
            (self._dies_here, self._cut_here, self._rank_dies_here, self._power_here), (6, 4, 2, 1), k=2
        )
        self._armed.setdefault(point, []).extend(faults[: self.rng.randint(1, 2)])
        if point in invariants.RECOVERING and self.rng.random() < 0.7:
            self._at(self.rng.uniform(0.0, 1.0), self._kill_rank)

    def _at_point(self, point: str, host: str) -> None:
        if self._armed.get(point) and (node := self.nodes.get(host)) is not None and node in self.job.nodes:
            self._tell(f"{host} is at the point: {point}")
            self._armed[point].pop(0)(node)

    def _dies_here(self, node: Node) -> None:
        self._tell(f"agent on {node.name} dies at once")
        node.kill_agent(JOB, 0)

    def _cut_here(self, node: Node) -> None:
        other = self.rng.choice([name for name in self.nodes if name != node.name])
        lasts = self.rng.choice((0.2, 1.0, 3.0))
        self._tell(f"link {node.name} {other} is cut for {lasts} s")
        self.world.network.cut(node.name, other)
        self._ends(lasts, lambda: self._heal(node.name, other))

    def _rank_dies_here(self, node: Node) -> None:
        self._at(0.0, self._kill_rank)

    def _power_here(self, node: Node) -> None:
        self._at(0.0, self._power if self.rng.random() < 0.5 else lambda: self._power(node))

    def _no_munge(self) -> None:
        node, lasts = self._some(), self.rng.choice((0.5, 3.0))
        self._tell(f"munged on {node.name} does not answer for {lasts} s")
        self.world.munged.add(node.name)
        self._ends(lasts, lambda: self.world.munged.discard(node.name))

    def _disk_full(self) -> None:
        node, lasts = self._some(), self.rng.choice((0.5, 3.0))
        self._tell(f"the job's directory on {node.name} is full for {lasts} s")
        self.world.full.add(node.name)
        self._ends(lasts, lambda: self.world.full.discard(node.name))


def run_spared(seed: int, broken: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """The same of a job that has spares of its own."""
    return run(seed, broken, spared=True)


def run_live(seed: int, broken: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """The same of a job whose ranks are replicas of each other."""
    return run(seed, broken, live=True)


def run_xor(seed: int, broken: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """The same of a job whose nodes keep parity, now and then with spares of its own."""
    return run(seed, broken, xor=True, spared=seed % 3 == 0)


def run_miscounting(seed: int, broken: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """The same of a job whose ranks do not mean the same iteration by each version, sometimes with parity."""
    return run(seed, broken, miscounts=True, xor=seed % 3 == 0)


def run_rdma(seed: int, broken: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """The same of agents with devices for RDMA, sometimes with spares of their job's own."""
    return run(seed, broken, rdma=True, spared=seed % 4 == 1)


def run(
    seed: int,
    broken: Callable[[], None] = lambda: None,
    *,
    spared: bool = False,
    live: bool = False,
    xor: bool = False,
    miscounts: bool = False,
    rdma: bool = False,
) -> tuple[str, str]:
    """(what went wrong or "", the story) of one seed. Only once in a process. broken: breaks the code on purpose."""
    broken()
    campaign = Campaign(seed, spared=spared, live=live, xor=xor, miscounts=miscounts, rdma=rdma)
    try:
        campaign.run()
    except (Exception, Killed) as error:
        return f"{type(error).__name__}: {error}", story(campaign.world)
    finally:
        for node in campaign.nodes.values():
            node.clear()
    return "", story(campaign.world)
