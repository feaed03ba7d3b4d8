"""Every interleaving of the commit protocol on a small job, with the production rules at each holder and the root.

One training rank per node. What happens, in any order: a rank completes an optimizer step; a holder begins, or
completes, a copy of a shard; an agent's vote reaches the root; the root's word reaches an agent. A message that is
late is one of these events happening late, so delays need no events of their own. Versions are counted from the
last sealed one, which makes the set of states finite however long the job runs.

In every state, every single node is killed in thought: is there a version to recover, and how many completed steps
are repeated?
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from gemini_hpc.core.copy import Copy as CopyInfo
from gemini_hpc.core.copy import Member
from gemini_hpc.core.placement import list_holders, list_homes
from gemini_hpc.core.recovery_plan import Inventory, plan_recovery
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Refused, Slot, SlotPair, Stamp
from gemini_hpc.core.votes import Decision, Root, Vote, build_vote, merge_votes

Pair = tuple[tuple[str, int], tuple[str, int], int]  # both slots in order, and the version last begun
Versions = tuple[int, ...]


class Ballot(NamedTuple):
    """A vote as far as it matters above the last seal."""

    complete: Versions
    seen: Versions
    floor: int
    kept: Versions


class State(NamedTuple):
    steps: Versions  # per rank: optimizer steps completed
    pairs: tuple[tuple[Pair, ...], ...]  # per node, per rank that it holds for
    voted: tuple[Versions, ...]  # per agent: what it has told to be complete, above what it knows to be sealed
    ballots: tuple[Ballot, ...]  # per agent: its vote as the root has it
    words: tuple[tuple[int, Versions], ...]  # per agent: (sealed, abandoned) as it knows them
    sealed: int  # at the root


@dataclass(frozen=True)
class Protocol:
    """`awaited`: where a rank waits for the seal of version v: before the `step` that makes v+1 (R2), before the
    `write` of v+1, or `never` (each holder trusts its own newest copy). `patience`: how many versions past the last
    seal a rank goes on when its wait for a seal runs out; 0: it waits for ever. `abandons`: the root says what can
    never be sealed. `fresh`: the job starts with empty slots, not with version 0 sealed. `every`, `spread`: only each
    j-th version is saved; v is awaited before the step that makes v + s."""

    awaited: str
    patience: int = 0
    abandons: bool = True
    fresh: bool = False
    every: int = 1
    spread: int = 1


@dataclass
class Findings:
    states: int
    lost: list[str] | None  # events that lead to a state in which one failure loses everything
    repeated: int  # completed steps repeated at worst
    trace: list[str]  # to the worst
    stuck: list[str] | None  # to a state from which no version can ever be sealed again


def explore(
    N: int, m: int, protocol: Protocol, limit: int, *, liveness: bool = False, parity: bool = False
) -> Findings:
    """Breadth first through all states, so that traces are shortest. parity: in groups of m, in place of copies.
    Raises if there are more than `limit`."""
    model = _ParityModel(N, m, protocol) if parity else _Model(N, m, protocol)
    start = model.start()
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    back: dict[State, list[State]] = {}
    progressed: list[State] = []
    findings = Findings(0, None, 0, [], None)
    while queue:
        state = queue.popleft()
        loss, repeated = (False, 0) if protocol.fresh else model.worst(state)
        if loss and findings.lost is None:
            findings.lost = _trace(came, state)
        if repeated > findings.repeated:
            findings.repeated, findings.trace = repeated, _trace(came, state)
        if findings.lost is not None and protocol.awaited == "never":
            break
        for event, after, sealed in model.events(state):
            if liveness:
                back.setdefault(after, []).append(state)
                if sealed:
                    progressed.append(state)
            if after not in came:
                came[after] = (state, event)
                queue.append(after)
                if len(came) > limit:
                    raise AssertionError(f"more than {limit} states")
    findings.states = len(came)
    if liveness:
        alive = set(progressed)
        while progressed:
            for before in back.get(progressed.pop(), ()):
                if before not in alive:
                    alive.add(before)
                    progressed.append(before)
        dead = next((state for state in came if state not in alive), None)
        findings.stuck = None if dead is None else _trace(came, dead)
    return findings


def _trace(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    events: list[str] = []
    step = came[state]
    while step is not None:
        events.append(step[1])
        step = came[step[0]]
    return events[::-1]


class _Model:
    def __init__(self, N: int, m: int, protocol: Protocol) -> None:
        self.N, self.m, self.protocol = N, m, protocol
        self.keeps = [list_homes(node, N, m) for node in range(N)]
        self.where = [[(h, self.keeps[h].index(rank)) for h in list_holders(rank, N, m)] for rank in range(N)]
        self.worst_of = lru_cache(maxsize=None)(self._worst)

    def start(self) -> State:
        """Version 0 is sealed and everybody knows it; in a fresh job it counts as sealed, but nobody holds it."""
        pair: Pair = (("", 0), ("", 0) if self.protocol.fresh else ("complete", 0), 0)
        nodes = range(self.N)
        return State(
            steps=tuple(0 for _ in nodes),
            pairs=tuple(tuple(pair for _ in self.keeps[node]) for node in nodes),
            voted=tuple(() for _ in nodes),
            ballots=tuple(Ballot((), (), 0, ()) for _ in nodes),
            words=tuple((0, ()) for _ in nodes),
            sealed=0,
        )

    def events(self, state: State) -> Iterator[tuple[str, State, bool]]:
        """(what happens, the state after it, whether the root has sealed something by it)."""
        for rank in range(self.N):
            if self._may_step(state, rank):
                steps = _with(state.steps, rank, state.steps[rank] + 1)
                yield f"rank {rank} completes step {steps[rank]}", state._replace(steps=steps), False
            for node, index in self.where[rank]:
                yield from self._copy_events(state, rank, node, index)
        for node in range(self.N):
            yield from self._vote_events(state, node)
            word = _word(state.sealed, state.ballots) if self.protocol.abandons else (state.sealed, ())
            if word != state.words[node]:
                voted = tuple(version for version in state.voted[node] if version > word[0])
                after = state._replace(words=_with(state.words, node, word), voted=_with(state.voted, node, voted))
                yield f"agent {node} hears {word}", _normal(after), False

    def _may_step(self, state: State, rank: int) -> bool:
        version = state.steps[rank]
        if any(other < version for other in state.steps):
            return False  # its gradients are missing
        if self.protocol.awaited == "step":
            saved = self._saved(version)
            if state.words[rank][0] >= saved or version + 1 - saved < self.protocol.spread:
                return True
            return version - state.sealed < self.protocol.patience
        copies = self.where[rank] if self.protocol.awaited == "never" else self.where[rank][:1]
        return all(("complete", version) in state.pairs[node][index] for node, index in copies)

    def _saved(self, version: int) -> int:
        """The newest version up to this one that is saved."""
        return version - version % self.protocol.every

    def _copy_events(self, state: State, rank: int, node: int, index: int) -> Iterator[tuple[str, State, bool]]:
        pair = state.pairs[node][index]
        version = self._saved(state.steps[rank])
        sealed, abandoned = state.words[node]
        if pair[2] < version and not (self.protocol.awaited == "write" and state.words[rank][0] < version - 1):
            if self.protocol.awaited == "never":
                sealed = max(held for name, held in pair[:2] if name == "complete")
            begun = _begin(pair, version, sealed, abandoned, state.voted[node])
            if begun is not None:
                yield f"node {node} begins shard {rank} of {version}", _put(state, node, index, begun), False
        done = _complete(pair)
        if done is not None:
            yield f"node {node} completes shard {rank} of {pair[2]}", _put(state, node, index, done), False

    def _vote_events(self, state: State, node: int) -> Iterator[tuple[str, State, bool]]:
        if self.protocol.awaited == "never":
            return
        ballot = _ballot(state.pairs[node], state.sealed)
        if ballot == state.ballots[node]:
            return
        ballots = _with(state.ballots, node, ballot)
        sealed = max(state.sealed, _sealed(ballots))
        voted = set(state.voted[node]) | {version for version in ballot.complete if version > state.words[node][0]}
        after = state._replace(ballots=ballots, sealed=sealed, voted=_with(state.voted, node, tuple(sorted(voted))))
        yield f"vote of agent {node}: {ballot.complete}", _normal(after), sealed > state.sealed

    def worst(self, state: State) -> tuple[bool, int]:
        """Over all single failures: whether nothing is left to recover, and completed steps repeated at worst."""
        return self.worst_of(state.pairs, max(state.steps))

    def _worst(self, pairs: tuple[tuple[Pair, ...], ...], completed: int) -> tuple[bool, int]:
        chosen = [_chosen(self.N, self.m, pairs, failed) for failed in range(self.N)]
        return None in chosen, max((completed - version for version in chosen if version is not None), default=0)


class _ParityModel(_Model):
    """Each node keeps its own shard, and beside it the parity of the others of its group (`core.parity`). What comes
    of a member is folded in at any time at which it has the version in a slot; when all are in, it is complete."""

    def __init__(self, N: int, m: int, protocol: Protocol) -> None:
        super().__init__(N, m, protocol)
        self.others = [Redundancy(N, m, 1).list_receivers(node) for node in range(N)]
        self.keeps = [(node, node) for node in range(N)]
        self.where = [[(rank, 0)] for rank in range(N)]

    def events(self, state: State) -> Iterator[tuple[str, State, bool]]:
        yield from super().events(state)
        for node in range(self.N):
            pair, (sealed, abandoned) = state.pairs[node][1], state.words[node]
            for version in sorted({self._saved(state.steps[other]) for other in self.others[node]}):
                begun = None
                if pair[2] < version:
                    begun = _begin(pair, version, sealed, abandoned, state.voted[node])
                if begun is not None:
                    yield f"node {node} begins parity of {version}", _put(state, node, 1, begun), False
            done = _complete(pair)
            if done is not None and all(self._has(state, other, pair[2]) for other in self.others[node]):
                yield f"node {node} completes parity of {pair[2]}", _put(state, node, 1, done), False

    @staticmethod
    def _has(state: State, node: int, version: int) -> bool:
        return any(name and held == version for name, held in state.pairs[node][0][:2])

    def _worst(self, pairs: tuple[tuple[Pair, ...], ...], completed: int) -> tuple[bool, int]:
        chosen = [_made(self.N, self.m, pairs, failed) for failed in range(self.N)]
        return None in chosen, max((completed - version for version in chosen if version is not None), default=0)


@cache
def _made(N: int, m: int, pairs: tuple[tuple[Pair, ...], ...], failed: int) -> int | None:
    """What production's plan chooses when a node is lost."""
    here = Redundancy(N, m, 1)
    noderanks = {f"n{node}": node for node in range(N)}

    def shard(rank: int, version: int) -> CopyInfo:
        return CopyInfo("", rank, N, rank, 1 << 16, 9000, Stamp(0, version), f"{rank} {version}")

    def beside(rank: int, version: int) -> CopyInfo:
        others = sorted(here.list_receivers(rank))
        of = tuple(Member(other, other, 1 << 16, 9000, f"{other} {version}") for other in others)
        return CopyInfo("", rank, N, rank, 1 << 16, 9000, Stamp(0, version), f"p{rank} {version}", members=of)

    inventories = {}
    for host, node in noderanks.items():
        if node != failed:
            copies = tuple(
                make(node, version)
                for make, pair in zip((shard, beside), pairs[node], strict=True)
                for name, version in pair[:2]
                if name == "complete"
            )
            inventories[host] = Inventory(host, noderanks, 0, copies, 0)
    found = plan_recovery(inventories, [*inventories, "new"], m, parity=1).find_training_plan("")
    return found.chosen.version if found is not None and found.chosen is not None else None


