"""The agents of one job in one thread, as far as recovery rounds go: production `RecoveryRounds`, `RecoveryMember`
and `StateFile`.

Between them a seeded network: links are FIFO, break, lose what is on its way, and come back; agents die between any
two of their effects (a message, a write to the disk) and are started again from what was on disk; a disk may be full;
ranks launch and ask for rounds; clocks go on. No socket, no event loop, no clock: a seed repeats a run to the letter.

After every event: nobody is live before everybody has taken the plan (R4); a round has one plan; epochs only rise; a
plan counts on agents that live or have taken it. After the faults: all agents are live in the same round, which
serves the launch that asked last, within `QUIET_S`.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from gemini_hpc.agent.coordinator import Coordinator
from gemini_hpc.agent.peers.context import AgentContext
from gemini_hpc.agent.peers.identity import AgentIdentity
from gemini_hpc.agent.peers.incarnation import Incarnation
from gemini_hpc.agent.peers.membership import Membership
from gemini_hpc.agent.peers.recovery_round import RecoveryRounds
from gemini_hpc.agent.peers.round_events import AdmitRanks, Begin, Decide, Effect, Heard, Linked, StorePlan, Tick
from gemini_hpc.agent.predecessor import Predecessor
from gemini_hpc.agent.recovery_member import RecoveryMember
from gemini_hpc.agent.replicas.closings import Closings
from gemini_hpc.agent.replicas.pledges import Pledges
from gemini_hpc.agent.replicas.rejections import Rejections
from gemini_hpc.agent.restart_state import StateFile
from gemini_hpc.agent.tier.choice import TierChoice
from gemini_hpc.config import Settings
from gemini_hpc.core import placement
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.slots import Stamp
from gemini_hpc.core.views import View
from gemini_hpc.wire import local, peer, protocol
from gemini_hpc.wire.message import Message
from gemini_hpc.wire.stored import Rejection

JOB, REPLICAS, FANOUT = 7, 2, 2
QUIET_S = 120.0
Edge = tuple[str, str]


class Wrong(AssertionError):
    """What must not happen."""


class Died(BaseException):
    """The agent at work ends here."""


class Disk(StateFile):
    """The state file of one node."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__("")
        self._cluster, self._name = cluster, name

    def _get(self) -> bytes:
        if self._name not in self._cluster.disks:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._cluster.disks[self._name]

    def _put(self, data: bytes) -> None:
        self._cluster.effect(self._name)
        if self._name in self._cluster.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._cluster.disks[self._name] = data
        self._cluster.effect(self._name)

    def _unlink(self) -> None:
        self._cluster.disks.pop(self._name, None)


class Promises(Pledges):
    """The file of one node that outlives incarnations."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        super().__init__("")

    def _get(self) -> bytes:
        if self._name not in self._cluster.promised:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._cluster.promised[self._name]

    def _put(self, data: bytes) -> None:
        self._cluster.effect(self._name)
        self._cluster.promised[self._name] = data
        self._cluster.effect(self._name)


class _Still:
    """A part of the agent that has nothing to do here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Transfers(_Still):
    def __init__(self) -> None:
        self.incoming, self.pulls = _Still(), SimpleNamespace(unreadable=frozenset(), start=lambda orders: None)

    async def cease(self) -> None: ...


class _Sets(_Still):
    def __iter__(self) -> Any:
        return iter(())


class _Store:
    def __init__(self) -> None:
        self.shards, self.parities = dict[Any, Any](), dict[Any, Any]()
        self.held: list[Copy] = []

    def list_all(self) -> list[Any]:
        return []

    async def verify(self) -> list[Copy]:
        return []

    def list_copies(self) -> list[Copy]:
        return self.held


class _Mesh(_Still):
    def __init__(self, send: Callable[[str, Message], bool]) -> None:
        self.ports: dict[str, int] = {}
        self.send = send


