"""A job under the commit rules, in miniature: agents, trainers, a network, crashes and recoveries.

The agents run the production rules (`slots`, `votes`, `recovery_plan`, `node_ranks`, `placement`); the rest is the
least that can drive them. What a rank holds at a stamp is a chain of salts, one per run and step, so that two
lineages never look alike, as they would in a deterministic training run.

`weak` names rules to break on purpose: a test that cannot find the harm is not a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations

from gemini_hpc.core.copy import Copy as CopyInfo
from gemini_hpc.core.placement import holders, holds_for, survivable
from gemini_hpc.core.recovery_plan import (
    Inventory,
    Pull,
    RecoveryPlan,
    SetPlan,
    first_epoch,
    plan,
)
from gemini_hpc.core.slots import Refused, SlotPair, Stamp
from gemini_hpc.core.votes import Decision, Root, Subtree, Vote, children, merge, parent, vote_of

SKIPPED = 5  # versions of which a trainer may skip one
FANOUT = 2  # so that five agents already make a tree with an inner node

WEAKNESSES = {
    "no-seal-asked": "R1: a slot is recycled although the other is not sealed",
    "votes-not-kept": "R1: a voted slot is recycled before the word",
    "vote-any": "R2: an agent votes for what is complete in some pair, not in all",
    "step-unsealed": "R2: the optimizer steps without waiting for the seal",
    "drop-suspect": "R3: a suspected holder's vote is not waited for",
    "no-abandon": "R2: the root never abandons",
    "no-void": "R4: nothing is voided at recovery",
    "void-fallback": "R4: an unsealed chosen version is kept alone",
    "chosen-is-sealed": "R4: an unsealed chosen version counts as sealed",
    "same-epoch": "R4: the epoch is not raised",
    "epoch-forgotten": "R4: nobody is left who knows the last epoch, and the restart count is not asked",
    "no-freeze": "R4: agents go on in the old epoch after giving their inventory",
    "take-all": "R6: messages of other epochs are taken",
}


class Violation(AssertionError):
    """A promise of the protocol is broken."""


@dataclass
class Agent:
    host: str
    epoch: int = -1
    position: int = -1
    frozen: bool = False
    noderanks: dict[str, int] | None = None
    map_restart: int = -1
    pairs: dict[int, SlotPair] = field(default_factory=dict)
    guests: dict[int, list[CopyInfo]] = field(default_factory=dict)  # copies that are no longer ours to hold
    incoming: dict[int, str] = field(default_factory=dict)  # what is landing in the filling slot, per rank
    pulls: dict[int, Pull] = field(default_factory=dict)
    sealed: Stamp | None = None  # as the trainers see it
    abandoned: frozenset[Stamp] = frozenset()
    voted: frozenset[Stamp] = frozenset()
    tree: Subtree | None = None
    restarted: bool = False

    def holds(self, rank: int, stamp: Stamp) -> str | None:
        """Content of a complete copy."""
        pair = self.pairs.get(rank)
        if pair is not None and stamp in pair.complete_stamps():
            index = pair.find(stamp)
            assert index is not None
            return pair.slots[index].digest
        return next((copy.digest for copy in self.guests.get(rank, ()) if copy.stamp == stamp), None)


@dataclass
class Trainer:
    rank: int
    host: str
    epoch: int
    stamp: Stamp
    chain: str
    started: int
    salt: int
    skipped: Stamp | None = None


@dataclass(frozen=True)
class Message:
    kind: str  # "vote", "word" or "copy"
    source: str
    dest: str
    epoch: int
    body: Vote | Decision | tuple[int, Stamp, str]


class World:
    """`patience`: how many versions past its last seal a rank goes on when the wait for a seal runs out."""

    def __init__(self, N: int, m: int, per_node: int, *, patience: int = 0, weak: Iterable[str] = ()) -> None:
        self.N, self.m, self.patience = N, m, patience
        self.weak = frozenset(weak)
        assert self.weak <= WEAKNESSES.keys()
        self.home = [rank // per_node for rank in range(N * per_node)]
        self.agents: dict[str, Agent] = {}
        self.away: set[str] = set()  # suspected: alive, but outside what the job can reach
        self.ignored: set[str] = set()
        self.trainers: dict[int, Trainer] = {}
        self.net: list[Message] = []
        self.hosts: list[str] = []
        self.epoch = -1
        self.restart = -1
        self.phase = "down"
        self.unacknowledged: set[str] = set()
        self.set_plan: SetPlan | None = None
        self.lost: set[int] = set()  # node ranks whose copies are gone and not yet sealed anew
        self.forgiven = False  # more was lost than m replicas allow
        self.guaranteed: Stamp | None = None
        self.completed = 0
        self.counted = 0  # the epoch in which the job last began from nothing
        self.ungated = False  # since some rank stepped without a seal, and until sealing has caught up
        self.ledger: dict[Stamp, set[str]] = {}  # what any training run had at a stamp
        self.said_sealed: set[Stamp] = set()
        self.said_abandoned: set[Stamp] = set()
        self.births = 0
        self.recoveries = 0
        self.recover(lambda hosts: hosts)

    # ---- what may happen next ------------------------------------------------------------------------------

    def events(self) -> list[tuple[str, Callable[[], object]]]:
        """Everything that may happen now without a fault; a message may also be lost or doubled."""
        found: list[tuple[str, Callable[[], object]]] = [
            (f"{host} acknowledges", partial(self.acknowledge, host)) for host in sorted(self.unacknowledged)
        ]
        found += [(f"rank {t.rank} steps", partial(self.step, t)) for t in self.trainers.values() if self.may_step(t)]
        found += [
            (f"{host} begins {trainer.rank}@{trainer.stamp}", partial(self.begin, host, trainer))
            for trainer, host in self.copies_to_begin()
        ]
        found += [
            (f"rank {trainer.rank} skips {trainer.stamp}", partial(self.skip, host, trainer))
            for trainer, host in self.copies_to_begin()
            if host == trainer.host and trainer.stamp.version % SKIPPED == 0
        ]
        for agent in self.agents.values():
            if agent.frozen:
                continue
            for rank in sorted(agent.incoming):
                found.append((f"{agent.host} completes {rank}", partial(self.complete, agent, rank)))
            for rank in sorted(agent.pulls):
                found.append((f"{agent.host} pulls {rank}", partial(self.pull, agent, rank)))
            if agent.tree is not None:
                found.append((f"{agent.host} votes", partial(self.vote, agent)))
        for message in self.net[-12:]:
            found.append((f"{message.kind} {message.source}>{message.dest}", partial(self.deliver, message)))
        return found

    def copies_to_begin(self) -> Iterator[tuple[Trainer, str]]:
        for trainer in self.trainers.values():
            if trainer.stamp.version > trainer.started:
                for host in self.keepers(trainer.rank):
                    if self.accepts(host, trainer.epoch) and self.wants(host, trainer):
                        yield trainer, host

    def settle(self, rounds: int) -> None:
        """Let everything that can happen happen, in turn, without faults."""
        for _ in range(rounds):
            for host in sorted(self.unacknowledged):
                self.acknowledge(host)
            for trainer in list(self.trainers.values()):
                if self.may_step(trainer, patient=True):
                    self.step(trainer)
            for trainer, host in list(self.copies_to_begin()):
                self.begin(host, trainer)
            members = sorted((a for a in self.agents.values() if not a.frozen), key=lambda a: -a.position)
            for agent in members:
                for rank in sorted(agent.pulls):
                    self.pull(agent, rank)
                for rank in sorted(agent.incoming):
                    self.complete(agent, rank)
            for agent in members:
                self.vote(agent)
                self.flush()
            self.flush()

    def flush(self) -> None:
        while self.net:
            self.deliver(self.net[0])

    # ---- training -------------------------------------------------------------------------------------------

    def keepers(self, rank: int) -> Iterator[str]:
        by_rank = {node_rank: host for host, node_rank in self.noderanks.items()}
        for holder in holders(self.home[rank], self.N, self.m):
            yield by_rank[holder]

    def accepts(self, host: str, epoch: int) -> bool:
        agent = self.agents.get(host)
        return agent is not None and not agent.frozen and (agent.epoch == epoch or "take-all" in self.weak)

    def wants(self, host: str, trainer: Trainer) -> bool:
        pair = self.agents[host].pairs.get(trainer.rank)
        if pair is None or trainer.skipped == trainer.stamp:  # what it has told that it skips it never begins
            return False
        return pair.floor is None or pair.floor < trainer.stamp

    def skip(self, host: str, trainer: Trainer) -> None:
        """The trainer goes past this version without saving it."""
        self.agents[host].pairs[trainer.rank].pass_over(trainer.stamp)
        trainer.skipped = trainer.stamp
        self.check()

    def may_step(self, trainer: Trainer, *, patient: bool = False) -> bool:
        version = trainer.stamp.version
        if len(self.trainers) < len(self.home):
            return False
        if any(t.epoch != trainer.epoch or t.stamp.version < version for t in self.trainers.values()):
            return False
        agent = self.agents.get(trainer.host)
        if agent is None:
            return False
        if version == 0 or "step-unsealed" in self.weak:
            return True
        if (agent.sealed is not None and agent.sealed >= trainer.stamp) or trainer.skipped == trainer.stamp:
            return True
        if trainer.stamp in agent.abandoned:
            return True  # there is nothing to wait for
        sealed = 0 if agent.sealed is None else agent.sealed.version
        return not patient and version - sealed < self.patience

    def step(self, trainer: Trainer) -> None:
        agent = self.agents[trainer.host]
        version = trainer.stamp.version
        if version and (agent.sealed is None or agent.sealed < trainer.stamp) and "step-unsealed" not in self.weak:
            self.ungated = True
        trainer.stamp = Stamp(trainer.epoch, version + 1)
        trainer.chain = f"{trainer.chain}>{trainer.salt}.{version + 1}"
        if trainer.epoch >= self.counted:
            self.completed = max(self.completed, version + 1)
        self.ledger.setdefault(trainer.stamp, set()).add(trainer.chain)
        self.check()

    def begin(self, host: str, trainer: Trainer) -> None:
        self.offer(self.agents[host], trainer.rank, trainer.stamp, trainer.chain)

    def offer(self, agent: Agent, rank: int, stamp: Stamp, content: str) -> bool:
        pair = agent.pairs[rank]
        sealed, voted = agent.sealed, agent.voted
        if "no-seal-asked" in self.weak:
            sealed = max(pair.complete_stamps(), default=None)
        if "votes-not-kept" in self.weak:
            voted = frozenset()
        try:
            pair.begin(stamp, sealed, agent.abandoned, voted=voted)
        except Refused:
            return False
        if rank in agent.pulls and pair.find(agent.pulls[rank].shard.stamp) is None:
            del agent.pulls[rank]
        agent.incoming[rank] = content
        self.check()
        return True

    def complete(self, agent: Agent, rank: int) -> None:
        pair = agent.pairs[rank]
        content = agent.incoming.pop(rank)
        for index, slot in enumerate(pair.slots):
            if slot.state == "filling" and slot.stamp is not None and slot.stamp == pair.high:
                pair.complete(index, slot.stamp, content, 1)

    # ---- sealing --------------------------------------------------------------------------------------------

    def members(self, agent: Agent) -> list[str]:
        assert agent.noderanks is not None
        return sorted(agent.noderanks, key=agent.noderanks.__getitem__)

    def vote(self, agent: Agent) -> None:
        if agent.tree is None:
            return
        own = vote_of(agent.pairs.values(), expected=len(agent.pairs))
        if "vote-any" in self.weak:
            own = Vote(own.seen, own.seen, own.floor, own.kept)
        agent.voted |= own.complete
        agent.tree.update(agent.host, own)
        members = self.members(agent)
        up = parent(agent.position, FANOUT)
        if up is not None:
            self.net.append(Message("vote", agent.host, members[up], agent.epoch, self.merged(agent)))
            return
        assert isinstance(agent.tree, Root)
        if "drop-suspect" in self.weak:
            agent.tree._sealed = max(
                (*self.merged(agent).complete, *filter(None, [agent.tree._sealed])), default=None
            )
        word = agent.tree.word()
        if "no-abandon" in self.weak:
            word = Decision(word.sealed)
        self.note_word(agent, word)
        self.hear(agent, word)

    def merged(self, agent: Agent) -> Vote:
        assert agent.tree is not None
        if "drop-suspect" in self.weak:
            return merge(vote for member, vote in agent.tree._votes.items() if member not in self.ignored)
        return agent.tree.vote()

    def hear(self, agent: Agent, word: Decision) -> None:
        if word.sealed is not None and (agent.sealed is None or word.sealed > agent.sealed):
            agent.sealed = word.sealed
        agent.abandoned = word.abandoned
        members = self.members(agent)
        for child in children(agent.position, len(members), FANOUT):
            self.net.append(Message("word", agent.host, members[child], agent.epoch, word))

    def deliver(self, message: Message, *, keep: bool = False) -> None:
        if not keep:
            self.net.remove(message)
        agent = self.agents.get(message.dest)
        if (
            agent is None
            or agent.tree is None
            or agent.frozen
            or (agent.epoch != message.epoch and "take-all" not in self.weak)
        ):
            return
        if isinstance(message.body, Vote):
            if agent.tree is not None and message.source in agent.tree.members:
                agent.tree.update(message.source, message.body)
        elif isinstance(message.body, Decision):
            self.hear(agent, message.body)
        else:
            rank, stamp, content = message.body
            if rank in agent.pairs and self.offer(agent, rank, stamp, content):
                self.complete(agent, rank)

    def lose(self, message: Message) -> None:
        self.net.remove(message)

    def delay_copy(self, trainer: Trainer, host: str) -> None:
        """A copy that is sent now, and lands who knows when."""
        if trainer.stamp.version > trainer.started:
            body = (trainer.rank, trainer.stamp, trainer.chain)
            self.net.append(Message("copy", trainer.host, host, trainer.epoch, body))

    def note_word(self, root: Agent, word: Decision) -> None:
        """The root has spoken: is it true, and does it stand by its earlier words?"""
        if root.epoch != self.epoch or root.host not in self.hosts:
            return
        if self.set_plan is not None and word.sealed == self.set_plan.sealed and root.restarted:
            return  # what the plan has declared, not what this root has counted
        if word.sealed is not None and word.sealed not in self.said_sealed:
            for rank in range(len(self.home)):
                for host in self.keepers(rank):
                    agent = self.agents.get(host)
                    if agent is not None and host not in self.away and agent.holds(rank, word.sealed) is None:
                        raise Violation(f"{word.sealed} is sealed, and {host} has no copy of shard {rank}")
            self.said_sealed.add(word.sealed)
            if self.guaranteed is None or word.sealed > self.guaranteed:
                self.guaranteed = word.sealed
            if word.sealed.version >= self.completed - 1:
                self.ungated = False
            self.lost = {self.noderanks[host] for host in self.hosts if not self.reachable(host)}
            self.forgiven = self.forgiven and bool(self.lost)
        self.said_abandoned |= word.abandoned
        if self.said_sealed & self.said_abandoned:
            raise Violation(f"sealed and abandoned: {self.said_sealed & self.said_abandoned}")

    # ---- faults ---------------------------------------------------------------------------------------------

    def reachable(self, host: str) -> bool:
        return host in self.agents and host not in self.away

    def allowed(self, host: str) -> bool:
        """Whether losing this node now is within what m replicas promise to survive."""
        return survivable(self.N, self.m, self.lost | {self.noderanks[host]})

    def _gone(self, host: str) -> None:
        if not self.allowed(host):
            self.forgiven = True
        self.lost.add(self.noderanks[host])
        self.phase = "down"
        self.unacknowledged.clear()

    def crash(self, host: str) -> None:
        """Power off."""
        del self.agents[host]
        for trainer in [t for t in self.trainers.values() if t.host == host]:
            del self.trainers[trainer.rank]
        self._gone(host)
        self.check()

    def suspect(self, host: str) -> None:
        """Wrongly held for dead: it lives on, out of reach, in its epoch."""
        if "drop-suspect" in self.weak:
            self.ignored.add(host)
            return
        self.away.add(host)
        self._gone(host)
        self.check()

    def alarm(self) -> None:
        """Somebody asks for a recovery although nothing is lost."""
        self.phase = "down"
        self.unacknowledged.clear()

    def kill_trainers(self) -> None:
        """A software failure: the step ends everywhere, no memory is lost."""
        self.trainers.clear()
        self.alarm()

    def crash_agent(self, host: str) -> None:
        """The agent dies; its trainers hand their descriptors back to the next, with the word on their page."""
        agent = self.agents[host]
        if agent.frozen or agent.tree is None:
            return
        for rank, pair in agent.pairs.items():
            fresh = SlotPair()
            for stamp in sorted(pair.complete_stamps()):
                index = fresh.begin(stamp, None, frozenset(), voted=frozenset())
                fresh.complete(index, stamp, pair.slots[pair.find(stamp) or 0].digest or "", 1)
            agent.pairs[rank] = fresh
        agent.incoming.clear()
        self.net = [message for message in self.net if message.dest != host]  # its connections are gone with it
        for rank, pull in list(agent.pulls.items()):
            try:
                agent.pairs[rank].begin(pull.shard.stamp, agent.sealed, frozenset(), voted=frozenset())
            except Refused:
                del agent.pulls[rank]
        agent.abandoned, agent.restarted = frozenset(), True
        agent.voted = frozenset().union(*(pair.complete_stamps() for pair in agent.pairs.values()))
        self.plant_tree(agent, agent.sealed)

    def plant_tree(self, agent: Agent, sealed: Stamp | None = None) -> None:
        members = self.members(agent)
        below = [agent.host, *(members[child] for child in children(agent.position, len(members), FANOUT))]
        agent.tree = Root(below, sealed) if agent.position == 0 else Subtree(below)

    # ---- recovery -------------------------------------------------------------------------------------------

    @property
    def noderanks(self) -> dict[str, int]:
        return self._noderanks

    def recover(self, shuffle: Callable[[list[str]], Sequence[str]], back: Iterable[str] = ()) -> None:
        """Collect inventories, plan, and ask everybody to void; `back` are suspects that can be reached again."""
        self.away -= set(back)
        survivors = [host for host in self.hosts if self.reachable(host)]
        others = [host for host in sorted(self.agents) if self.reachable(host) and host not in survivors]
        reachable = survivors + others
        hosts = (survivors + [h for h in others if h in back])[: self.N]
        while len(hosts) < self.N:
            hosts.append(f"h{self.births}")
            self.births += 1
        hosts = list(shuffle(hosts))
        inventories = {host: self.inventory(self.agents[host]) for host in reachable}
        self.recoveries += 1
        self.restart += set(hosts) != set(self.hosts)  # the same nodes: a new step, not a new incarnation
        min_epoch = 0 if "epoch-forgotten" in self.weak else first_epoch(self.restart)
        made = plan(inventories, hosts, self.m, min_epoch=min_epoch)
        self.set_plan, epoch = self.consider(made)
        chosen = None if self.set_plan is None else self.set_plan.chosen
        self.judge(chosen, made.warnings)
        self.account(chosen, epoch)
        for host in hosts:
            self.agents.setdefault(host, Agent(host))
        self.hosts, self._noderanks = hosts, made.noderanks
        self.epoch = max(0, epoch - 1) if "same-epoch" in self.weak and self.recoveries > 1 else epoch
        self.said_sealed, self.said_abandoned = set(), set()
        self.phase = "voiding"
        self.unacknowledged = set(hosts)
        self.check()

    def consider(self, made: RecoveryPlan) -> tuple[SetPlan | None, int]:
        """What to recover, and in which epoch."""
        return made.set_plan(""), made.epoch

    def account(self, chosen: Stamp | None, epoch: int) -> None:
        """What is promised from here on."""
        if chosen is None:
            self.start_over(epoch)
        elif self.forgiven:  # whatever an agent from long ago has kept
            assert self.set_plan is not None
            self.guaranteed, self.completed, self.counted = self.set_plan.sealed, chosen.version, epoch
            self.ungated, self.forgiven = True, False
        elif self.ungated:
            assert self.set_plan is not None
            self.completed, self.ungated = chosen.version, self.set_plan.sealed != chosen

    def judge(self, chosen: Stamp | None, warnings: tuple[str, ...]) -> None:
        if self.forgiven:
            return
        if warnings:
            raise Violation(f"recovery warns: {warnings}")
        if self.guaranteed is not None and (chosen is None or chosen < self.guaranteed):
            raise Violation(f"{self.guaranteed} was sealed, {chosen} is recovered")

    def start_over(self, epoch: int) -> None:
        self.counted = epoch
        self.guaranteed, self.completed, self.ungated, self.forgiven = None, 0, False, False
        self.lost.clear()

    def inventory(self, agent: Agent) -> Inventory:
        if "no-freeze" not in self.weak:
            agent.frozen = True
        copies = [
            self.copy_info(rank, slot.stamp, slot.digest)
            for rank, pair in agent.pairs.items()
            for slot in pair.slots
            if slot.state == "complete" and slot.stamp is not None and slot.digest is not None
        ]
        copies += [copy for guests in agent.guests.values() for copy in guests]
        sealed = () if agent.sealed is None else (("", agent.sealed),)
        return Inventory(agent.host, agent.noderanks, agent.map_restart, tuple(copies), agent.epoch, sealed)

    def copy_info(self, rank: int, stamp: Stamp, content: str) -> CopyInfo:
        return CopyInfo("", rank, len(self.home), self.home[rank], 1, 1, stamp, content)

    def acknowledge(self, host: str) -> None:
        """Void, take on the new epoch and place, start pulling."""
        agent = self.agents[host]
        chosen = self.set_plan
        keep = () if chosen is None else chosen.keep
        sealed = None if chosen is None else chosen.sealed
        if "void-fallback" in self.weak:
            keep = keep[:1]
        if "chosen-is-sealed" in self.weak and chosen is not None:
            sealed = chosen.chosen
        agent.position = self.noderanks[host]
        wanted = holds_for(agent.position, self.N, self.m)
        before = agent.pairs
        ours = [rank for rank, home in enumerate(self.home) if home in wanted]
        agent.pairs = {rank: before.pop(rank) if rank in before else SlotPair() for rank in ours}
        for rank, pair in before.items():
            agent.guests.setdefault(rank, []).extend(
                self.copy_info(rank, slot.stamp, slot.digest)
                for slot in pair.slots
                if slot.state == "complete" and slot.stamp is not None and slot.digest is not None
            )
        agent.guests = {
            rank: [copy for copy in guests if copy.stamp in keep] for rank, guests in agent.guests.items()
        }
        agent.epoch, agent.noderanks, agent.map_restart = self.epoch, self.noderanks, self.restart
        agent.frozen = agent.restarted = False
        agent.sealed, agent.abandoned, agent.voted = sealed, frozenset(), frozenset()
        agent.incoming.clear()
        agent.pulls = {}
        if "no-void" not in self.weak:
            for pair in agent.pairs.values():
                pair.void_except(*keep)
        for pull in () if chosen is None else chosen.pulls:
            if pull.dest_host == host:
                try:
                    agent.pairs[pull.shard.rank].begin(pull.shard.stamp, sealed, frozenset(), voted=frozenset())
                    agent.pulls[pull.shard.rank] = pull
                except Refused:
                    assert self.weak, "a pull must find room"
        self.plant_tree(agent)
        self.unacknowledged.discard(host)
        for trainer in [t for t in self.trainers.values() if t.host == host]:
            del self.trainers[trainer.rank]
        self.check()
        if not self.unacknowledged:
            self.resume()

    def pull(self, agent: Agent, rank: int) -> None:
        pull = agent.pulls[rank]
        for source in pull.sources:
            content = self.agents[source].holds(rank, pull.shard.stamp) if self.reachable(source) else None
            if content is not None:
                pair = agent.pairs[rank]
                index = pair.find(pull.shard.stamp)
                assert index is not None
                pair.complete(index, pull.shard.stamp, content, 1)
                del agent.pulls[rank]
                return
        if not self.away.intersection(pull.sources):  # nobody has it any more: given up
            index = agent.pairs[rank].find(pull.shard.stamp)
            assert index is not None
            agent.pairs[rank].void(index)
            del agent.pulls[rank]

    def resume(self) -> None:
        """Everybody has acknowledged: the trainers load, from wherever a copy is."""
        chosen = self.set_plan
        chains: list[str] = []
        by_rank = {node_rank: host for host, node_rank in self.noderanks.items()}
        if chosen is None or chosen.chosen is None:
            stamp = Stamp(self.epoch, 0)
            chains = [f"fresh {self.recoveries}"] * len(self.home)
            self.ledger[stamp] = {chains[0]}
        else:
            stamp = chosen.chosen
            for shard in chosen.shards:
                places = [
                    self.agents[host].holds(shard.rank, stamp) for host in sorted(self.agents) if self.reachable(host)
                ]
                if not any(places):
                    self.kill_trainers()  # lost since the inventories: recover again
                    return
                chains.append(next(filter(None, places)))
        if len(set(chains)) != 1 or chains[0] not in self.ledger[stamp]:
            raise Violation(f"the recovered state mixes lineages at {stamp}: {sorted(set(chains))}")
        self.phase = "running"
        self.trainers = {
            rank: Trainer(rank, by_rank[self.home[rank]], self.epoch, stamp, chain, stamp.version, self.recoveries)
            for rank, chain in enumerate(chains)
        }
        self.check()

    # ---- what must hold at every moment ------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever further nodes are lost, as long as each shard keeps a holder: what is sealed can be recovered,
        and no more than one completed step is repeated."""
        if self.guaranteed is None or self.forgiven:
            return
        where: dict[Stamp, dict[int, set[str]]] = {}
        for host, agent in self.agents.items():
            if host in self.away:
                continue
            for rank, pair in agent.pairs.items():
                for stamp in pair.complete_stamps():
                    where.setdefault(stamp, {}).setdefault(rank, set()).add(host)
            for rank, guests in agent.guests.items():
                for copy in guests:
                    where.setdefault(copy.stamp, {}).setdefault(rank, set()).add(host)
        full = [(stamp, list(ranks.values())) for stamp, ranks in where.items() if len(ranks) == len(self.home)]
        full.sort(key=lambda item: item[0], reverse=True)
        by_rank = {node_rank: host for host, node_rank in self.noderanks.items()}
        for failed in _further(self.N, self.m, frozenset(self.lost)):
            gone = {by_rank[node_rank] for node_rank in failed}
            best = next((stamp for stamp, places in full if all(place - gone for place in places)), None)
            if best is None or best < self.guaranteed:
                raise Violation(f"{self.guaranteed} is sealed, but without {sorted(gone)} only {best} is left")
            if not self.ungated and self.completed - best.version > 1:
                raise Violation(f"{self.completed} steps are done, but without {sorted(gone)} only {best} is left")


@cache
def _further(N: int, m: int, lost: frozenset[int]) -> tuple[frozenset[int], ...]:
    """Sets of up to m-1 more nodes (none, too) that may be lost after `lost`."""
    left = [node for node in range(N) if node not in lost]
    sets = [frozenset(failed) for size in range(m) for failed in combinations(left, size)]
    return tuple(failed for failed in sets if survivable(N, m, lost | failed))