@cache
def _chosen(N: int, m: int, pairs: tuple[tuple[Pair, ...], ...], failed: int) -> int | None:
    """The newest version of which every rank has a copy when a node is lost."""
    whole: list[set[int]] = [set() for _ in range(N)]
    for node in range(N):
        if node != failed:
            for rank, pair in zip(list_homes(node, N, m), pairs[node], strict=True):
                whole[rank].update(version for name, version in pair[:2] if name == "complete")
    return max(set.intersection(*whole), default=None)


def _with(values: tuple[object, ...], index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])


def _put(state: State, node: int, index: int, pair: Pair) -> State:
    return state._replace(pairs=_with(state.pairs, node, _with(state.pairs[node], index, pair)))


def _production(pair: Pair) -> SlotPair:
    slots = [Slot(name, Stamp(0, version)) if name else Slot() for name, version in pair[:2]]  # type: ignore[arg-type]
    return SlotPair(slots, Stamp(0, pair[2]))


def _model(pair: SlotPair) -> Pair:
    slots = sorted(("", 0) if slot.stamp is None else (slot.state, slot.stamp.version) for slot in pair.slots)
    assert pair.high is not None
    return (slots[0], slots[1], pair.high.version)


def _stamps(versions: Versions) -> frozenset[Stamp]:
    return frozenset(Stamp(0, version) for version in versions)