class Node:
    """One agent: the production `RecoveryMember`, and around it what its rounds ask for."""

    def __init__(self, cluster: Cluster, name: str, instance: int) -> None:
        self.cluster, self.node, self.instance = cluster, name, str(instance)
        self.identity = AgentIdentity(
            Settings(failure_domains="none"), JOB, 0, name, "/run/gemini-hpc/7", instance > 0, self.instance, port=1
        )
        self.membership = Membership()
        self.store = _Store()
        self.state = Disk(cluster, name)
        pledges = Promises(cluster, name)
        self.rejections = Rejections(pledges, self.log)
        self.jobs: deque[Coroutine[object, object, None]] = deque()
        still: Any = _Still()
        trainings, transfers, spawn = cast(Any, _Sets()), cast(Any, _Transfers()), cast(Any, self.jobs.append)
        tier = TierChoice(self.identity.settings, 0, self.membership)
        context = AgentContext(self.identity, self.membership, cast(Any, self), spawn)
        replicas: Any = SimpleNamespace(
            store=self.store,
            trainings=trainings,
            rejections=self.rejections,
            closings=Closings(self.membership, pledges, self.log),
        )
        parts: Any = SimpleNamespace(saver=still, salvage=still, choice=tier)
        predecessor = Predecessor(context, still)
        coordinator = LoneCoordinator(context, replicas, parts, still, predecessor)
        coordinator.domains.by_host = cluster.domains
        self.member = cluster.member(
            context,
            self.state,
            replicas,
            transfers,
            parts,
            service=still,
            coordinator=coordinator,
            predecessor=predecessor,
        )
        self.member.node = self
        self.rounds = cluster.rounds(name, self.instance, cluster.hosts, tier.accepts, FANOUT)
        self.attach = local.Attach(JOB, 1, ",".join(cluster.hosts), name, REPLICAS)
        mesh: Any = _Mesh(self.send)
        self.incarnation = Incarnation(self.attach, View(cluster.hosts), mesh, self.rounds, self.member.perform)
        self.membership.incarnation = self.incarnation

    def start(self) -> None:
        """As `Agent.attach` does, or after a death `Agent._take_over`."""
        state = self.state.read()
        if state is not None:
            self.member.succeed(self.incarnation, state)
            if self.rounds.stage == "live":
                self.cluster.opened(self)
            return
        self.member.store_attach(self.attach)
        if self.rounds.parent is None:
            self.incarnation.step(Begin(""))

    def send(self, host: str, message: Message) -> bool:
        return self.cluster.send(self.node, host, message)

    def log(self, name: str, *, version: int = 0, detail: str = "", t: float | None = None) -> None:
        self.cluster.events[name] = self.cluster.events.get(name, 0) + 1


class SimulatedMember(RecoveryMember):
    """The production one; it tells the cluster what it has done."""

    node: Node

    def perform(self, incarnation: Incarnation, effect: Effect) -> None:
        node, cluster = self.node, self.node.cluster
        if isinstance(effect, Decide):
            cluster.counted[effect.round] = {(r.host, r.instance) for r in effect.records}
        super().perform(incarnation, effect)
        if isinstance(effect, StorePlan) and not effect.live:
            keep = {(s.name, stamp) for s in effect.plan.trainings for stamp in s.keep}
            node.store.held[:] = [c for c in node.store.held if (c.training, c.stamp) in keep]
            cluster.took(node, effect.plan)
        elif isinstance(effect, AdmitRanks):
            cluster.opened(node, effect.plan)

    def _write_map(self, incarnation: Incarnation, plan: peer.PlanDown) -> None:
        self.node.cluster.effect(self.node.node)


class LoneCoordinator(Coordinator):
    """The production one; nothing is outside of this cluster."""

    async def _search_outside(self, incarnation: Incarnation, order: Decide) -> Decide:
        return order


