"""`World` with a persistent tier: versions are drained to it while training goes on, and come back from it.

A drain copies shards that others may overwrite meanwhile (nothing is pinned: that would cost the one-step bound): a
copy is taken in two halves between which anything may happen, and believed by its digest alone. It never has to end.
While the job is down, the nodes that are left may save what was sealed last: it has to be there.
Recoveries ask the tier where memory alone cannot be sure; sometimes the tier is away then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from commit_world import WEAKNESSES, Agent, Violation, World

from gemini_hpc.core.copy import Copy as CopyInfo
from gemini_hpc.core.placement import holders
from gemini_hpc.core.recovery_plan import RecoveryPlan, SetPlan
from gemini_hpc.core.salvage import writers
from gemini_hpc.core.slots import SlotPair, Stamp

TIER_WEAKNESSES = {
    "drain-pins": "a slot is kept from the training while it is drained",
    "drain-trusts": "a shard that has been overwritten while it was copied is believed",
    "drain-mixes": "what an agent tells of an earlier drain is taken for the one of now",
    "any-map": "what an agent of an incarnation long ago has is believed to be the newest",
    "memory-first": "what memory has is taken, however old",
    "unseen-forgotten": "a round that could not see the tier leaves nothing to the next",
    "unseen-begins": "a launch begins although the tier could not be seen",
    "salvage-unsealed": "nodes that are left save the newest that any of them has, sealed or not",
    "salvage-first": "the first holder of a missing node's shards writes them, whether it has got them yet or not",
}


@dataclass
class Copy:
    """Of one rank's shard: the first half, the slot that it came from, and the digest in that slot's record."""

    stamp: Stamp
    slot: int
    first: str
    digest: str


@dataclass
class Drain:
    stamp: Stamp
    epoch: int
    copying: dict[int, Copy] = field(default_factory=dict)
    parts: dict[int, str] = field(default_factory=dict)
    said: dict[int, str] = field(default_factory=dict)  # what has not arrived yet


class TieredWorld(World):
    """The base's promises hold whatever is drained; and what is whole on the tier is never lost."""

    def __init__(self, N: int, m: int, per_node: int, *, patience: int = 0, weak: Iterable[str] = ()) -> None:
        weak = frozenset(weak)
        self.faulty = weak & TIER_WEAKNESSES.keys()
        self.tier: dict[Stamp, list[str]] = {}
        self.drain: Drain | None = None
        self.dropped: list[tuple[int, str]] = []  # told of drains that have been given up, and not arrived
        self.unseen = False
        self.doubting: set[str] = set()  # agents whose last plan was made without a look at the tier
        self.looks = self.returns = self.salvages = 0
        self.from_tier: Stamp | None = None
        super().__init__(N, m, per_node, patience=patience, weak=weak & WEAKNESSES.keys())

    # ---- drains --------------------------------------------------------------------------------------------

    def events(self) -> list[tuple[str, Callable[[], object]]]:
        found = super().events()
        if self.phase == "down":
            found.append(("what is left is saved", self.salvage))
        if self.phase != "running":
            return found
        found.append(("a drain begins", self.begin_drain))
        if self.drain is not None:
            for rank in range(len(self.home)):
                if rank in self.drain.copying:
                    found.append((f"{rank} is copied", partial(self.end_copy, self.drain, rank)))
                elif rank in self.drain.said:
                    found.append((f"{rank} is told", partial(self.hear_of, self.drain, rank)))
                elif rank not in self.drain.parts:
                    found.append((f"{rank} is being copied", partial(self.begin_copy, self.drain, rank)))
        return found

    def root(self) -> Agent | None:
        agents = [a for a in self.agents.values() if a.epoch == self.epoch and a.position == 0 and not a.frozen]
        return agents[0] if agents and self.phase == "running" else None

    def keeper(self, rank: int) -> Agent | None:
        """The agent at whose node the rank lives."""
        host = next(host for host, node_rank in self.noderanks.items() if node_rank == self.home[rank])
        agent = self.agents.get(host)
        return agent if agent is not None and agent.epoch == self.epoch and not agent.frozen else None

    def begin_drain(self) -> None:
        """The root drains the newest sealed version; another one ends."""
        root = self.root()
        if root is None or root.sealed is None or root.sealed in self.tier or root.sealed.epoch != self.epoch:
            return
        if self.drain is not None and self.drain.stamp == root.sealed:
            return
        if self.drain is not None:
            self.dropped = list(self.drain.said.items())
        self.drain = Drain(root.sealed, self.epoch)

    def begin_copy(self, drain: Drain, rank: int) -> None:
        agent = self.keeper(rank)
        pair = None if agent is None else agent.pairs.get(rank)
        index = None if pair is None else pair.find(drain.stamp)
        if pair is None or index is None or pair.slots[index].state != "complete":
            self.drain = None  # the training has gone past it: given up
            return
        digest = pair.slots[index].digest
        assert agent is not None and digest is not None
        drain.copying[rank] = Copy(drain.stamp, index, _bytes_of(agent, rank, index), digest)

    def end_copy(self, drain: Drain, rank: int) -> None:
        copy, agent = drain.copying.pop(rank), self.keeper(rank)
        if agent is None or rank not in agent.pairs:
            self.drain = None
            return
        halves = {copy.first, _bytes_of(agent, rank, copy.slot)}
        if halves == {copy.digest}:
            drain.said[rank] = copy.digest
        elif "drain-trusts" in self.faulty:
            drain.said[rank] = "|".join(sorted(halves))
        else:
            self.drain = None

    def hear_of(self, drain: Drain, rank: int) -> None:
        drain.parts[rank] = drain.said.pop(rank)
        if "drain-mixes" in self.faulty:
            drain.parts.update(self.dropped)
        if len(drain.parts) == len(self.home) and self.root() is not None:
            chains = [drain.parts[rank] for rank in range(len(self.home))]
            if len(set(chains)) != 1 or chains[0] not in self.ledger[drain.stamp]:
                raise Violation(f"the tier has at {drain.stamp} what no run had: {sorted(set(chains))}")
            self.tier[drain.stamp] = chains
            self.drain = None

    def salvage(self) -> None:
        """The nodes that are left save the newest version that any of them knows to be sealed."""
        left = [self.agents[host] for host in self.hosts if self.reachable(host)]
        newest = max((agent.sealed for agent in left if agent.sealed is not None), default=None)
        if "salvage-unsealed" in self.faulty:
            newest = max((s for a in left for pair in a.pairs.values() for s in pair.complete_stamps()), default=None)
        if newest is None or newest <= max(self.tier, default=Stamp(-1, 0)):
            return
        ranks = {self.noderanks[agent.host] for agent in left}
        held: dict[str, dict[int, set[int]]] = {agent.host: {} for agent in left}
        for agent in left:
            for rank, home in enumerate(self.home):
                first = next((h for h in holders(home, self.N, self.m) if h in ranks), None)
                may = "salvage-first" not in self.faulty or first == self.noderanks[agent.host]
                if may and agent.holds(rank, newest) is not None:
                    held[agent.host].setdefault(home, set()).add(rank)
        chosen, missing = writers(held, self.noderanks, len(self.home))
        promised = not self.forgiven and self.guaranteed is not None
        # What a job has come back from may still be outside of it only.
        outside = [agent for host, agent in self.agents.items() if self.reachable(host) and agent not in left]
        lost = [rank for rank in missing if not any(agent.holds(rank, newest) for agent in outside)]
        if lost and promised:
            raise Violation(f"{newest} was sealed, and nobody who is left has the shards {lost} of it")
        if missing:
            return
        by_home = {home: self.agents[host] for host, homes in chosen.items() for home in homes}
        chains = [by_home[home].holds(rank, newest) or "" for rank, home in enumerate(self.home)]
        if len(set(chains)) != 1 or chains[0] not in self.ledger[newest]:
            raise Violation(f"what was left at {newest} is of no run: {sorted(set(chains))}")
        self.tier[newest] = chains
        self.salvages += 1

    def offer(self, agent: Agent, rank: int, stamp: Stamp, content: str) -> bool:
        if "drain-pins" in self.faulty and self.drain is not None and agent is self.keeper(rank):
            copy = self.drain.copying.get(rank)
            if copy is not None and _oldest(agent.pairs[rank]) == copy.slot:
                return False
        return super().offer(agent, rank, stamp, content)

    # ---- coming back ---------------------------------------------------------------------------------------

    def recover(self, shuffle: Callable[[list[str]], Sequence[str]], back: Iterable[str] = ()) -> None:
        self.drain, self.dropped = None, []
        self.unseen, self.from_tier = False, None
        super().recover(shuffle, back)

    def consider(self, made: RecoveryPlan) -> tuple[SetPlan | None, int]:
        """What memory has, or the tier."""
        memory, epoch = super().consider(made)
        doubt = any(self.reachable(host) for host in self.doubting) and "unseen-forgotten" not in self.faulty
        served = memory is not None and memory.chosen is not None
        known = made.survivable and (made.latest >= self.restart - 1 or "any-map" in self.faulty)
        sure = known and memory is not None and memory.newest and not doubt
        if sure or (served and "memory-first" in self.faulty):
            return memory, epoch
        if self.away_now():
            self.unseen = True
            return memory, epoch
        newest = max(self.tier, default=None)
        if newest is None or (memory is not None and memory.chosen is not None and memory.chosen >= newest):
            return memory, epoch
        shards = tuple(
            CopyInfo("", rank, len(self.home), self.home[rank], 1, 1, newest, content)
            for rank, content in enumerate(self.tier[newest])
        )
        self.from_tier = newest
        self.returns += 1
        whole = SetPlan("", "chosen", newest, len(self.home), shards, (), (), (newest,), newest)
        return whole, max(epoch, newest.epoch + 1)

    def away_now(self) -> bool:
        """Each third look at the tier is in vain."""
        self.looks += 1
        return self.looks % 3 == 2

    def acknowledge(self, host: str) -> None:
        (self.doubting.add if self.unseen else self.doubting.discard)(host)
        super().acknowledge(host)

    def account(self, chosen: Stamp | None, epoch: int) -> None:
        super().account(chosen, epoch)
        if self.from_tier is not None:  # which holds it; memory only when the next version is sealed
            self.start_over(epoch)
            self.completed, self.ungated = self.from_tier.version, True

    def judge(self, chosen: Stamp | None, warnings: tuple[str, ...]) -> None:
        newest = max(self.tier, default=None)
        if not self.unseen and newest is not None and (chosen is None or chosen < newest):
            raise Violation(f"{newest} is on the tier, {chosen} is recovered")
        # Of what was sealed, and lost with more nodes than m replicas survive, agents that come back may still tell.
        promised = self.guaranteed or Stamp(-1, 0)
        lost = [re.search(r"version ([0-9]+)\.([0-9]+) was sealed", warning) for warning in warnings]
        known = [found is not None and Stamp(int(found[1]), int(found[2])) > promised for found in lost]
        super().judge(chosen, tuple(w for w, old in zip(warnings, known, strict=True) if not old))

    def resume(self) -> None:
        if self.unseen and "unseen-begins" not in self.faulty:
            self.alarm()  # a launch has a round of its own
            return
        newest, chosen = max(self.tier, default=None), None if self.set_plan is None else self.set_plan.chosen
        if newest is not None and (chosen is None or chosen < newest):
            raise Violation(f"{newest} is on the tier, a launch begins with {chosen}")
        if self.from_tier is not None:
            for rank, content in enumerate(self.tier[self.from_tier]):
                agent = self.keeper(rank)
                assert agent is not None
                pair = agent.pairs[rank]
                if pair.find(self.from_tier) is None:
                    index = pair.begin(self.from_tier, self.from_tier, frozenset(), voted=frozenset())
                    pair.complete(index, self.from_tier, content, 1)
        super().resume()


def _bytes_of(agent: Agent, rank: int, index: int) -> str:
    """What is in a slot's memory now."""
    slot = agent.pairs[rank].slots[index]
    return slot.digest or "" if slot.state == "complete" else f"half of {agent.incoming.get(rank)}"


def _oldest(pair: SlotPair) -> int:
    return min((0, 1), key=lambda index: pair.slots[index].stamp or Stamp(-1, 0))