def _versions(stamps: frozenset[Stamp], above: int) -> Versions:
    return tuple(sorted(stamp.version for stamp in stamps if stamp.version > above))


@cache
def _begin(pair: Pair, version: int, sealed: int, abandoned: Versions, voted: Versions) -> Pair | None:
    production = _production(pair)
    try:
        production.begin_version(Stamp(0, version), Stamp(0, sealed), _stamps(abandoned), voted=_stamps(voted))
    except Refused:
        return None
    return _model(production)


@cache
def _complete(pair: Pair) -> Pair | None:
    production = _production(pair)
    for index, slot in enumerate(production.slots):
        if slot.state == "filling" and slot.stamp is not None:
            production.complete_slot(index, slot.stamp, "", 0)
            return _model(production)
    return None


@cache
def _ballot(pairs: tuple[Pair, ...], sealed: int) -> Ballot:
    vote = build_vote([_production(pair) for pair in pairs])
    assert vote.floor is not None
    floor = max(sealed, vote.floor.version)
    return Ballot(_versions(vote.complete, sealed), _versions(vote.seen, sealed), floor, _versions(vote.kept, sealed))


def _vote(ballot: Ballot) -> Vote:
    return Vote(_stamps(ballot.complete), _stamps(ballot.seen), Stamp(0, ballot.floor), _stamps(ballot.kept))