class Cluster:
    """One run."""

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        rounds: type[RecoveryRounds] = RecoveryRounds,
        member: type[SimulatedMember] = SimulatedMember,
        full: bool = False,
        rejects: bool = False,
    ) -> None:
        """full: one disk has no room now and then; rejects: ranks find what was chosen bad now and then."""
        self.rng = random.Random(seed)
        self.rounds, self.member = rounds, member
        self.hosts = tuple(f"n{i}" for i in range(size))
        self.edges: list[Edge] = [(self.hosts[(i - 1) // FANOUT], self.hosts[i]) for i in range(1, size)]
        self.encoded = seed % 8 == 0
        racks = random.Random(seed ^ 0xD0)  # in every other run it is known who fails together
        self.domains = {host: f"rack{racks.randrange(3)}" for host in self.hosts} if racks.random() < 0.5 else {}
        self.story: list[tuple[str, object]] = []
        self.events: dict[str, int] = {}
        self.disks: dict[str, bytes] = {}
        self.promised: dict[str, bytes] = {}
        self.rejects = rejects
        self.bad: list[tuple[str, Rejection]] = []  # host, and what it has answered that it knows
        self.full: set[str] = set()
        self._may_be_full = self.rng.choice(self.hosts) if full else ""
        self.up: set[Edge] = set()
        self.ways: dict[Edge, deque[Message]] = {}
        self.late: dict[Edge, deque[Message]] = {}  # of a link that has broken: arrives before the next one
        for a, b in self.edges:
            for way in ((a, b), (b, a)):
                self.ways[way], self.late[way] = deque(), deque()
        self.now = 0.0
        self.launch = ""
        self._doomed: tuple[str, int] | None = None
        # what has happened, for the checks
        self.applied = dict.fromkeys(self.hosts, 0)
        self.counted: dict[int, set[tuple[str, str]]] = {}
        self.takers: dict[int, dict[str, str]] = {}
        self.plans: dict[int, peer.PlanDown] = {}
        self.newest = (0, 0)  # round and epoch that were live
        self.instances = dict.fromkeys(self.hosts, 0)
        self.nodes: dict[str, Node] = {}
        for host in self.hosts:
            self._boot(host)

    # ---- the world -------------------------------------------------------------------------------------

    def effect(self, name: str) -> None:
        """Between two effects of an agent: it may die here."""
        if self._doomed is not None and self._doomed[0] == name:
            if not self._doomed[1]:
                self._doomed = None
                raise Died(name)
            self._doomed = name, self._doomed[1] - 1

    def send(self, source: str, target: str, message: Message) -> bool:
        self.effect(source)
        if self._edge(source, target) not in self.up:
            return False
        if self.encoded:
            message = protocol.decoder.decode(protocol.encode(message))
        self.ways[source, target].append(message)
        self.effect(source)
        return True

    def _edge(self, a: str, b: str) -> Edge:
        return (a, b) if self.hosts.index(a) < self.hosts.index(b) else (b, a)

    def _boot(self, name: str) -> None:
        node = self.nodes[name] = Node(self, name, self.instances[name])
        self.instances[name] += 1
        node.start()

    def _cut(self, edge: Edge) -> None:
        """What has been sent may still arrive, up to some place."""
        self.up.discard(edge)
        for way in (edge, edge[::-1]):
            sent = self.ways[way]
            self.late[way] = deque(list(sent)[: self.rng.randint(0, len(sent))])
            sent.clear()

    def _link(self, edge: Edge) -> None:
        self.up.add(edge)
        ends = [edge, edge[::-1]]
        self.rng.shuffle(ends)
        for way in ends:
            self.late[way].clear()
        for me, other in ends:
            if edge in self.up and me in self.nodes:
                self._act(me, lambda me=me, other=other: self.nodes[me].incarnation.step(Linked(other)))  # type: ignore[misc]

    def _crash(self, name: str) -> None:
        for edge in self.edges:
            if name in edge:
                self._cut(edge)
                other = edge[0] if name == edge[1] else edge[1]
                self.late[other, name].clear()
        node = self.nodes.pop(name)
        for job in node.jobs:
            job.close()
        state = Disk(self, name).read()
        kept = state.plan.round if state is not None and state.plan is not None else 0
        if kept > self.applied[name]:  # it died right after it had written this
            self.takers.setdefault(kept, {}).setdefault(name, node.instance)
        # what is not on disk has not happened; where there was no room for it, it has
        self.applied[name] = max(kept, self.applied[name]) if name == self._may_be_full else kept

    def _act(self, name: str, what: Any) -> None:
        try:
            what()
        except Died:
            self.story.append(("died", name))
            self._crash(name)

    # ---- what is checked -------------------------------------------------------------------------------

    def took(self, node: Node, plan: peer.PlanDown) -> None:
        for s in plan.trainings:
            wrong = [r for name, r in self.bad if s.chosen is not None and r.covers(s.name, s.chosen)]
            if wrong:
                raise Wrong(f"rejected: {s.chosen} is chosen in round {plan.round}, which {wrong[0]} covers")
        if unknown := {r for _, r in self.bad} - set(plan.rejected):
            raise Wrong(f"forgotten: {unknown} in the plan of round {plan.round}")
        self.applied[node.node] = plan.round
        self.takers.setdefault(plan.round, {}).setdefault(node.node, node.instance)

    def opened(self, node: Node, plan: peer.PlanDown | None = None) -> None:
        """This agent is live."""
        plan = node.rounds.plan if plan is None else plan
        if plan is None:
            raise Wrong(f"{node.node} is live without a plan")
        late = [h for h in self.hosts if self.applied[h] < plan.round]
        if late:
            raise Wrong(f"R4: {node.node} is live in round {plan.round}, which {late} have not taken")
        if plan.round < self.newest[0] and node.node != self._may_be_full:
            raise Wrong(f"old: {node.node} is live in round {plan.round} after round {self.newest[0]}")
        one = self.plans.setdefault(plan.round, plan)
        if msgspec.structs.replace(plan, step=one.step) != one:
            raise Wrong(f"one plan: round {plan.round} has two")
        if plan.round > self.newest[0]:
            if plan.epoch <= self.newest[1]:
                raise Wrong(f"epoch: {plan.epoch} in round {plan.round}, after {self.newest}")
            self.newest = plan.round, plan.epoch
            gone = set(self.takers[plan.round].items()) - self.counted[plan.round]
            if gone and not self._may_be_full:
                raise Wrong(f"counted: the plan of round {plan.round} does not count on {gone}")

    def settled(self) -> bool:
        """All agents are live in one round, for the launch that asked last."""
        seen = {
            (n.rounds.round, n.rounds.stage, n.rounds.launch if self.launch else self.launch)
            for n in self.nodes.values()
        }
        return len(self.nodes) == len(self.hosts) and len(seen) == 1 and next(iter(seen))[1:] == ("live", self.launch)

    def quiet(self, seconds: float, *, without: str) -> None:
        """No more faults, and this agent, which is not there, does not come back."""
        until = self.now + seconds
        while self.now < until:
            found = [(kind, what) for kind, what in self._choices(faults=False) if (kind, what) != ("boot", without)]
            if found:
                kind, what = self.rng.choice(found)
                self._do(kind, what, faults=False)
            else:
                self._pass()

    def crash(self, name: str) -> None:
        """This agent dies."""
        self._crash(name)

    def _pass(self) -> None:
        """Time, for all of them."""
        for name in self.rng.sample(self.hosts, len(self.hosts)):
            self._do("tick", name, faults=False)

    # ---- events ----------------------------------------------------------------------------------------

    def _choices(self, *, faults: bool) -> list[tuple[str, Any]]:
        chance = self.rng.random
        found: list[tuple[str, Any]] = [("message", w) for w, q in self.ways.items() if q]
        found += [("late", w) for w, q in self.late.items() if q and w[1] in self.nodes]
        found += [("job", h) for h, node in self.nodes.items() if node.jobs]
        found += [("link", e) for e in self.edges if e not in self.up and e[0] in self.nodes and e[1] in self.nodes]
        found += [("boot", h) for h in self.hosts if h not in self.nodes]
        if faults:
            found += [("cut", e) for e in self.edges if e in self.up and chance() < 0.12]
            found += [("crash", h) for h in self.hosts if h in self.nodes and chance() < 0.02]
            if chance() < 0.15:
                found.append(("tick", self.rng.choice(self.hosts)))
            if chance() < 0.06:
                found.append(("launch", f"7.{self.rng.randrange(3)}"))
            if chance() < 0.06:
                found.append(("save", None))
            if self.rejects and chance() < 0.06:
                found.append(("reject", None))
            if self._may_be_full and chance() < 0.1:
                found.append(("disk", self._may_be_full))
        return found

    def _do(self, kind: str, what: Any, *, faults: bool) -> None:
        self.story.append((kind, what))
        name = what[1] if kind in ("message", "late") else what
        if faults and kind in ("message", "late", "job", "boot", "tick") and self.rng.random() < 0.08:
            self._doomed = name, self.rng.randrange(8)
        if kind == "message":
            message = self.ways[what].popleft()
            self._act(name, lambda: self.nodes[name].incarnation.step(Heard(what[0], message)))
        elif kind == "late":
            message = self.late[what].popleft()
            self._act(name, lambda: self.nodes[name].incarnation.step(Heard(what[0], message)))
        elif kind == "job":
            job = self.nodes[name].jobs.popleft()
            self._act(name, lambda: _finish(job))
        elif kind == "link":
            self._link(what)
        elif kind == "cut":
            self._cut(what)
        elif kind == "crash":
            self._crash(what)
        elif kind == "boot":
            self._act(what, lambda: self._boot(what))
        elif kind == "tick":
            self.now += self.rng.random()
            if name in self.nodes:
                self._act(name, lambda: self._tick(name))
        elif kind == "launch":
            self.launch = what
        elif kind == "save":
            self._save()
        elif kind == "reject":
            self._reject()
        elif kind == "disk":
            self.full ^= {what}
        self._doomed = None

    def _tick(self, name: str) -> None:
        node = self.nodes[name]
        node.member.tend()
        linked = {b if a == name else a for a, b in self.up if name in (a, b)}
        node.incarnation.step(Tick(self.now, linked))
        rounds = node.rounds
        if self.launch and rounds.stage == "live" and rounds.launch != self.launch:
            node.incarnation.step(peer.NeedRound(rounds.round, self.launch, again=False))

    def _save(self) -> None:
        """Training goes on where all are live: each holder has a new version."""
        if not self.settled():
            return
        m, n = REPLICAS, len(self.hosts)
        version = self.rng.randrange(1, 100)
        for node in self.nodes.values():
            mine = node.membership.noderanks[node.node]
            for rank in range(n):
                if n > 1 and mine in placement.list_holders(rank, n, m, node.membership.order):
                    copy = Copy("default", rank, n, rank, 64, 64, Stamp(node.membership.epoch, version), "0" * 32)
                    node.store.held = [c for c in node.store.held if c.rank != rank] + [copy]

    def _reject(self) -> None:
        """What all have is bad: some of the ranks come to say so, and a launch follows."""
        held = {c.stamp for node in self.nodes.values() for c in node.store.held}
        if not self.settled() or len(self.bad) > 40 or not held:
            return
        bad = Rejection("default", min(held), Stamp(self.newest[1], 99), "NaN")
        for name in self.rng.sample(self.hosts, self.rng.randint(1, len(self.hosts))):

            def say(name: str = name) -> None:
                self.nodes[name].rejections.learn([bad])
                self.bad.append((name, bad))

            self._act(name, say)
        self.launch = f"7.{self.rng.randrange(3)}r{len(self.bad)}"

    def run(self, faulty: int) -> None:
        """So many events with faults, then until all is well. Raises `Wrong`."""
        for _ in range(faulty):
            found = self._choices(faults=True)
            if found:
                kind, what = self.rng.choice(found)
                self._do(kind, what, faults=True)
        self.story.append(("quiet", None))
        self.full.clear()
        began = self.now
        while True:
            found = self._choices(faults=False)
            if found:
                kind, what = self.rng.choice(found)
                self._do(kind, what, faults=False)
            elif self.settled():
                return
            elif self.now - began > QUIET_S or len(self.story) > 100 * faulty + 20000:
                raise Wrong(f"stuck: {self.picture()}")
            else:
                self._pass()

    def picture(self) -> dict[str, tuple[int, str, str, str]]:
        """Where each agent is, and why."""
        rounds = {h: n.rounds for h, n in self.nodes.items()}
        return {h: (r.round, r.stage, r.launch, r.trouble) for h, r in rounds.items()}


def _finish(job: Coroutine[object, object, None]) -> None:
    try:
        job.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something that is not here")


def campaign(
    size: int, seeds: Iterable[int], faulty: int, *, until: frozenset[str] = frozenset("none"), **options: Any
) -> dict[str, list[int]]:
    """What went wrong: kind -> seeds. until: kinds after which nobody wants to know more."""
    found: dict[str, list[int]] = {}
    for seed in seeds:
        if until <= found.keys():
            break
        cluster: Cluster | None = None
        try:
            cluster = Cluster(size, seed, **options)
            cluster.run(faulty)
        except Wrong as exc:
            found.setdefault(str(exc).split(":")[0], []).append(seed)
        finally:
            for node in cluster.nodes.values() if cluster is not None else ():
                for job in node.jobs:
                    job.close()
    return found
