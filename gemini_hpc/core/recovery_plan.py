"""Inventories in, recovery plan out (docs/protocol.md, R4): what every agent computes alike after a restart.

1. The previous node-rank map is the one of the latest restart that a survivor remembers; replacements fill gaps. Its
   order of placement stays while there are as many nodes; else failure domains are kept apart anew.
2. The new epoch is above every epoch that anyone has seen.
3. Per set, the highest stamp of which every shard has a complete copy somewhere is chosen, if the ranks mean the same
   moment with it (`core.moments`). It may never have been voted on.
4. Every agent voids all but the stamps to keep (`SlotPair.void_except`) and acknowledges; only then training goes on.
5. Every holder of the new placement that lacks the chosen stamp pulls it, the home node first in its list of sources.

With parity (`core.parity`) a shard whose copy is lost counts as there if it can be made again: all others of its
stripe are there, and the parity beside each of them was made of these very shards. Its home makes it (`Made`), and
each node the parity that it lacks.

An agent that has given its inventory takes no write, vote or word of the old epoch any more: else the chosen
version could be overwritten, by rights of the old epoch, before the plan arrives.

The chosen stamp may never have been sealed: every shard has a copy of it, but not every holder. Then one more failure
could take the only copy of some shard, so the version to fall back on is kept beside it until the new root has sealed
the chosen one, and until then the chosen one does not count as sealed: `keep` and `sealed` of the plan say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gemini_hpc.core import domains, moments, node_ranks
from gemini_hpc.core.copy import Copy
from gemini_hpc.core.parity_plan import Made, Parities
from gemini_hpc.core.placement import AS_RANKED, Order
from gemini_hpc.core.redundancy import Redundancy
from gemini_hpc.core.slots import Stamp


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one reachable agent has. `noderanks` is the map of the incarnation that it last belonged to, and
    `map_restart` that incarnation's restart count. `sealed` has, per set, the highest stamp that the agent knows to
    have been sealed, in this epoch or by the plan of its recovery (`SetPlan.sealed`). `order`, of placement, belongs
    to the map (`placement.Order.ranks`)."""

    host: str
    noderanks: dict[str, int] | None
    map_restart: int
    copies: tuple[Copy, ...]
    max_epoch: int
    sealed: tuple[tuple[str, Stamp], ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """`dest_host` fetches a shard from the first of `sources` that delivers the digest."""

    dest_host: str
    shard: Copy
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LostShard:
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Recovery of one training set. `outcome`:

    - `chosen`: `chosen` is the stamp to load, `world` its number of training ranks, `shards` one copy per rank
      in rank order (for its digest, sizes and home), `pulls` what is to be moved, `made` what is to be made. `keep`
      is what a holder does not void: the chosen stamp and, where there is one, the one to fall back on. `sealed` is
      what counts as sealed, in R1 and before the next optimizer step, until the new root's first word: the chosen
      stamp or an earlier one.
    - `lost`: more holders are gone than the replicas allow; `lost` names the missing shards of the newest stamp.
    - `never-sealed`: copies exist, but no loss of nodes explains the gaps: the first seal had not come.
    """

    set_name: str
    outcome: Literal["chosen", "lost", "never-sealed"]
    chosen: Stamp | None
    world: int
    shards: tuple[Copy, ...]
    pulls: tuple[Pull, ...]
    lost: tuple[LostShard, ...]
    keep: tuple[Stamp, ...] = ()
    sealed: Stamp | None = None
    newest: bool = True  # nothing newer is known to have been sealed
    made: tuple[Made, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """`gone` are hosts of the previous map without an inventory, `survivable` says whether m replicas promise to
    survive that; `latest` is the restart count of that map, -1 without one. `sets` is empty where nobody has any
    copy: a first start, or everything is lost.

    Without `survivable`, with a warning that a sealed version has lost shards, or where `latest` is not the
    incarnation before, what is chosen may be much older than the tier's last: the caller compares.
    """

    noderanks: dict[str, int]
    epoch: int
    sets: tuple[SetPlan, ...]
    gone: tuple[str, ...]
    survivable: bool
    warnings: tuple[str, ...]
    latest: int = -1
    order: Order = AS_RANKED

    def set_plan(self, set_name: str) -> SetPlan | None:
        return next((plan for plan in self.sets if plan.set_name == set_name), None)


def first_epoch(restart: int) -> int:
    """Where an incarnation's epochs begin: above those of the ones before, also where nobody is left who knows them.
    Each recovery round of an incarnation takes one; a launch of the training has one or two."""
    return restart * EPOCHS_OF_A_RESTART + 1


EPOCHS_OF_A_RESTART = 64
INHERITED_EPOCH = 0  # below all that a job makes itself


def inherited(stamp: Stamp) -> Stamp:
    """What a version of another job is called in the one that goes on from it. Its epochs say nothing here: they
    could be above those of this job, and then outrank what it makes itself."""
    return Stamp(INHERITED_EPOCH, stamp.version)


def plan(
    inventories: Mapping[str, Inventory],
    hosts: Sequence[str],
    m: int,
    *,
    min_epoch: int = 0,
    nodes: int | None = None,
    noderanks: Mapping[str, int] | None = None,
    foreign: bool = False,
    parity: int = 0,
    order: Order | None = None,
    by_host: Mapping[str, str] | None = None,
) -> RecoveryPlan:
    """The plan for a job that now has `hosts`, in host-list order, with m replicas.

    nodes: how many of them are to train (all by default); the others are spares. There are then as many copies as
    there are such nodes, at most. noderanks, order: those of this job, where they are decided. foreign: the
    inventories are those of another job's agents, so a host that has a copy has it in another agent's memory, and
    pulls it, too. by_host: failure domains. parity: blocks of it in a row of a group
    of m nodes; 0: whole copies.

    The new epoch is above all that the inventories know, and at least `min_epoch` (`first_epoch`): so it keeps apart
    from lineages that nobody reachable remembers.

    `inventories` is by host, of all reachable agents; hosts outside the allocation may be sources. The result
    depends on nothing else, so that agents with the same inventories agree. Raises ValueError for m < 1,
    m > len(hosts) without spares, and a host listed twice.
    """
    warnings: list[str] = []
    listed = _Order(hosts)
    last = _last_map(inventories, listed, warnings)
    previous, former_order = (last.noderanks, _order_of(last)) if last is not None else (None, AS_RANKED)
    if noderanks is not None:
        noderanks = dict(noderanks)
        m = min(m, len(noderanks))
    elif nodes is None:
        noderanks = node_ranks.assign(previous, hosts)
    else:
        former = None if foreign else previous  # as many of them as this job wants
        noderanks = node_ranks.assign(previous, hosts, node_ranks.count(former, len(hosts), nodes))
        m = min(m, len(noderanks))
    Redundancy(len(noderanks), m).receivers(0)  # a wrong m is told before anything else
    if order is None:
        moved = foreign and bool(by_host)  # copies change hands anyway
        copies = any(i.copies for i in inventories.values())
        stands = copies and not moved and len(previous or ()) == len(noderanks)
        order = former_order if stands else domains.ordered(by_host or {}, noderanks, m)
    redundancy = Redundancy(len(noderanks), m, min(parity, m - 1), order)
    before = redundancy._replace(N=len(previous or ()), order=former_order)
    gone = tuple(sorted((previous or {}).keys() - inventories.keys(), key=listed))
    survivable = _survivable(previous, gone, before)
    held = _held(inventories, listed, warnings)
    by_place = sorted(inventories, key=listed)
    parities = Parities(() if foreign else ((h, c) for h in by_place for c in inventories[h].copies if c.of))
    epoch = max(
        (
            epoch + 1
            for inventory in inventories.values()
            for epoch in (inventory.max_epoch, *(copy.stamp.epoch for copy in inventory.copies))
        ),
        default=0,
    )
    epoch = max(epoch, min_epoch)
    context = _Context(
        noderanks,
        previous or {},
        frozenset(inventories),
        frozenset(gone),
        survivable,
        redundancy,
        before,
        listed,
        parities,
        foreign,
    )
    sealed = _known_sealed(inventories)
    sets = tuple(_plan_set(name, held[name], sealed.get(name, set()), context, warnings) for name in sorted(held))
    latest = max((i.map_restart for i in inventories.values() if i.noderanks is not None), default=-1)
    return RecoveryPlan(noderanks, epoch, sets, gone, survivable, tuple(warnings), latest, order)


def choose(copies: Iterable[Copy]) -> Stamp | None:
    """Highest stamp of which every rank 0..world-1 of one world has a proven copy among `copies`, all of one set."""
    ranks: dict[tuple[Stamp, int], set[int]] = defaultdict(set)
    for copy in copies:
        if copy.proven and not copy.of:
            ranks[copy.stamp, copy.world].add(copy.rank)
    return max((stamp for (stamp, world), found in ranks.items() if len(found) == world), default=None)


@dataclass(frozen=True, slots=True)
class _Context:
    noderanks: dict[str, int]
    previous: dict[str, int]
    reachable: frozenset[str]
    gone: frozenset[str]
    survivable: bool
    redundancy: Redundancy
    former: Redundancy
    listed: _Order
    parities: Parities
    foreign: bool


class _Order:
    """Sort key for hosts: the allocation's order, then the others by name."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._positions = {host: position for position, host in enumerate(hosts)}

    def __call__(self, host: str) -> tuple[int, str]:
        return (self._positions.get(host, len(self._positions)), host)


_Held = dict[tuple[str, int], dict[str, Copy]]  # (digest, used bytes) -> host -> its copy, in host order


def _last_map(inventories: Mapping[str, Inventory], listed: _Order, warnings: list[str]) -> Inventory | None:
    """One that knows the newest map."""
    known = [inventories[host] for host in sorted(inventories, key=listed)]
    known = [inventory for inventory in known if inventory.noderanks is not None]
    if not known:
        return None
    latest = max(inventory.map_restart for inventory in known)
    known = [inventory for inventory in known if inventory.map_restart == latest]
    # Spares change the map within an incarnation: who was in the last round that anybody took knows the newest.
    newest = max(inventory.max_epoch for inventory in known)
    known = [inventory for inventory in known if inventory.max_epoch == newest]
    for inventory in known[1:]:
        if (inventory.noderanks, inventory.order) != (known[0].noderanks, known[0].order):
            warnings.append(
                f"node-rank maps of restart {latest} differ: using that of {known[0].host}, not of {inventory.host}"
            )
    return known[0]


def _order_of(last: Inventory) -> Order:
    """Of its map; that of the ranks where what an agent says of it cannot be."""
    try:
        order = Order(last.order)
    except ValueError:
        return AS_RANKED
    return order if len(order.ranks) == len(last.noderanks or ()) else AS_RANKED


def _survivable(previous: dict[str, int] | None, gone: tuple[str, ...], redundancy: Redundancy) -> bool:
    if previous is None:
        return True
    N = len(previous)
    lost = {previous[host] for host in gone}
    if redundancy.m > N or any(not 0 <= rank < N for rank in lost):
        return not gone
    return redundancy.survives(lost)


def _known_sealed(inventories: Mapping[str, Inventory]) -> dict[str, set[Stamp]]:
    sealed: dict[str, set[Stamp]] = defaultdict(set)
    for inventory in inventories.values():
        for name, stamp in inventory.sealed:
            sealed[name].add(stamp)
    return sealed


def _held(
    inventories: Mapping[str, Inventory], listed: _Order, warnings: list[str]
) -> dict[str, dict[tuple[Stamp, int], dict[int, _Held]]]:
    """set -> (stamp, world) -> rank -> contents -> host -> its copy. More than one content is a disagreement."""
    held: dict[str, dict[tuple[Stamp, int], dict[int, _Held]]] = {}
    for host in sorted(inventories, key=listed):
        for copy in inventories[host].copies:
            if not 0 <= copy.rank < copy.world or copy.home < 0:
                warnings.append(
                    f"{host}'s copy of set {copy.set!r} is ignored: rank {copy.rank} of {copy.world}, "
                    f"home {copy.home} is impossible"
                )
                continue
            if copy.of:
                continue
            stamps = held.setdefault(copy.set, {})
            found = stamps.setdefault((copy.stamp, copy.world), {}).setdefault(copy.rank, {})
            found.setdefault((copy.digest, copy.used), {})[host] = copy
    return held


def _plan_set(
    name: str,
    stamps: dict[tuple[Stamp, int], dict[int, _Held]],
    sealed: set[Stamp],
    context: _Context,
    warnings: list[str],
) -> SetPlan:
    made = {
        (stamp, world): context.parities.made(name, stamp, world, ranks) for (stamp, world), ranks in stamps.items()
    }
    complete = [
        (stamp, world)
        for (stamp, world), ranks in stamps.items()
        if len(ranks) + len(made[stamp, world]) == world and all(_counts(found) for found in ranks.values())
    ]
    void = {key for key in complete if not _is_common(stamps[key], made[key], context)}
    choosable = [key for key in complete if key not in void]
    for stamp, _ in sorted(void):
        if not choosable or stamp > max(choosable)[0]:
            warnings.append(f"set {name!r}: version {stamp} is left: its ranks do not mean the same moment with it")
    if not choosable:
        return _lost_set(name, stamps, sealed, context)
    chosen, world = max(choosable)
    if any(stamp == chosen and other != world for stamp, other in stamps):
        warnings.append(f"set {name!r}: copies of version {chosen} name different numbers of ranks; {world} is used")
    if sealed and chosen < max(sealed):
        warnings.append(f"set {name!r}: version {max(sealed)} was sealed but has lost shards; {chosen} is used")
    keep = (chosen, *_fallback(chosen, choosable, sealed))
    shards: list[Copy] = []
    pulls: list[Pull] = []
    by_rank = {rank: host for host, rank in context.noderanks.items()}
    N = len(by_rank)
    again: list[Made] = []
    where: dict[int, list[str]] = {}
    for rank in range(world):
        if (wanted := made[chosen, world].get(rank)) is not None:
            shards.append(wanted.copy)
            again.append(replace(wanted, dest_host=by_rank[wanted.copy.home % N]))
            continue
        keepers = _trusted(name, stamps[chosen, world][rank], context, warnings)
        shard = next(iter(keepers.values()))
        shards.append(shard)
        where[rank] = list(keepers)
        home = shard.home % N
        for turn, holder in enumerate(context.redundancy.holders(home)):
            dest = by_rank[holder]
            if dest not in keepers:
                pulls.append(Pull(dest, shard, _sources(by_rank[home], list(keepers), rank + turn)))
            elif context.foreign:
                pulls.append(Pull(dest, shard, _sources(dest, list(keepers), rank + turn)))
    settled = max(sealed & set(keep), default=None)
    if context.redundancy.parity and not context.foreign:
        new, whole = context.parities.lacking(shards, where, by_rank, context.redundancy)
        again += new
        if not whole:  # nobody could seal it: what follows has to be allowed to take its place
            settled = chosen
    newest = chosen >= max(sealed, default=chosen)
    return SetPlan(
        name, "chosen", chosen, world, tuple(shards), tuple(pulls), (), keep, settled, newest, tuple(again)
    )


def _is_common(ranks: Mapping[int, _Held], made: Mapping[int, Made], context: _Context) -> bool:
    """Return whether all shards of a version are of the same moment of the training."""
    marks = [next(iter(_best(found, context)[0].values())).mark for found in ranks.values()]
    return moments.is_common(moments.add([*marks, *(wanted.copy.mark for wanted in made.values())]))


def _proven(keepers: Mapping[str, Copy]) -> bool:
    return any(copy.proven for copy in keepers.values())


def _counts(found: _Held) -> bool:
    """Whether it is known what a shard was: from its home, or from replicas that agree."""
    return len(found) == 1 or any(_proven(keepers) for keepers in found.values())


def _fallback(chosen: Stamp, choosable: list[tuple[Stamp, int]], sealed: set[Stamp]) -> tuple[Stamp, ...]:
    """What is kept beside the chosen stamp: until that is sealed the last sealed one, else the next best. Where the
    chosen one is sealed nobody needs it but a training that finds the chosen one bad, until its slots are wanted."""
    older = {stamp for stamp, _ in choosable if stamp < chosen}
    return tuple(sorted(older if chosen in sealed else older & sealed or older)[-1:])


def _trusted(name: str, found: _Held, context: _Context, warnings: list[str]) -> dict[str, Copy]:
    """The copies of the best content of a shard."""
    best, *rest = _best(found, context)
    for other in rest:
        shard = next(iter(best.values()))
        warnings.append(
            f"set {name!r}: digests of shard {shard.rank} at version {shard.stamp} differ: "
            f"using that of {', '.join(best)}, not of {', '.join(other)}"
        )
    return best


def _best(found: _Held, context: _Context) -> list[dict[str, Copy]]:
    """Contents of a shard, the one first that most hosts agree on; of equals the home node's, then the first in host
    order. What a replica has made of its own tensors stands behind all others."""
    return sorted(
        found.values(),
        key=lambda keepers: (
            not _proven(keepers),
            -len(keepers),
            all(context.previous.get(host) != copy.home for host, copy in keepers.items()),
            context.listed(next(iter(keepers))),
        ),
    )


def _sources(home_host: str, keepers: list[str], turn: int) -> tuple[str, ...]:
    first = [host for host in keepers if host == home_host]
    others = [host for host in keepers if host != home_host]
    start = turn % len(others) if others else 0
    return (*first, *others[start:], *others[:start])


def _lost_set(
    name: str,
    stamps: dict[tuple[Stamp, int], dict[int, _Held]],
    sealed: set[Stamp],
    context: _Context,
) -> SetPlan:
    newest, world = max(stamps, key=lambda key: (key[0], len(stamps[key])))
    homes: dict[int, int] = {}
    others: dict[int, set[Stamp]] = defaultdict(set)
    for (stamp, of), ranks in sorted(stamps.items()):
        for rank, found in ranks.items():
            if of == world:
                homes[rank] = next(iter(next(iter(found.values())).values())).home
                others[rank].add(stamp)
    lost = tuple(
        LostShard(rank, _reason(rank, newest, homes.get(rank), others.get(rank, set()), context))
        for rank in range(min(world, MAX_LISTED))
        if rank not in stamps[newest, world]
    )
    outcome: Literal["lost", "never-sealed"] = "never-sealed" if context.survivable and not sealed else "lost"
    return SetPlan(name, outcome, None, world, (), (), lost, newest=False)


MAX_LISTED = 65536  # ranks looked at when shards are listed as lost: `world` is a number from a peer


def _reason(rank: int, newest: Stamp, home: int | None, others: set[Stamp], context: _Context) -> str:
    text = f"no complete copy of shard {rank} at version {newest}"
    if others:
        text += f", only of {', '.join(map(str, sorted(others)))}"
    N = len(context.previous)
    if home is None or not 0 <= home < N or context.redundancy.m > N:
        return text + (f"; gone: {', '.join(sorted(context.gone, key=context.listed))}" if context.gone else "")
    by_rank = {rank: host for host, rank in context.previous.items()}
    former = (home, *context.former.receivers(home))
    keepers = [by_rank.get(holder, f"node rank {holder}") for holder in former]
    states = (
        f"{host} ({'gone' if host in context.gone else 'reachable' if host in context.reachable else 'unknown'})"
        for host in keepers
    )
    return f"{text}; its holders were {', '.join(states)}"