@cache
def _word(sealed: int, ballots: tuple[Ballot, ...]) -> tuple[int, Versions]:
    word = _ask_root(ballots)
    return sealed, tuple(stamp.version for stamp in sorted(word.abandoned) if stamp.version > sealed)


@cache
def _sealed(ballots: tuple[Ballot, ...]) -> int:
    sealed = _ask_root(ballots).sealed
    return -1 if sealed is None else sealed.version


def _ask_root(ballots: tuple[Ballot, ...]) -> Decision:
    """Through the tree, with a root that has forgotten everything but the votes."""
    root = Root()
    root.record_vote(merge_votes(map(_vote, ballots)))
    return root.decide()


def _normal(state: State) -> State:
    """Count versions from the last sealed one; drop from votes and promises what it has decided."""
    sealed = state.sealed
    oldest = min((word[0] for word in state.words), default=sealed)
    base = min(oldest, sealed)
    ballots = tuple(
        Ballot(_above(b.complete, sealed), _above(b.seen, sealed), max(b.floor, sealed), _above(b.kept, sealed))
        for b in state.ballots
    )
    if base == 0:
        return state._replace(ballots=ballots)
    return State(
        steps=_less(state.steps, base),
        pairs=tuple(tuple(_shift(pair, base) for pair in pairs) for pairs in state.pairs),
        voted=tuple(_less(voted, base) for voted in state.voted),
        ballots=tuple(Ballot(_less(b[0], base), _less(b[1], base), b[2] - base, _less(b[3], base)) for b in ballots),
        words=tuple((word[0] - base, _less(word[1], base)) for word in state.words),
        sealed=sealed - base,
    )


@cache
def _shift(pair: Pair, base: int) -> Pair:
    (one, a), (two, b), high = pair
    return ((one, a - base if one else 0), (two, b - base if two else 0), high - base)


def _above(versions: Versions, limit: int) -> Versions:
    return tuple(version for version in versions if version > limit)


def _less(versions: Versions, base: int) -> Versions:
    return tuple(version - base for version in versions)
